"""The planner says who drafts for each request in a cycle, and how many tokens at most.

FixedK lets a request's first drafter propose as much as the request allows. Planner asks the
controller, and tells it what a cycle cost and what came of it; a request may ask for fixed_k. What
was chosen serves several cycles where choosing takes long, and in a rest nothing is (rest.py).
"""

import time
from typing import Any

from drafters.panel import TREE, Panel, Seat
from drafters.tree import longest
from messages import Cycle, Draft

from .acceptance import Acceptance
from .controller import RESTING, Ask, Controller, Decision, Pace

Plan = list[tuple[str, int]]  # for each request: who drafts, and how many tokens at most
NOBODY = "", 0
# Of a cycle: drafts were chosen, or are those chosen before; nothing is, or there is nobody to.
CHOSEN, KEPT, RESTS, IDLE = "chosen", "kept", "rests", "idle"


def limit_of(s: Any) -> int:
    """How many tokens may be drafted for one of the core's sequences.

    None are at the prefill, nor where one token is left, nor where a draft waits to be verified
    again.
    """
    if not (s.num_steps and s.seat.states) or s.seat.draft is not None:
        return 0
    return min(s.request.num_speculative_tokens, s.remaining - 1)


def fixed(s: Any) -> tuple[str, int]:
    """The first drafter, or all for a tree, and as much as is allowed."""
    if not (limit := limit_of(s)):
        return NOBODY
    return TREE if s.request.drafter == TREE else next(iter(s.seat.states)), limit


def _capped(s: Any, name: str, limit: int) -> tuple[str, int]:
    """What was planned before, where it is still possible."""
    can = limit and (name in s.seat.states or name == TREE)
    return (name, min(limit, limit_of(s))) if can else NOBODY


def _wake(seat: Seat) -> None:
    """Let the records know of the rest that is over."""
    cycles, tokens = seat.rested
    for record in seat.records.values() if cycles else ():
        record.unread += tokens
        record.since += cycles
    seat.rested = 0, 0


def _resting(s: Any) -> tuple[str, int]:
    """Nobody drafts, but for who wants a fixed K."""
    if s.request.fixed_k:
        return fixed(s)
    said = s.seat.decision
    if s.seat.states and s.num_steps and not (said and said.is_rest):
        said = (said or RESTING)._replace(num_tokens=0, is_probe=False, is_rest=True)
        s.seat.decision = said
    return NOBODY


