"""The planner says who drafts for each request in a cycle, and how many tokens at most.

FixedK lets a request's first drafter propose as much as the request allows. Planner asks the
controller, and tells it what a cycle cost and what came of it; a request may ask for fixed_k. What
was chosen serves several cycles where choosing takes long, and in a rest nothing is (rest.py).
"""

import time

from drafters.panel import TREE, Panel, Seat
from drafters.tree import longest
from messages import Cycle, Draft, TextSequence

from .acceptance import Acceptance
from .controller import RESTING, Ask, Controller, Decision, Pace

Plan = list[tuple[str, int]]  # for each request: who drafts, and how many tokens at most
NOBODY = "", 0
_FIRST = 5  # tokens a text drafts at most, until all of so many were accepted
_FEW = 4  # a batch of which no more than this part is new keeps its plan for the others
# Of a cycle: drafts were chosen, or are those chosen before; nothing is, or there is nobody to.
CHOSEN, KEPT, RESTS, IDLE = "chosen", "kept", "rests", "idle"


def limit_of(s: TextSequence) -> int:
    """How many tokens may be drafted for one of the core's sequences.

    None are at the prefill, nor where one token is left, nor where a draft waits to be verified
    again.
    """
    if not (s.num_steps and s.seat.states) or s.seat.draft is not None:
        return 0
    return min(s.request.num_speculative_tokens, s.remaining - 1)


def fixed(s: TextSequence) -> tuple[str, int]:
    """The first drafter, or all for a tree, and as much as is allowed."""
    if not (limit := limit_of(s)):
        return NOBODY
    return TREE if s.request.drafter == TREE else next(iter(s.seat.states)), limit


class FixedK:
    """Every draft has the length that its request asks for."""

    def open(self, seat: Seat) -> None:
        """A new request."""

    def plan(self, sequences: list[TextSequence]) -> Plan:
        """Who drafts for each of the core's sequences, and how many tokens at most."""
        return list(map(fixed, sequences))

    def learn(self, seat: Seat, cycle: Cycle) -> None:
        """What became of one request's draft."""

    def timed(self, panel: Panel, drafts: list[Draft], times: list[float] | None) -> None:
        """What a cycle cost."""


