"""What each request of a batch is to have drafted in a cycle: by its own wish, or the controller's.

    plan → (the engine drafts and verifies) → learn, for each request → record_cycle

With FixedK a request's first drafter proposes as much as the request allows. auto/ has the plan of
those who let the controller choose.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from runtime.values import Cycle, Draft, TextSequence

from .base import Task

IDLE = "idle"  # no request may draft


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
    """The first drafter, or all together, and as much as is allowed."""
    limit = limit_of(s)
    return Task(s.drafting.first, limit) if limit else nothing(s)


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
