"""The one interface that every drafter implements.

    open(prompt) → [target prefill] → observe(empty draft) → (propose → verify → observe)* → close

A drafter holds weights that all requests share. What belongs to one request lives in the state that
`open` returns. The smallest drafter has `propose` alone; the one in README.md also keeps a state.

A drafter that proposed observes at once what became of its draft. If a merged draft was accepted
further than its own, a second verdict, with drafted = 0, has the tokens behind. A drafter that was
not asked observes before it is asked next: one verdict, with drafted = 0, has all tokens since. A
text's last cycle is observed only by a drafter that `keeps_outputs`.

A draft is a chain of tokens, or a tree if its `parents` say so (see tree.py).

A drafter may *draw* its tokens. It then needs the vocabulary's size, which `build` finds in the
context, and what `open` is given: the request's sampling, and its noise. `sample` of
runtime/sampling.py turns logits [V] into a token as the target does, by penalties, temperature and
cuts. How it draws depends on the request's rule:

    coupled     by noise.choose: the race that the target runs at this position, with the drafter's
                weights. The nearer they are to the target's, the more often both draw one token.
    rejection   by q, which Draft.probs [n, V] has to report: exactly what each token was drawn
                from, after all cuts. Another q changes the output's distribution.
    greedy      the largest logit: nothing is drawn

`sample` returns q where it is needed (sampling.needs_q), else None. Where nothing was drawn, as in
ngram, probs stay None by either rule. The position is the number of tokens before the token: so
`sample` gets the text with the draft so far. Under rejection a drafter drops no drawn token.
A whole drafter, which draws what followed earlier occurrences of the last token, rarely any other:

    import torch

    from drafters import Draft, Drafter
    from runtime.sampling import sample


    class Dice(Drafter):
        name = "dice"

        @classmethod
        def build(cls, context):
            drafter = cls()
            drafter.vocab_size = context.target.vocab_size
            return drafter

        def open(self, prompt, sampling, noise):
            return {"text": list(prompt), "given": (sampling, noise)}

        def propose(self, state, max_tokens):
            text, probs = list(state["text"]), []
            for _ in range(max_tokens):
                seen = torch.tensor(text)
                after = seen[1:][seen[:-1] == text[-1]]
                weights = torch.bincount(after, minlength=self.vocab_size) + 1e-6
                token, q = sample(weights.log(), text, *state["given"])
                text.append(token)
                probs += [] if q is None else [q]
            return Draft(text[len(state["text"]) :], torch.stack(probs) if probs else None)

        def observe(self, state, verdict):
            state["text"] += verdict.tokens
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from runtime.sampling import Noise, NothingLeft, confidence, sample
from runtime.values import Draft, Model, Output, Request, Sampling, Verdict

from .plan import DraftedText

MANY_WEIGHTS = 50_000_000  # with fewer, reading weights is a small part of a pass


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may be built from: the core's models and the command line's options.

    `target` and `draft` are the core's cached models; `draft` is None where none was loaded. The
    rows of its cache are those of the drafter draft_model.
    """

    target: Model
    draft: Model | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    wanted: str | None = None  # the drafter that the command line names
    named: Sequence[str] = ()  # and those for which it names files
    fast: bool = True  # a drafter's models may run in runtime/kernels/
    quantize: str | None = None  # and have their layers quantised there: "int8"
    timeout_s: float = 10.0  # of a call to a drafter that comes from a file
    mtp: str | None = None  # folder or hub id of an MTP head outside the target's checkpoint
    eagle3: str | None = None  # and of an EAGLE-3 head
    dflash: str | None = None  # and of a DFlash head
    prefix_cache_mb: int = 0  # for the keys and values of prompts read before; 0: none
    allow_pickle: bool = False  # whether weights may come from files that can run code
    suffix_cache: int = 0  # tokens of past outputs that the drafter suffix may keep
    suffix_corpus: Sequence[str] = ()  # files with texts in which it looks, too


