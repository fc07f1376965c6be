"""The planner says who drafts for each request in a cycle, and how many tokens at most.

FixedK lets a request's first drafter propose as much as the request allows. Planner asks the
controller, and tells it what a cycle cost and what came of it; a request may ask for fixed_k.
"""

from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from drafters.panel import Panel, Seat
from messages import Cycle, Draft

from .controller import Acceptance, Ask, Controller, Decision


class Wish(NamedTuple):
    """What a request allows in this cycle."""

    seat: Seat
    limit: int  # drafted tokens, at most
    remaining: int  # tokens until it ends
    is_fixed: bool = False  # it wants as many as that, whether it pays or not

    @classmethod
    def of(cls, s: Any) -> "Wish":
        """The wish of one of the core's sequences.

        Nothing is drafted at the prefill, nor where one token is left, nor where a draft waits to
        be verified again.
        """
        limit = min(s.request.num_speculative_tokens, s.remaining - 1) if s.num_steps else 0
        limit = limit if s.seat.draft is None else 0
        return cls(s.seat, limit, s.remaining, s.request.fixed_k)

    @property
    def can_draft(self) -> bool:
        return bool(self.limit and self.seat.states)

    @property
    def fixed(self) -> tuple[str, int]:
        """The first drafter, and all that is allowed."""
        return (next(iter(self.seat.states)), self.limit) if self.can_draft else ("", 0)


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

    def open(self, seat: Seat) -> None:
        """A new request: each of its drafters gets a record."""
        given = len(seat.prompt), seat.sampling.rule
        seat.records = {name: self.controller.record(name, *given) for name in seat.states}

    def plan(self, sequences: list[Any]) -> list[tuple[str, int]]:
        """Who drafts for each of the core's sequences, and how many tokens at most."""
        wishes = list(map(Wish.of, sequences))
        asks = [Ask(self._able(wish), wish.limit, wish.remaining) for wish in wishes]
        able = [i for i, ask in enumerate(asks) if ask.records]
        decisions = self.controller.plan([asks[i] for i in able], len(wishes))
        plan = [wish.fixed if wish.is_fixed else ("", 0) for wish in wishes]
        for i, decision in zip(able, decisions, strict=True):
            wishes[i].seat.decision = self.decisions[decision.drafter] = decision
            plan[i] = decision.drafter, decision.num_tokens
        self._unread = {}
        for wish, (name, limit) in zip(wishes, plan, strict=True):
            if limit:
                self._unread[name] = self._unread.get(name, 0) + wish.seat.records[name].unread
        return plan

    def _able(self, wish: Wish) -> dict[str, Acceptance]:
        """The records of whom to choose from: not of one that is known to have no proposal now."""
        if not wish.can_draft or wish.is_fixed:
            return {}
        seat, panel = wish.seat, self._panel
        able = [name for name in list(seat.states) if panel.guess(seat, name, 1) != []]
        able = able or list(seat.states)  # guessing may have cost the seat a drafter
        return {name: seat.records[name] for name in able if name in seat.states}

    def learn(self, seat: Seat, cycle: Cycle) -> None:
        """What a cycle says of each drafter that the request may choose from.

        Of those that did not draft: of what they would have drafted, how much came true.
        """
        tokens = [token.id for token in cycle.tokens]
        for name in list(seat.states):
            record = seat.records[name]
            if name == seat.asked:
                record.observe(cycle.num_drafted, cycle.num_accepted, seat.num_asked)
                record.unread = 0
                continue
            guess = self._panel.guess(seat, name, len(tokens))
            record.unread += len(tokens)
            if guess is None:
                record.observe(0, 0)
            else:
                pairs = zip(guess, tokens, strict=False)
                came_true = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                record.observe(len(guess), came_true, len(tokens))

    def timed(self, panel: Panel, drafts: list[Draft], times: list[float] | None) -> None:
        """What a cycle cost, in which these drafts and each request's pending token were verified.

        `times` says when it began, had drafted, had verified and was done. None where a prompt was
        read, which costs something else.
        """
        costs = self.controller.costs
        for call in panel.calls:
            costs.observe_draft(call.name, call.limits, self._unread[call.name], call.ms)
        if times:
            fed = [len(draft.tokens) + 1 for draft in drafts]
            before, passed, after = ((end - begin) * 1e3 for begin, end in pairwise(times))
            costs.observe_pass(len(fed), sum(fed), passed, before + after, max(fed))
