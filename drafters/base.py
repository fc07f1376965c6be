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
from torch import Tensor

from .noise import Noise


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens.

    Only requests that are verified by rejection read `probs` [n, V] float32: the distribution q
    that each token was drawn from. None says that nothing was drawn (q is one-hot). There, and only
    there, two things bend the output's distribution: a q other than the one drawn from, and to
    withdraw a token because of what was drawn.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None

    @classmethod
    def of(cls, drawn: Sequence[tuple[int, Tensor | None]]) -> "Draft":
        """From each token with the q [V] that it was drawn from, or None for all of them."""
        probs = [q for _, q in drawn if q is not None]
        return cls([token for token, _ in drawn], torch.stack(probs) if probs else None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's judgement of one draft.

    Example: [a, b, c] drafted, b refused and B recovered -> Verdict(drafted=3, accepted=1,
    tokens=[a, B]). `hidden` [accepted + 1, D] (after prefill: [prompt, D]) holds the target's final
    hidden states at the newly cached positions: hidden[i] is the state from which tokens[i] was
    chosen. None unless `needs_hidden`. A drafter that was passed over gets the verdict on another's
    draft, with drafted=0.
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
    verification: str = "coupled"  # or "rejection": how drafts of sampled text are judged

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6  # softmax would be one-hot, but for overflow

    @property
    def is_coupled(self) -> bool:
        """Whether a draft is accepted for being the target's own choice; greedy always is."""
        return self.is_greedy or self.verification == "coupled"

    @property
    def rule(self) -> str:
        """The name under which drafts are counted: greedy, coupled or rejection."""
        return "greedy" if self.is_greedy else self.verification

    @property
    def transforms(self) -> tuple[float, int, float, float]:
        """What makes probabilities of penalised logits."""
        return self.temperature, self.top_k, self.top_p, self.min_p


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may be built from: the core's models and the command line's options.

    `target` and `draft` are the core's cached models (`draft` is None where no draft model was
    named), with `.model`, `.tokenizer`, `.forward(rows, tokens, num_logits)`, `.cache` and
    `.new_cache(num_layers)`.

    `sample(logits [V], text, sampling, noise)` is how a model drafter chooses: the token drawn
    after the request's own transforms (`text`: the tokens before it, drafts included), and the q
    [V] that it was drawn from where the request is verified by rejection, else None.
    """

    target: Any
    sample: Callable[[Tensor, list[int], Sampling, Noise], tuple[int, Tensor | None]]
    draft: Any | None = None
    num_rows: int = 1
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    fast: bool = True  # models of one's own may go through fastpath/
    timeout_s: float = 10.0  # of a call to a drafter that comes from a file


class Drafter(ABC):
    """Proposes tokens; never decides. Whatever it proposes, the target's output stays the same.

    (Where a request is verified by rejection, only the output's distribution stays: see Draft.)
    """

    name: ClassVar[str]
    needs_hidden: bool = False
    # Weights that one draft step reads; the controller's idea of its cost until it was measured.
    num_step_weights: int = 0

    @classmethod
    def build(cls, context: Context) -> "Drafter":
        """Make the drafter. Raises ValueError, saying what to do, if it does not fit the target."""
        return cls()

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> Any:
        """A new request's state. By default the list of its tokens so far.

        The target draws the token at each position with `noise`. A drafter that draws with the same
        noise, from weights close to the target's, mostly draws the same token: by
        `noise.choose(weights, None, position)`, where `position` is the number of tokens before it.
        """
        return list(prompt)

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
