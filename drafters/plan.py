"""What each request of a batch is to have drafted in a cycle: by its own wish, or the controller's.

    plan → (the engine drafts and verifies) → learn, for each request → record_cycle

With FixedK a request's first drafter proposes as much as the request allows. auto/ has the plan of
those who let the controller choose.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.values import Cycle, Draft, Json, TextSequence

from .pool import TREE, Task

IDLE = "idle"  # no request may draft


class Decision(NamedTuple):
    """What was chosen, and the numbers behind it; costs in passes of plain decoding."""

    drafter: str
    num_tokens: int
    alpha: float = 0.0  # of the first position
    c: float = 0.0
    break_even: float = 1.0  # the chance of being accepted at which a draft of a token pays
    least_chance: float = 0.0  # the least acceptance at which one more drafted token pays
    expected_speedup: float = 1.0  # of the whole batch
    is_probe: bool = False
    is_timing: bool = False  # nothing was chosen: the clock measures plain cycles

    def as_dict(self) -> Json:
        """A dict for JSON, with the sentence."""
        values = {n: round(v, 4) if isinstance(v, float) else v for n, v in self._asdict().items()}
        return values | {"says": str(self)}

    def __str__(self) -> str:
        if self.is_timing:
            return "K=0 for now: a few plain cycles are timed, to compare with"
        alpha, c, even = map(_short, (self.alpha, self.c, self.break_even))
        if self.is_probe:
            return f"a probe, one token of {self.drafter}: α {alpha}, break-even {even} (c {c})"
        if self.num_tokens:
            expected = f"expected {self.expected_speedup:.2f}×"
            return f"{self.drafter}, K={self.num_tokens}: α {alpha}, c {c}, {expected}"
        if self.break_even > 1:
            work = f"to draft with {self.drafter} and verify"  # c is the first part of it
            return f"K=0 is faster here: {work} costs more than it can save (c {c})"
        if self.alpha >= self.break_even:  # it has text to read first, say
            return f"K=0 is faster now: starting {self.drafter} would not pay yet (α {alpha})"
        return f"K=0 is faster here: {self.drafter} has α {alpha} < break-even {even} (c {c})"


def _short(value: float) -> str:
    """Example: 0.714 -> ".71"."""
    return f"{value:.2f}".removeprefix("0")


@dataclass
class Plan:
    """The tasks of a batch in a cycle, and how they were chosen."""

    tasks: list[Task]
    kind: str = IDLE
    choice_ms: float = 0.0  # what choosing took, and learning
    unread: Counter[str] = field(default_factory=Counter)  # tokens that each drafter has to read


def limit_of(s: TextSequence) -> int:
    """How many tokens may be drafted for one of the core's sequences.

    None are at the prefill, nor where one token is left, nor where a draft waits to be verified
    again.
    """
    if not (s.num_steps and s.drafting.states) or s.drafting.draft is not None:
        return 0
    return min(s.request.num_speculative_tokens, s.remaining - 1)


def fixed(s: TextSequence) -> Task:
    """The first drafter, or all for a tree, and as much as is allowed."""
    if not (limit := limit_of(s)):
        return nothing(s)
    return Task(TREE if s.request.drafter == TREE else next(iter(s.drafting.states)), limit)


def nothing(s: TextSequence) -> Task:
    """No draft. The last decision is still shown."""
    return Task(decision=s.drafting.task.decision)


class FixedK:
    """Every draft has the length that its request asks for."""

    def open(self, s: TextSequence) -> None:
        """Begin with one of the core's sequences."""

    def close(self, s: TextSequence) -> None:
        """Forget a sequence."""

    def plan(self, batch: list[TextSequence]) -> Plan:
        """Give each sequence a drafter, and how many tokens it drafts at most."""
        return Plan(list(map(fixed, batch)))

    def learn(self, plan: Plan, s: TextSequence, cycle: Cycle) -> None:
        """Learn from what became of one sequence's draft, before its drafters observe it."""

    def record_cycle(
        self, plan: Plan, drafts: list[Draft], cycles: Collection[Cycle], times: list[float] | None
    ) -> None:
        """Learn from what a cycle cost that verified these drafts, and gave these cycles of texts.

        `times` says when it began, had drafted, had verified and was done. None where a prompt was
        read, which costs something else.
        """