@dataclass(slots=True, kw_only=True)
class ModelState:
    """What a drafter that runs a model knows of a request."""

    text: list[int]  # committed so far
    sampling: Sampling
    noise: Noise
    row: int = -1  # in the model's KV cache
    least_confidence: float = 0.0  # of a draft in all its tokens: see Chain. Set by the pool
    forced: Sequence[int] = ()  # what the grammar puts before the draft. Set by the pool


class Chain:
    """A model's draft in the making.

    It ends where the product of its tokens' confidence falls below `least_confidence`: one more
    token would hardly be accepted. Under rejection that is 0. Else a draft's length would reveal
    random numbers, which are used again after a rejection.
    """

    def __init__(self, state: ModelState, limit: int) -> None:
        """At most `limit` tokens."""
        self._state, self._limit = state, limit
        forced = state.forced[:limit]
        self.text = [*state.text, *forced]  # with the draft so far
        self._probs: list[Tensor] = []
        self._confidence = [1.0] * len(forced) if state.least_confidence else []

    @property
    def tokens(self) -> list[int]:
        return self.text[len(self._state.text) :]

    @property
    def is_open(self) -> bool:
        """Whether one more token is wanted."""
        is_sure = prod(self._confidence) >= self._state.least_confidence
        return is_sure and len(self.tokens) < self._limit

    def extend(self, logits: Tensor) -> int:
        """Choose the next token by the drafter's logits [V], as the target does.

        Where nothing may follow, the text may end there, and so the draft ends.
        """
        try:
            token, q = sample(logits, self.text, self._state.sampling, self._state.noise)
        except NothingLeft:
            self._limit = len(self.tokens)
            return 0  # for nobody
        if q is not None:
            self._probs.append(q)
        if self._state.least_confidence:
            self._confidence.append(confidence(logits, token))
        self.text.append(token)
        return token

    def draft(self, vocab_size: int = 0) -> Draft:
        """The drawn tokens as a Draft; `vocab_size` is the target's, which may be larger."""
        probs = torch.stack(self._probs) if self._probs else None
        if probs is not None and probs.shape[1] < vocab_size:
            probs = torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[1]))
        return Draft(self.tokens, probs, confidence=self._confidence)


