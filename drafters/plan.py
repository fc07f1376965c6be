"""Texts, and what each of a batch is to have drafted in a cycle: by its wish, or the controller's.

    plan → (the engine drafts and verifies) → learn, for each request → record_cycle

With FixedK a request's first drafter proposes as much as the request allows. drafters/auto/ has
the plan of those who let the controller choose.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.sampling import Noise
from runtime.values import MAX_SPECULATIVE_TOKENS, Cycle, Draft, Request, TextSequence, Verdict

IDLE = "idle"  # no request may draft
GRAMMAR = "grammar"  # who drafts what a request's grammar forces


class Task(NamedTuple):
    """What a text is to have drafted in a cycle."""

    drafter: str = ""  # a name, or that of several whose drafts are merged; empty for none
    limit: int = 0  # tokens, at most
    # A draft ends where the product of its tokens' confidence is lower. 0: never.
    least_confidence: float = 0.0
    decision: Any = None  # the controller's Decision, with its reasons: to be shown


class UnseenCycle(NamedTuple):
    """What came in a cycle. A drafter without a part in it observes it before it is asked next."""

    tokens: list[int]
    hidden: dict[int, Tensor]  # [tokens, D] by layer


@dataclass(eq=False)
class DraftedText:
    """The text of one request: its drafters' states, and what they drafted. The pool fills it."""

    request: Request
    noise: Noise
    row: int = -1  # in the target's KV cache
    matcher: Any = None  # where the text stands in its grammar; None: it has none
    forced: list[int] | None = None  # tokens that the grammar forces here; None: not asked yet
    states: dict[str, Any] = field(default_factory=dict)  # by drafter, without those that failed
    merge: str | None = None  # the name of all its drafters together, where the request wants that
    task: Task = Task()  # of this cycle
    drafts: dict[str, Draft] = field(default_factory=dict)  # of this cycle, by drafter
    draft: Draft | None = None  # what was proposed and is not judged yet
    unseen: dict[str, list[UnseenCycle]] = field(default_factory=dict)  # by drafter not asked
    warnings: list[str] = field(default_factory=list)
    failure: Exception | None = None  # a drafter's fault that is to end the request
    num_cached: int = 0  # tokens of the prompt that came from the prefix cache
    # Tokens of the prediction that were accepted, and those verified in vain.
    predicted: Counter[str] = field(default_factory=Counter)
    # Of chunks of a prompt that are read, by the position of their first token.
    hidden: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    # Of the text since its beginning, one after the other: states [tokens, D] by layer.
    states_read: list[dict[int, Tensor]] = field(default_factory=list)

    def forced_tokens(self, most: int) -> list[int]:
        """What the grammar forces next, where several drafters draft, and none draws."""
        if not self.matcher or len(self.states) < 2 or self.request.drafting.needs_q:
            return []
        if self.forced is None:
            self.forced = self.matcher.forced(MAX_SPECULATIVE_TOKENS)
        return self.forced[:most]

    def take(self, draft: Draft) -> None:
        """Let a draft be verified, or what is forced if it does not begin with that.

        A tree has branches beside what is forced. Instead of who was to draft, the grammar has made
        the other draft.
        """
        forced, self.draft = self.forced_tokens(self.task.limit), draft
        if draft.parents is None and draft.tokens[: len(forced)] != forced:
            self.draft, self.task = Draft(forced), self.task._replace(drafter=GRAMMAR)
            self.drafts = {name: each for name, each in self.drafts.items() if each.tokens}

    def settle(self, began: float) -> bool:
        """Cut the draft to what the grammar allows. Returns whether it has said that by now."""
        is_settled = self.matcher.settle(began)
        if is_settled and self.draft is not None:
            is_drawn = self.draft.probs is not None and not self.request.sampling.is_coupled
            self.draft = self.matcher.cut(self.draft, is_drawn)
        return is_settled

    def read(self) -> dict[int, Tensor]:
        """The states of the text so far, [tokens, D] by layer, of layers that all parts have."""
        first, *others = self.states_read
        layers = [layer for layer in first if all(layer in part for part in others)]
        return {layer: torch.cat([part[layer] for part in self.states_read]) for layer in layers}

    @property
    def first(self) -> str:
        """Who drafts where nothing is chosen: the first drafter, or all together; "" for none."""
        return self.merge or next(iter(self.states), "")


def split_verdict(verdict: Verdict, draft: Draft) -> list[Verdict]:
    """The verdicts for a drafter whose `draft` was cut, or merged into a tree.

    The first one says how far its draft was accepted. The other accepted tokens came from another
    drafter, so a second one has them as text.

    Example: 5 6 7 accepted, then 8; of a draft 5 9 -> [5, 6] with 1 of 2 accepted, and then [7, 8].
    """
    accepted, hidden = verdict.tokens[:-1], verdict.hidden
    paths = ([draft.tokens[i] for i in indexes] for indexes in draft.paths())
    count = max((len(path) for path in paths if path == accepted[: len(path)]), default=0)
    tokens, rest = verdict.tokens[: count + 1], verdict.tokens[count + 1 :]
    states = None, None
    if hidden is not None:
        states = hidden.tensor_split([len(hidden) - len(rest)])
    first = Verdict(len(draft.tokens), count, tokens, states[0])
    return [first, Verdict(0, len(rest) - 1, rest, states[1])] if rest else [first]


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