class Planner:
    """Lets the controller choose, in each cycle, for all requests of a batch together."""

    def __init__(self, controller: Controller, panel: Panel) -> None:
        self.controller, self._panel = controller, panel
        self.decisions: dict[str, Decision] = {}  # the last one on each drafter
        self._unread: dict[str, int] = {}  # tokens that each drafter has to read in this cycle
        self._way = IDLE
        self._who = frozenset[str | None]()  # may draft in this cycle
        self._plan: dict[Seat, tuple[str, int]] = {}  # what was chosen last
        self._left = self._served = 0  # cycles that this will serve, and has served
        self._spent_ms = 0.0  # on choosing and learning, in this cycle
        self._num_tokens = 0  # that came in this cycle
        if model := panel.choices.get(TREE):  # a tree has its steps
            controller.costs.shares[TREE] = controller.costs.shares.get(model[0], 0.0)

    def open(self, seat: Seat) -> None:
        """A new request: each of its drafters gets a record, and a tree of them."""
        rule = seat.sampling.rule
        names = [*seat.states, TREE] if len(self._panel.members(seat, TREE)) > 1 else seat.states
        seat.pace, seat.most = Pace(), _FIRST
        seat.records = {name: self.controller.record(name, rule) for name in names}
        self.controller.join()

    def plan(self, sequences: list[TextSequence]) -> Plan:
        """Who drafts for each of the core's sequences, and how many tokens at most."""
        self._num_tokens, self._unread, self._spent_ms = 0, {}, 0.0
        self._who = frozenset([s.request.drafter for s in sequences])
        new = [s for s in sequences if s.num_steps and s.seat not in self._plan]
        if self._left and len(new) <= len(sequences) // _FEW:
            self._left, self._served, self._way = self._left - 1, self._served + 1, KEPT
            if new:
                self._choose(new, len(sequences))
            plan = list(map(self._kept, sequences))
        elif self.controller.rest(len(sequences), self._who).begin():
            self._left, self._way = 0, RESTS
            plan = list(map(self._resting, sequences))
        else:
            plan = self._choose_anew(sequences)
        for s, (name, limit) in zip(sequences, plan, strict=True):
            if limit and name in s.seat.records:
                self._unread[name] = self._unread.get(name, 0) + self._missed(s, name)
        return plan

    def _kept(self, s: TextSequence) -> tuple[str, int]:
        """What was planned before, where it is still possible."""
        name, limit = self._plan.get(s.seat, NOBODY)
        can = limit and (name in s.seat.states or name == TREE)
        return (name, min(limit, limit_of(s))) if can else NOBODY

    def _resting(self, s: TextSequence) -> tuple[str, int]:
        """Nobody drafts, but for who wants a fixed K."""
        if s.request.fixed_k:
            return fixed(s)
        if s.seat.states and s.num_steps:
            said = s.seat.decision or RESTING
            said = said._replace(num_tokens=0, expected_speedup=1.0, is_probe=False, is_rest=True)
            s.seat.decision = said
        return NOBODY

    def _missed(self, s: TextSequence, name: str) -> int:
        """The tokens of a text that a drafter does not know; for a tree, of who knows least."""
        names = self._panel.members(s.seat, TREE) if name == TREE else [name]
        return len(s.tokens) - min(s.seat.records[name].num_read for name in names)

    def _choose_anew(self, sequences: list[TextSequence]) -> Plan:
        """Choose for all, and for how many cycles."""
        cycles, self._served, self._left, self._plan = self._served + 1, 0, 0, {}
        decisions = self._choose(sequences, len(sequences), cycles)
        self._way = CHOSEN if decisions else IDLE
        if decisions and not any(decision.is_probe for decision in decisions):
            rest = self.controller.rest(len(sequences), self._who)
            self._left = rest.serves(len(sequences)) - 1
        return [self._plan.get(s.seat, NOBODY) for s in sequences]

    def _choose(self, sequences: list[TextSequence], batch: int, cycles: int = 0) -> list[Decision]:
        """Plan for these of a batch. Returns the decisions on those who have a choice.

        It is the first choice for so many cycles: 0, if it is one for newcomers alone.
        """
        began = time.perf_counter()
        asks, asking = list[Ask](), list[Seat]()
        for s in sequences:
            seat, limit = s.seat, min(limit_of(s), s.seat.most)
            seat.goes_on, seat.guesses = None, {}
            if s.num_steps:
                self._plan[seat] = fixed(s) if s.request.fixed_k else NOBODY
            if limit and not s.request.fixed_k and (able := self._able(s, limit)):
                asks.append(Ask(able, limit, s.remaining, seat.pace))
                asking.append(seat)
        decisions = self.controller.plan(asks, batch, cycles)
        for seat, decision in zip(asking, decisions, strict=True):
            seat.decision = self.decisions[decision.drafter] = decision
            self._plan[seat] = decision[:2]
            if decision.num_tokens and seat.sampling.is_coupled:  # else see Chain
                record = seat.records[decision.drafter]
                seat.goes_on = record.doubts(decision.least_chance)
        self._spent_ms = (time.perf_counter() - began) * 1e3
        return decisions

    def _able(self, s: TextSequence, limit: int) -> dict[str, Acceptance]:
        """The records of whom to choose from: not of one that is known to have no proposal now."""
        seat, able = s.seat, {}
        for name in list(seat.states):
            record = self._record(s, name)
            guess = self._panel.guess(seat, name, limit)
            if guess is not None:
                seat.guesses[name] = guess
            if guess is None or guess.tokens:
                able[name] = record.with_evidence(guess.evidence if guess else 0)
        able = able or seat.records  # guessing may have cost it a drafter
        able = {name: record for name, record in able.items() if name in seat.states}
        if s.request.drafter == TREE and len(self._panel.members(seat, TREE)) > 1:
            able[TREE] = self._record(s, TREE)  # beside a chain of each of its drafters
        return able

    def _record(self, s: TextSequence, name: str) -> Acceptance:
        """A drafter's record, with what it has missed."""
        record = s.seat.records[name]
        record.unread, record.since = self._missed(s, name), s.num_steps - 1 - record.last
        return record

    def learn(self, seat: Seat, cycle: Cycle) -> None:
        """What a cycle says of each drafter that the request may choose from.

        Of those that did not draft, or not alone: of what they would have drafted, how much came
        true. Where nothing was chosen, only of a model that drafted.
        """
        self._num_tokens += cycle.num_kept
        if cycle.num_accepted < cycle.num_drafted:
            seat.most = _FIRST
        elif cycle.num_drafted >= seat.most:
            seat.most *= 2
        for name in seat.drafts.keys() & seat.records.keys():
            seat.records[name].num_read = cycle.cached + 1  # they are told of it all at once
        if self._way == CHOSEN:
            began = time.perf_counter()
            for name in list(seat.states):
                self._learn_of(name, seat, cycle)
            self._spent_ms += (time.perf_counter() - began) * 1e3
        elif seat.asked in seat.states and seat.asked not in seat.guesses:
            self._learn_of(seat.asked, seat, cycle)
        if seat.asked == TREE and cycle.is_whole:  # a cut one teaches nothing
            places = cycle.way[: cycle.num_accepted]
            record = seat.records[TREE]
            record.observe(len(cycle.draft.tokens), len(places), seat.num_asked, places)
            record.last = cycle.number

    def _learn_of(self, name: str, seat: Seat, cycle: Cycle) -> None:
        """What a cycle says of one drafter."""
        record, draft = seat.records[name], seat.drafts.get(name)
        tokens = [token.id for token in cycle.tokens]
        guess = seat.guesses.get(name) or self._panel.guess(seat, name, len(tokens))
        if name == seat.asked:
            # What a cut has left of a draft does not say that the drafter stopped.
            asked = seat.num_asked if cycle.is_whole else cycle.num_drafted
            seen = cycle.num_drafted, cycle.num_accepted, asked
            sure, way = cycle.draft.confidence, cycle.way[: cycle.num_drafted]
            record.learn_confidence([sure[i] for i in way] if sure else [], seen[1])
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

    def timed(self, panel: Panel, drafts: list[Draft], times: list[float] | None) -> None:
        """What a cycle cost, in which these drafts and each request's pending token were verified.

        `times` says when it began, had drafted, had verified and was done. None where a prompt was
        read, which costs something else.
        """
        drafting_ms = 0.0
        for name, (counts, ms) in panel.spent.items():
            self.controller.costs.observe_draft(name, counts, self._unread[name], ms)
            drafting_ms += ms
        if times:
            ms = (times[-1] - times[0]) * 1e3
            self.took(len(drafts), sum(len(draft.tokens) + 1 for draft in drafts), ms, drafting_ms)

    def took(self, batch: int, rows: int, ms: float, drafting_ms: float) -> None:
        """A whole cycle over so many rows took `ms`, and drafting in it `drafting_ms`."""
        choice_ms, rest = self._spent_ms, self.controller.rest(batch, self._who)
        if not (self._way == CHOSEN and self._left):  # else the next ones say what it costs
            pass_ms = max(0.0, ms - drafting_ms - choice_ms)
            self.controller.costs.observe_pass(batch, rows, pass_ms)
        if self._way in (CHOSEN, KEPT):
            rest.see(self._num_tokens / batch, batch, ms)
            if self._way == CHOSEN:
                rest.efforts.append(choice_ms)
        elif rows == batch:
            rest.see_plain(batch, ms)


def _came_true(guessed: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """How many tokens would have been drafted, how many of them came, and for how many asked."""
    drafted, came_true = min(len(guessed), len(tokens)), 0
    while came_true < drafted and guessed[came_true] == tokens[came_true]:
        came_true += 1
    return drafted, came_true, len(tokens)
