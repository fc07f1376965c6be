"""The planner says which drafter drafts for each request in a cycle, and how many tokens at most.

    plan → (the engine drafts and verifies) → learn, for each request → record_cycle

FixedK lets a request's first drafter propose as much as the request allows. Planner asks the
controller, and hands it what a cycle cost and what came of it; a request may ask for fixed_k. What
was chosen serves several cycles where choosing takes long, and in a rest nothing is (rest.py).
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from drafters.pool import TREE, DrafterPool, Task
from drafters.tree import longest
from messages import Cycle, Draft, TextSequence

from .acceptance import Acceptance
from .controller import RESTING, Candidate, Controller, Decision

_FIRST = 5  # tokens a text drafts at most, until all of so many were accepted
_SURE, _FOLLOWED = 0.9, 4  # the chance of a prediction's next token, behind so many that came true
_FEW = 4  # a batch of which no more than this part is new keeps its plan for the others
# Kinds of cycle: drafts chosen now; chosen earlier; none, in a rest; no request may draft.
CHOSEN, REUSED, RESTS, IDLE = "chosen", "reused", "rests", "idle"


@dataclass
class Plan:
    """The tasks of a batch in a cycle, and how they were chosen."""

    tasks: list[Task]
    kind: str = IDLE
    names: frozenset[str | None] = frozenset()  # the drafters that the batch's requests ask for
    serves: int = 0  # further cycles
    choice_ms: float = 0.0  # what choosing took, and learning
    unread: dict[str, int] = field(default_factory=dict)  # tokens that each drafter has to read


def limit_of(s: TextSequence) -> int:
    """How many tokens may be drafted for one of the core's sequences.

    None are at the prefill, nor where one token is left, nor where a draft waits to be verified
    again.
    """
    if not (s.num_steps and s.drafting.states) or s.drafting.draft is not None:
        return 0
    return min(s.request.num_speculative_tokens, s.remaining - 1)


def asked(s: TextSequence) -> str | None:
    """Who may draft: what drafts bring with a prediction says nothing of texts without one."""
    return f"{s.request.drafter} and a prediction" if s.request.prediction else s.request.drafter


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


class Planner(FixedK):
    """Lets the controller choose, in each cycle, for all requests of a batch together."""

    def __init__(self, controller: Controller, pool: DrafterPool) -> None:
        self.controller, self._pool = controller, pool
        self.decisions: dict[str, Decision] = {}  # the last one on each drafter
        self.candidates: dict[TextSequence, Candidate] = {}  # of all open sequences
        self._chosen: dict[TextSequence, Task] = {}  # what was chosen last
        self._left = self._served = 0  # cycles that this will serve, and has served
        if model := pool.choices.get(TREE):  # a tree has its steps
            controller.costs.shares[TREE] = controller.costs.shares.get(model[0], 0.0)

    def open(self, s: TextSequence) -> None:
        """Give each drafter of a new sequence a record, and a tree of them."""
        text, sampling = s.drafting, s.request.sampling
        names = [*text.states, TREE] if len(self._pool.members(text, TREE)) > 1 else text.states
        how = sampling.rule, sampling.temperature
        records = {name: self.controller.record(name, *how) for name in names}
        self.candidates[s] = Candidate({}, records=records, most=_FIRST)
        self.controller.join()

    def close(self, s: TextSequence) -> None:
        self.controller.lengths.observe(len(s.output), s.finish_reason == "stop")
        self.candidates.pop(s, None)
        self._chosen.pop(s, None)

    def plan(self, batch: list[TextSequence]) -> Plan:
        """Choose a drafter for each sequence, reuse what was chosen before, or let all rest."""
        plan = Plan([], names=frozenset(map(asked, batch)))
        new = [s for s in batch if s.num_steps and s not in self._chosen]
        if self._left and len(new) <= len(batch) // _FEW:
            self._left, self._served, plan.kind = self._left - 1, self._served + 1, REUSED
            if new:
                self._choose(plan, new, len(batch))
            plan.tasks = list(map(self._reused, batch))
        elif self.controller.rest(len(batch), plan.names).begin():
            self._left, plan.kind = 0, RESTS
            plan.tasks = list(map(self._resting, batch))
        else:
            self._choose_anew(plan, batch)
        plan.serves = self._left
        for s, task in zip(batch, plan.tasks, strict=True):
            name = task.drafter
            if task.limit and name in self.candidates[s].records:
                plan.unread[name] = plan.unread.get(name, 0) + self._missed(s, name)
        return plan

    def _reused(self, s: TextSequence) -> Task:
        """The task chosen before, where it is still possible."""
        task = self._chosen.get(s, Task())
        can = task.limit and (task.drafter in s.drafting.states or task.drafter == TREE)
        return task._replace(limit=min(task.limit, limit_of(s))) if can else nothing(s)

    def _resting(self, s: TextSequence) -> Task:
        """The task in a rest: no draft, but for a request with a fixed K."""
        if s.request.fixed_k:
            return fixed(s)
        if not (s.drafting.states and s.num_steps):
            return nothing(s)
        said = s.drafting.task.decision or RESTING
        said = said._replace(num_tokens=0, expected_speedup=1.0, is_probe=False, is_rest=True)
        return Task(decision=said)

    def _missed(self, s: TextSequence, name: str) -> int:
        """The tokens of a text that a drafter does not know; for a tree, the most of a member."""
        names = self._pool.members(s.drafting, TREE) if name == TREE else [name]
        return len(s.tokens) - min(self.candidates[s].records[name].num_read for name in names)

    def _choose_anew(self, plan: Plan, batch: list[TextSequence]) -> None:
        """Choose for all, and for how many cycles."""
        cycles, self._served, self._left, self._chosen = self._served + 1, 0, 0, {}
        decisions = self._choose(plan, batch, len(batch), cycles)
        plan.kind = CHOSEN if decisions else IDLE
        if decisions and not any(decision.is_probe for decision in decisions):
            self._left = self.controller.rest(len(batch), plan.names).serves(len(batch)) - 1
        plan.tasks = [self._chosen.get(s) or nothing(s) for s in batch]

    def _choose(
        self, plan: Plan, sequences: list[TextSequence], batch: int, cycles: int = 0
    ) -> list[Decision]:
        """Choose for these of a batch. Returns the decisions on requests that have a choice.

        It is the first choice for so many cycles: 0, if it is one for newcomers alone.
        """
        began, asking = time.perf_counter(), list[TextSequence]()
        for s in [s for s in sequences if s.num_steps]:  # the others read their prompts
            candidate, candidate.guesses = self.candidates[s], {}
            if s.request.fixed_k:
                self._chosen[s] = fixed(s)
                continue
            self._chosen[s] = nothing(s)
            candidate.limit = min(limit_of(s), candidate.most)
            candidate.remaining = self.controller.lengths.left(len(s.output), s.remaining)
            if candidate.limit:
                candidate.able = self._able(s, candidate)
                asking += [s] if candidate.able else []
        decisions = self.controller.decide([self.candidates[s] for s in asking], batch, cycles)
        for s, decision in zip(asking, decisions, strict=True):
            self.decisions[decision.drafter], goes_on = decision, None
            if decision.num_tokens and s.request.sampling.is_coupled:  # else see Chain
                record = self.candidates[s].records[decision.drafter]
                goes_on = record.doubts(decision.least_chance)
            self._chosen[s] = Task(decision.drafter, decision.num_tokens, goes_on, decision)
        plan.choice_ms = (time.perf_counter() - began) * 1e3
        return decisions

    def _able(self, s: TextSequence, candidate: Candidate) -> dict[str, Acceptance]:
        """The records of the drafters to choose from: those that may have a proposal now."""
        text, able = s.drafting, dict[str, Acceptance]()
        for name in list(text.states):
            record = self._record(s, name)
            guess = self._pool.guess(text, name, candidate.limit)
            if guess is not None:
                candidate.guesses[name] = guess
            if guess is None or guess.tokens:
                able[name] = record.with_evidence(guess.evidence if guess else 0)
        sure = able.get("prediction")
        if sure and sure.reach(1)[0] > _SURE:
            if candidate.guesses["prediction"].evidence >= _FOLLOWED:
                return {"prediction": sure}  # no model needs to read the text, to be probed
        able = able or candidate.records  # guessing may have cost it a drafter
        able = {name: record for name, record in able.items() if name in text.states}
        if s.request.drafter == TREE and len(self._pool.members(text, TREE)) > 1:
            able[TREE] = self._record(s, TREE)  # beside a chain of each of its drafters
        return able

    def _record(self, s: TextSequence, name: str) -> Acceptance:
        """A drafter's record, with what it has missed."""
        record = self.candidates[s].records[name]
        record.unread, record.since = self._missed(s, name), s.num_steps - 1 - record.last
        return record

    def learn(self, plan: Plan, s: TextSequence, cycle: Cycle) -> None:
        """Learn what a cycle says of each drafter that the request may choose from.

        Of those that did not draft, or not alone: of what they would have drafted, how much came
        true. Where nothing was chosen, only of a model that drafted.
        """
        candidate, text = self.candidates[s], s.drafting
        if cycle.num_accepted < cycle.num_drafted:
            candidate.most = _FIRST
        elif cycle.num_drafted >= candidate.most:
            candidate.most *= 2
        for name in text.drafts.keys() & candidate.records.keys():
            candidate.records[name].num_read = cycle.cached + 1  # it observes all at once
        name = text.task.drafter
        if plan.kind == CHOSEN:
            began = time.perf_counter()
            for each in list(text.states):
                self._learn_of(each, s, cycle)
            plan.choice_ms += (time.perf_counter() - began) * 1e3
        elif name in text.states and name not in candidate.guesses:
            self._learn_of(name, s, cycle)
        if name == TREE and cycle.is_whole:  # a cut one teaches nothing
            places, record = cycle.path[: cycle.num_accepted], candidate.records[TREE]
            record.observe(len(cycle.draft.tokens), len(places), text.task.limit, places)
            record.last = cycle.number

    def _learn_of(self, name: str, s: TextSequence, cycle: Cycle) -> None:
        """Learn from a cycle about one drafter."""
        candidate, text = self.candidates[s], s.drafting
        record, draft = candidate.records[name], text.drafts.get(name)
        tokens = [token.id for token in cycle.tokens]
        guess = candidate.guesses.get(name) or self._pool.guess(text, name, len(tokens))
        if name == text.task.drafter:
            # What a cut has left of a draft does not say that the drafter stopped.
            asked = text.task.limit if cycle.is_whole else cycle.num_drafted
            seen = cycle.num_drafted, cycle.num_accepted, asked
            sure, path = cycle.draft.confidence, cycle.path[: cycle.num_drafted]
            record.learn_confidence([sure[i] for i in path] if sure else [], seen[1])
            if draft and draft.num_forwards:  # the drafter says
                record.learn_steps(draft.num_forwards, len(draft.tokens))
        elif draft is not None:
            seen = _came_true(longest(draft).tokens, tokens)
        else:
            seen = _came_true(guess.tokens, tokens) if guess else (0, 0, 0)
        record.observe(*seen)
        if seen[0]:
            record.last = cycle.number
        if guess and guess.evidence:
            record.with_evidence(guess.evidence).observe(*seen)

    def record_cycle(
        self, plan: Plan, drafts: list[Draft], cycles: Collection[Cycle], times: list[float] | None
    ) -> None:
        drafting_ms = 0.0
        for name, (counts, ms) in self._pool.spent.items():
            self.controller.costs.observe_draft(name, counts, plan.unread[name], ms)
            drafting_ms += ms
        if times:
            ms = (times[-1] - times[0]) * 1e3
            num_tokens = sum(cycle.num_kept for cycle in cycles)
            self.observe_pass(plan, drafts, num_tokens, ms=ms, drafting_ms=drafting_ms)

    def observe_pass(
        self, plan: Plan, drafts: list[Draft], num_tokens: int, *, ms: float, drafting_ms: float
    ) -> None:
        """A whole cycle gave so many tokens in `ms`, of which drafting took `drafting_ms`."""
        batch, rows = len(drafts), sum(len(draft.tokens) + 1 for draft in drafts)
        rest = self.controller.rest(batch, plan.names)
        if not (plan.kind == CHOSEN and plan.serves):  # else the next ones say what it costs
            pass_ms = max(0.0, ms - drafting_ms - plan.choice_ms)
            self.controller.costs.observe_pass(batch, rows, pass_ms)
        if plan.kind in (CHOSEN, REUSED):
            rest.see(num_tokens / batch, batch, ms)
            if plan.kind == CHOSEN:
                rest.efforts.append(plan.choice_ms)
        elif rows == batch:
            rest.see_plain(batch, ms)


def _came_true(guessed: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """How many tokens would have been drafted, how many of them came, and for how many asked."""
    drafted, came_true = min(len(guessed), len(tokens)), 0
    while came_true < drafted and guessed[came_true] == tokens[came_true]:
        came_true += 1
    return drafted, came_true, len(tokens)
