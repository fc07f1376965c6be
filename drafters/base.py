"""The one interface that every drafter implements, and the two values that pass through it.

    open(prompt) → [target prefill] → observe(empty draft) → (propose → verify → observe)* → close

A drafter holds shared weights and is read-only after construction; what belongs to one request
lives in the state that `open` returns. The smallest useful drafter is `propose` alone: see "Your
own drafter" in README.md.

Not covered: trees of drafts; a draft here is one chain of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens; `probs` [n, V] float32 is what each was drawn from, None = sure."""

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the request wants its tokens chosen. Greedy (temperature 0) is all there is so far."""

    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """What a drafter may be built from: the core's models and the command line's options.

    `target` and `draft` are the core's cached models (`draft` is None where no draft model was
    named), with `.model`, `.tokenizer`, `.forward(rows, tokens, num_logits)`, `.cache` and
    `.new_cache(num_layers)`.
    """

    target: Any
    draft: Any | None = None
    num_rows: int = 1
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1


class Drafter(ABC):
    """Proposes tokens; never decides. Whatever it proposes, the target's output stays the same."""

    name: ClassVar[str]
    needs_hidden: ClassVar[bool] = False

    @classmethod
    def build(cls, context: Context) -> "Drafter":
        """Make the drafter. Raises ValueError, saying what to do, if it does not fit the target."""
        return cls()

    def open(self, prompt: Sequence[int], sampling: Sampling, rng: Generator | None) -> Any:
        """A new request's state. By default the list of its tokens so far."""
        return list(prompt)

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