class Drafter(ABC):
    """Proposes tokens; never decides. Whatever it proposes, the target's output stays the same.

    (Where a request is verified by rejection, only the output's distribution stays: see Draft.)
    """

    name: ClassVar[str]
    needs_hidden: bool = False  # whether verdicts are to bring hidden states of the target
    hidden_layers: tuple[int, ...] = (-1,)  # of which; -1 is the final norm's output
    block_size: int = 0  # tokens of its longest draft, if a shorter one costs as much
    num_step_weights: int = 0  # that a step of its model reads; 0: it runs none
    is_from_file: bool = False  # somebody else's: from_file.py sets it
    is_asked_alone: bool = False  # for each text: one text's fault is no other's
    # Built-in drafters only:
    rank: int = 9  # the one with the lowest begins, where none is named
    leads: bool = False  # it drafts first where a request has what it `needs`
    is_costly: bool = False  # in memory: loaded if it is named, or if the server may choose it
    stops_early: bool = False  # a state gets `least_confidence`, at which its draft is to end
    is_copy: bool = False  # of the target: it doubts what the target doubts, and chooses the same
    branches: bool = False  # a state gets `tree`, where a tree is welcome
    keeps_outputs: bool = False  # a state hears of the last tokens, too
    needs: str = ""  # a field of the request; without it there is nothing to draft from
    drafts_forced: bool = False  # what a grammar forces is its own draft
    accepts_forced_prefix: bool = False  # a state gets `forced`: its draft is to begin with them

    @classmethod
    def build(cls, context: Context) -> "Drafter":
        """Make the drafter. Raises ValueError, saying what to do, if it does not fit the target."""
        return cls()

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> Any:
        """A new request's state. By default the list of its tokens so far.

        The target draws the token at each position with `noise`. A drafter may draw with it, too:
        by `noise.choose(weights, None, position)`, or as this file's beginning shows.
        """
        return list(prompt)

    def attach(self, state: Any, text: DraftedText) -> None:  # noqa: B027
        """Take from a new text what its prompt does not tell: a row, a prediction, a grammar.

        Of a drafter from a file it is not called.
        """

    @abstractmethod
    def propose(self, state: Any, max_tokens: int) -> Draft:
        """At most `max_tokens` tokens that may follow; an empty draft means "no idea"."""

    @property
    def wanted_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states its verdicts are to bring; mostly none."""
        return tuple(self.hidden_layers) if self.needs_hidden else ()

    def wanted_states(self, output: Output, count: int) -> Tensor | None:
        """Its layers' states [count, D] of the first tokens of a pass over one text."""
        return self.hidden_of([{i: states[0][:count] for i, states in output.hidden.items()}])

    def propose_batch(self, states: list[Any], max_tokens: list[int]) -> list[Draft]:
        """`propose` for several requests, each with its limit; models share passes here."""
        return [self.propose(state, limit) for state, limit in zip(states, max_tokens, strict=True)]

    def observe(self, state: Any, verdict: Verdict) -> None:
        """Learn what became of the draft: roll back what was rejected, append `verdict.tokens`."""
        if not hasattr(state, "extend"):
            kind = type(state).__name__
            raise TypeError(f"open returned a {kind}: write return list(prompt), or observe, too")
        state.extend(verdict.tokens)

    def count(self, text: DraftedText, draft: Draft, judged: Draft, came: list[int]) -> None:  # noqa: B027
        """Note what became of its draft, which is a part of the `judged` one; these tokens came.

        Of a drafter from a file it is not called.
        """

    def close(self, state: Any) -> None:  # noqa: B027  (most drafters hold nothing to give back)
        """The request is over. Always called, also after an error."""

    def is_for(self, request: Request) -> bool:
        """Whether it may draft for a request."""
        return not self.needs or bool(getattr(request, self.needs))

    def guess(self, state: Any, max_tokens: int) -> list[int] | None:
        """What it would propose, if that costs next to nothing and draws nothing; else None.

        The controller asks, to know what a draft would be worth.
        """
        return None

    def evidence(self, state: Any) -> int:
        """How well founded the last guess is, up to 8: the length of the match, for example."""
        return 0

    @property
    def can_guess(self) -> bool:
        """Whether it has a `guess` of its own."""
        return getattr(self.guess, "__func__", None) is not Drafter.guess

    def hidden_of(self, parts: list[dict[int, Tensor]]) -> Tensor | None:
        """What it needs of a text's states by layer: its layers side by side, part behind part.

        One layer of one part is handed out as it is, and not copied.
        """
        if not self.needs_hidden:
            return None

        def joined(tensors: list[Tensor], dim: int) -> Tensor:
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)

        return joined([joined([part[i] for i in self.hidden_layers], -1) for part in parts], 0)

    def call(self, method: str, *arguments: Any, then: Callable[[Any], Any] | None = None) -> Any:
        """What `then` makes of a method's result, or that itself. TimedDrafter overrides this."""
        result = getattr(self, method)(*arguments)
        return then(result) if then else result

    def line_of(self, error: Exception, method: str) -> str:
        """Where its file failed, in words that follow those of the error; "" if it has none."""
        return ""


class ModelDrafter(Drafter):
    """One that runs a model, for all requests in the same forwards. A state is a ModelState."""

    stops_early = True

    def propose(self, state: ModelState, max_tokens: int) -> Draft:
        return self.propose_batch([state], [max_tokens])[0]


class GuessingDrafter(Drafter):
    """One that runs no model and draws nothing: what it would propose can be asked at any time."""

    @abstractmethod
    def guess(self, state: Any, max_tokens: int) -> list[int]:
        """What it proposes."""

    def propose(self, state: Any, max_tokens: int) -> Draft:
        return Draft(self.guess(state, max_tokens))


def first_choice(drafters: dict[str, Drafter], wanted: str | None = None) -> str:
    """The drafter to begin with: the wanted one, if it is one of these; "" if there is none."""
    return min(drafters, key=lambda n: (n != wanted, drafters[n].rank), default="")