class FixedK:
    """Every draft has the length that its request asks for."""

    def open(self, seat: Seat) -> None:
        """A new request."""

    def plan(self, sequences: list[Any]) -> Plan:
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
        self._plan: dict[Seat, tuple[str, int]] = {}  # what was chosen last
        self._left = 0  # cycles that this is kept
        self._spent_ms = 0.0  # on choosing and learning, in this cycle
        self._num_tokens = 0  # that came in this cycle
        if model := panel.choices.get(TREE):  # a tree has its steps
            controller.costs.shares[TREE] = controller.costs.shares.get(model[0], 0.0)

    def open(self, seat: Seat) -> None:
        """A new request: each of its drafters gets a record, and a tree of them."""
        given = len(seat.prompt), seat.sampling.rule
        names = [*seat.states, TREE] if len(self._panel.members(seat, TREE)) > 1 else seat.states
        seat.pace = Pace()
        self.controller.join()
        seat.records = {name: self.controller.record(name, *given) for name in names}

    def plan(self, sequences: list[Any]) -> Plan:
        """Who drafts for each of the core's sequences, and how many tokens at most."""
        self._num_tokens, self._unread, self._spent_ms = 0, {}, 0.0
        self.controller.who = frozenset([s.request.drafter for s in sequences])
        if self._left and all(s.seat in self._plan or not s.num_steps for s in sequences):
            self._left, self._way = self._left - 1, KEPT
            plan = [_capped(s, *self._plan.get(s.seat, NOBODY)) for s in sequences]
        elif self.controller.rests(len(sequences)):
            self._left, self._way = 0, RESTS
            plan = list(map(_resting, sequences))
        else:
            plan = self._choose(sequences)
        for s, (name, limit) in zip(sequences, plan, strict=True):
            if limit and (record := s.seat.records.get(name)):
                self._unread[name] = self._unread.get(name, 0) + record.unread
        return plan

    def _choose(self, sequences: list[Any]) -> Plan:
        began, plan = time.perf_counter(), [NOBODY] * len(sequences)
        asks, asking = list[Ask](), list[int]()
        for i, s in enumerate(sequences):
            seat, limit = s.seat, limit_of(s)
            seat.goes_on, seat.guesses = None, {}
            _wake(seat)
            if s.request.fixed_k:
                plan[i] = fixed(s)
            elif limit and (able := self._able(s, limit)):
                asks.append(Ask(able, limit, s.remaining, seat.pace))
                asking.append(i)
        decisions = self.controller.plan(asks, len(sequences))
        for i, decision in zip(asking, decisions, strict=True):
            seat = sequences[i].seat
            seat.decision = self.decisions[decision.drafter] = decision
            plan[i] = decision[:2]
            if decision.num_tokens and seat.sampling.is_coupled:  # else see Chain
                record = seat.records[decision.drafter]
                seat.goes_on = record.doubts(decision.least_chance)
        self._way = CHOSEN if asks else IDLE
        self._plan = {s.seat: own for s, own in zip(sequences, plan, strict=True) if s.num_steps}
        is_kept = asks and not any(decision.is_probe for decision in decisions)
        self._left = self.controller.keeps(len(sequences)) if is_kept else 0
        self._spent_ms = (time.perf_counter() - began) * 1e3
        return plan

    def _able(self, s: Any, limit: int) -> dict[str, Acceptance]:
        """The records of whom to choose from: not of one that is known to have no proposal now."""
        seat, able = s.seat, {}
        for name in list(seat.states):
            guess = self._panel.guess(seat, name, limit)
            if guess is None:
                able[name] = seat.records[name]
                continue
            seat.guesses[name] = guess
            if guess.tokens:
                able[name] = seat.records[name].with_evidence(guess.evidence)
        able = able or dict(seat.records)
        if len(able) + len(seat.guesses) > len(seat.states):  # guessing may have cost it a drafter
            able = {name: record for name, record in able.items() if name in seat.states}
        if s.request.drafter == TREE and len(self._panel.members(seat, TREE)) > 1:
            able[TREE] = seat.records[TREE]  # it is compared with a chain of each of its drafters
        return able

    def learn(self, seat: Seat, cycle: Cycle) -> None:
        """What a cycle says of each drafter that the request may choose from.

        Of those that did not draft, or not alone: of what they would have drafted, how much came
        true. Where nothing was chosen, only of who drafted.
        """
        self._num_tokens += cycle.num_kept
        if self._way in (CHOSEN, IDLE):
            began = time.perf_counter()
            self._learn(seat, cycle)
            self._spent_ms += (time.perf_counter() - began) * 1e3
            return
        if self._way == RESTS and not seat.asked:
            seat.rested = seat.rested[0] + 1, seat.rested[1] + cycle.num_kept
            return
        for name, record in seat.records.items():
            if name == TREE:
                self._learn_tree(seat, cycle)
            elif name not in seat.drafts:
                record.unread += cycle.num_kept
                record.since += 1
            else:
                record.unread = 0
                if name == seat.asked and name not in seat.guesses:
                    self._learn_own(seat, record, cycle)

    def _learn(self, seat: Seat, cycle: Cycle) -> None:
        tokens = [token.id for token in cycle.tokens]
        for name in list(seat.states):
            record, draft = seat.records[name], seat.drafts.get(name)
            record.unread = record.unread + len(tokens) if draft is None else 0
            guess = seat.guesses.get(name) or self._panel.guess(seat, name, len(tokens))
            if name == seat.asked:
                seen = self._learn_own(seat, record, cycle)
            elif draft is not None:
                seen = _came_true(longest(draft).tokens, tokens)
            else:
                seen = _came_true(guess.tokens, tokens) if guess else (0, 0, 0)
            if name != seat.asked:
                record.observe(*seen)
            if guess and guess.evidence:
                record.with_evidence(guess.evidence).observe(*seen)
        if TREE in seat.records:
            self._learn_tree(seat, cycle)

    def _learn_own(self, seat: Seat, record: Acceptance, cycle: Cycle) -> tuple[int, int, int]:
        """What became of the draft of who drafted alone."""
        # What a cut has left of a draft does not say that the drafter stopped.
        asked = seat.num_asked if cycle.is_whole else cycle.num_drafted
        seen = cycle.num_drafted, cycle.num_accepted, asked
        record.learn_confidence(cycle.draft.confidence[: cycle.num_drafted], cycle.num_accepted)
        record.observe(*seen)
        return seen

    def _learn_tree(self, seat: Seat, cycle: Cycle) -> None:
        """Which tokens of a tree were accepted; a cut one teaches nothing."""
        record, members = seat.records[TREE], self._panel.members(seat, TREE)
        if seat.asked == TREE and cycle.is_whole:
            places = cycle.places[: cycle.num_accepted]
            record.observe(len(cycle.tree.tokens), len(places), seat.num_asked, places)
        else:
            record.observe(0, 0)
        record.unread = max((seat.records[name].unread for name in members), default=0)

    def timed(self, panel: Panel, drafts: list[Draft], times: list[float] | None) -> None:
        """What a cycle cost, in which these drafts and each request's pending token were verified.

        `times` says when it began, had drafted, had verified and was done. None where a prompt was
        read, which costs something else.
        """
        costs, drafting_ms = self.controller.costs, 0.0
        for name, counts, ms in panel.spent():
            costs.observe_draft(name, counts, self._unread[name], ms)
            drafting_ms += ms
        if times:
            ms = (times[-1] - times[0]) * 1e3
            fed = len(drafts) + sum(len(draft.tokens) for draft in drafts)
            if not (self._way == CHOSEN and self._left):  # else the next ones say what it costs
                costs.observe_pass(len(drafts), fed, max(0.0, ms - drafting_ms - self._spent_ms))
            self.took(len(drafts), fed, ms, self._spent_ms)

    def took(self, batch: int, fed: int, ms: float, choice_ms: float) -> None:
        """A whole cycle over so many rows took so long, and choosing for it."""
        if self._way in (CHOSEN, KEPT):
            choice_ms = choice_ms if self._way == CHOSEN else 0.0
            self.controller.took(batch, self._num_tokens, ms, choice_ms)
        elif fed == batch:
            self.controller.took_plain(batch, ms)


def _came_true(guessed: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """How many tokens would have been drafted, how many of them came, and for how many asked."""
    drafted, came_true = min(len(guessed), len(tokens)), 0
    while came_true < drafted and guessed[came_true] == tokens[came_true]:
        came_true += 1
    return drafted, came_true, len(tokens)
