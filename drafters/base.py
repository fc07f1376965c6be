"""The one interface that every drafter implements, and the two values that pass through it.

    open(prompt) → [target prefill] → observe(empty draft) → (propose → verify → observe)* → close

A drafter holds shared weights and is read-only after construction; what belongs to one request
lives in the state that `open` returns. The smallest useful drafter is `propose` alone: see "Your
own drafter" in README.md.

Not covered: trees of drafts; a draft here is one chain of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens, and the distribution that each was drawn from.

    `probs` [n, V] float32 is q, exactly as it was when the token was drawn from it. None says that
    nothing was drawn: the drafter would propose the same again (q is one-hot). Two things bend the
    output's distribution: a q other than the one drawn from, and to withdraw a token because of
    what was drawn. A drafter that is not confident enough stops before it draws, not after.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None

    @classmethod
    def of(cls, drawn: Sequence[tuple[int, Tensor | None]]) -> "Draft":
        """From each token with the q [V] that it was drawn from, or None for all (greedy)."""
        probs = [q for _, q in drawn if q is not None]
        return cls([token for token, _ in drawn], torch.stack(probs) if probs else None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's judgement of one draft.

    Example: [a, b, c] drafted, b refused and B recovered -> Verdict(drafted=3, accepted=1,
    tokens=[a, B]). `hidden` [accepted + 1, D] (after prefill: [prompt, D]) holds the target's final
    hidden states at the newly cached positions: hidden[i] is the state from which tokens[i] was
    chosen. None unless `needs_hidden`.
    """

    drafted: int
    accepted: int
    tokens: list[int]
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == self.accepted + 1, (
            "a verdict is the accepted drafts and one target token"
        )


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen: transforms of the logits, applied in this order.

    At temperature 0 the likeliest token is taken (greedy), and what follows in the list is without
    effect. Off are: repetition_penalty 1, top_k 0 or less, top_p 1, min_p 0.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6  # softmax would be one-hot, but for overflow


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may be built from: the core's models and the command line's options.

    `target` and `draft` are the core's cached models (`draft` is None where no draft model was
    named), with `.model`, `.tokenizer`, `.forward(rows, tokens, num_logits)`, `.cache` and
    `.new_cache(num_layers)`.

    `sample(logits [V], text, sampling, rng)` is how a model drafter chooses: the token drawn after
    the request's own transforms (`text`: the tokens before it, drafts included), and the exact q
    [V] that it was drawn from, None when greedy.
    """

    target: Any
    sample: Callable[[Tensor, list[int], Sampling, Generator], tuple[int, Tensor | None]]
    draft: Any | None = None
    num_rows: int = 1
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    fast: bool = True  # models of one's own may go through fastpath/
    timeout_s: float = 10.0  # of a call to a drafter that comes from a file


class Drafter(ABC):
    """Proposes tokens; never decides. Whatever it proposes, the target's output stays the same."""

    name: ClassVar[str]
    needs_hidden: bool = False
    # Weights that one draft step reads; the controller's idea of its cost where a clock must not
    # decide (see serving/controller.py).
    num_step_weights: int = 0

    @classmethod
    def build(cls, context: Context) -> "Drafter":
        """Make the drafter. Raises ValueError, saying what to do, if it does not fit the target."""
        return cls()

    def open(self, prompt: Sequence[int], sampling: Sampling, rng: Generator) -> Any:
        """A new request's state. By default the list of its tokens so far.

        A drafter that draws its tokens draws with `rng`, the request's own, and with nothing else:
        the same seed then gives the same output.
        """
        return list(prompt)

    def modules(self, model: Any) -> list[Any]:
        """Modules of its own that run in the shapes of `model`, one of the core's cached models."""
        return []

    def doubt(self) -> str | None:
        """Why its proposals might depend on which requests share a forward; None if they do not.

        Asked once, before serving, where equal bits are promised. A draw of a token by chance then
        needs the same probabilities alone and in a batch.
        """
        return None

    def guess(self, state: Any, name: str, max_tokens: int) -> list[int] | None:
        """What candidate `name` would propose, nobody having asked: to be held against what came.

        For drafters that cost next to nothing and draw nothing; None from all others.
        """
        return None

    def candidates(self, state: Any) -> list[str]:
        """Names to choose from; more than its own where several drafters act as one."""
        return [self.name]

    def select(self, state: Any, name: str) -> None:  # noqa: B027  (most are only one)
        """The next draft is to come from candidate `name`."""

    @abstractmethod
    def propose(self, state: Any, max_tokens: int) -> Draft:
        """At most `max_tokens` tokens that may follow; an empty draft means "no idea"."""

    def propose_batch(self, states: list[Any], max_tokens: list[int]) -> list[Draft]:
        """`propose` for several requests, each with its limit; models share forwards here."""
        return [self.propose(state, limit) for state, limit in zip(states, max_tokens, strict=True)]

    def observe(self, state: Any, verdict: Verdict) -> None:
        """Learn what became of the draft: roll back what was refused, append `verdict.tokens`."""
        state.extend(verdict.tokens)

    def close(self, state: Any) -> None:  # noqa: B027  (most drafters hold nothing to give back)
        """The request is over. Always called, also after an error."""
