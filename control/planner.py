"""The planner says who drafts for each request in a cycle, and how many tokens at most.

FixedK lets a request's first drafter propose as much as the request allows. Planner asks the
controller, and tells it what a cycle cost and what came of it; a request may ask for fixed_k.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from drafters.panel import TREE, Guess, Panel, Seat
from drafters.tree import longest
from messages import Cycle, Draft

from .acceptance import Acceptance
from .controller import Ask, Controller, Decision, Pace


class Wish(NamedTuple):
    """What a request allows in this cycle."""

    seat: Seat
    limit: int  # drafted tokens, at most
    remaining: int  # tokens until it ends
    is_fixed: bool = False  # it wants as many as that, whether it pays or not
    is_tree: bool = False  # of all its drafters

    @classmethod
    def of(cls, s: Any) -> "Wish":
        """The wish of one of the core's sequences.

        Nothing is drafted at the prefill, nor where one token is left, nor where a draft waits to
        be verified again.
        """
        limit = min(s.request.num_speculative_tokens, s.remaining - 1) if s.num_steps else 0
        limit = limit if s.seat.draft is None else 0
        is_tree = s.request.drafter == TREE
        return cls(s.seat, limit, s.remaining, s.request.fixed_k, is_tree)

    @property
    def can_draft(self) -> bool:
        return bool(self.limit and self.seat.states)

    @property
    def fixed(self) -> tuple[str, int]:
        """The first drafter, or all for a tree, and as much as is allowed."""
        if not self.can_draft:
            return "", 0
        return TREE if self.is_tree else next(iter(self.seat.states)), self.limit


class FixedK:
    """Every draft has the length that its request asks for."""

    def open(self, seat: Seat) -> None:
        """A new request."""

    def plan(self, sequences: list[Any]) -> list[tuple[str, int]]:
        """Who drafts for each of the core's sequences, and how many tokens at most."""
        return [Wish.of(s).fixed for s in sequences]

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
        self.is_resting = False  # nothing is chosen in this cycle
        self._spent_ms = 0.0  # on choosing and learning, in this cycle
        if model := panel.choices.get(TREE):  # a tree has its steps
            controller.costs.shares[TREE] = controller.costs.shares.get(model[0], 0.0)

    def open(self, seat: Seat) -> None:
        """A new request: each of its drafters gets a record, and a tree of them."""
        given = len(seat.prompt), seat.sampling.rule
        names = [*seat.states, TREE] if len(self._panel.members(seat, TREE)) > 1 else seat.states
        seat.pace = Pace()
        self.controller.wake()
        seat.records = {name: self.controller.record(name, *given) for name in names}

    def plan(self, sequences: list[Any]) -> list[tuple[str, int]]:
        """Who drafts for each of the core's sequences, and how many tokens at most."""
        with self._choosing():
            wishes = list(map(Wish.of, sequences))
            for wish in wishes:
                wish.seat.goes_on, wish.seat.evidence = None, {}
            plan = [wish.fixed if wish.is_fixed else ("", 0) for wish in wishes]
            self.is_resting = self.controller.rests(len(wishes))
            if self.is_resting:
                self._rest(wishes)
            else:
                self._choose(wishes, plan)
            self._unread = {}
            for wish, (name, limit) in zip(wishes, plan, strict=True):
                if limit:
                    unread = wish.seat.records[name].unread
                    self._unread[name] = self._unread.get(name, 0) + unread
        return plan

    @contextmanager
    def _choosing(self) -> Iterator[None]:
        """Adds to the controller's own time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_ms += (time.perf_counter() - began) * 1e3

    def _rest(self, wishes: list[Wish]) -> None:
        """Tell that nothing was chosen."""
        for wish in wishes:
            if (said := wish.seat.decision) and not said.is_rest:
                wish.seat.decision = replace(said, num_tokens=0, is_probe=False, is_rest=True)

    def _choose(self, wishes: list[Wish], plan: list[tuple[str, int]]) -> None:
        """Put what the controller chooses into the plan."""
        asks = [Ask(self._able(w), w.limit, w.remaining, w.seat.pace) for w in wishes]
        able = [i for i, ask in enumerate(asks) if ask.records]
        decisions = self.controller.plan([asks[i] for i in able], len(wishes))
        for i, decision in zip(able, decisions, strict=True):
            seat = wishes[i].seat
            seat.decision = self.decisions[decision.drafter] = decision
            if seat.sampling.is_coupled and decision.drafter != TREE:  # else see Chain
                record = seat.records[decision.drafter]
                seat.goes_on = record.doubts(decision.least_chance)
            plan[i] = decision.drafter, decision.num_tokens

    def _able(self, wish: Wish) -> dict[str, Acceptance]:
        """The records of whom to choose from: not of one that is known to have no proposal now."""
        if not wish.can_draft or wish.is_fixed:
            return {}
        seat, able = wish.seat, {}
        for name in list(seat.states):
            guess = self._panel.guess(seat, name, 1)
            if guess is None:
                able[name] = seat.records[name]
            elif guess.tokens:
                seat.evidence[name] = guess.evidence
                able[name] = seat.records[name].with_evidence(guess.evidence)
        able = able or dict(seat.records)  # guessing may have cost the seat a drafter
        able = {name: record for name, record in able.items() if name in seat.states}
        if wish.is_tree and TREE in seat.records and len(self._panel.members(seat, TREE)) > 1:
            able[TREE] = seat.records[TREE]  # it is compared with a chain of each of its drafters
        return able

    def learn(self, seat: Seat, cycle: Cycle) -> None:
        """What a cycle says of each drafter that the request may choose from.

        Of those that did not draft, or not alone: of what they would have drafted, how much came
        true.
        """
        with self._choosing():
            if self.is_resting and not cycle.num_drafted:
                for record in seat.records.values():
                    record.unread += len(cycle.tokens)
                    record.since += 1
            else:
                self._learn(seat, cycle)

    def _learn(self, seat: Seat, cycle: Cycle) -> None:
        tokens = [token.id for token in cycle.tokens]
        for name in list(seat.states):
            record, draft = seat.records[name], seat.drafts.get(name)
            record.unread = record.unread + len(tokens) if draft is None else 0
            if name == seat.asked:
                evidence = seat.evidence.get(name, 0)
                # What a cut has left of a draft does not say that the drafter stopped.
                asked = seat.num_asked if cycle.is_whole else cycle.num_drafted
                seen = cycle.num_drafted, cycle.num_accepted, asked
                told = cycle.draft.confidence[: cycle.num_drafted]
                record.learn_confidence(told, cycle.num_accepted)
            elif draft is None:
                guess = self._panel.guess(seat, name, len(tokens))
                evidence, seen = guess.evidence if guess else 0, _came_true(guess, tokens)
            else:
                evidence = seat.evidence.get(name, 0)
                seen = _came_true(Guess(longest(draft).tokens[: len(tokens)]), tokens)
            record.observe(*seen)
            if evidence:
                record.with_evidence(evidence).observe(*seen)
        if TREE in seat.records:
            self._learn_tree(seat, cycle)

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
        costs, (chose_ms, self._spent_ms) = self.controller.costs, (self._spent_ms, 0.0)
        for name, counts, ms in panel.spent():
            costs.observe_draft(name, counts, self._unread[name], ms)
        if times:
            fed = [len(draft.tokens) + 1 for draft in drafts]
            before, passed, after = ((end - begin) * 1e3 for begin, end in pairwise(times))
            other_ms = before + after - chose_ms
            costs.observe_pass(len(fed), sum(fed), passed, other_ms, max(fed))
            if not self.is_resting:
                costs.observe_choice(len(fed), chose_ms)


def _came_true(guess: Guess | None, tokens: list[int]) -> tuple[int, int, int]:
    """How many tokens would have been drafted, how many of them came, and for how many asked."""
    if guess is None:
        return 0, 0, 0
    pairs = zip(guess.tokens, tokens, strict=False)
    came_true = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return len(guess.tokens), came_true, len(tokens)
