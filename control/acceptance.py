"""What is known of a drafter's tokens: how often they are accepted, by position and by confidence.

And what is known of texts: how long they become.

    αᵢ          the chance that the i-th token is accepted once those before it are
    reach(i)    α₁ · … · αᵢ: that the first i are all drafted and accepted
    taken(i)    that a draft comes to its i-th token at all: a drafter may stop before

A record belongs to one drafter and one request. It begins with what is typical of that drafter, and
what was seen last counts most.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Any

from messages import Doubts

PRIOR, PRIOR_OF_COPY = 0.85, 0.97  # α before anything was seen
_DECAY, _OLDEST = 0.85, 4  # a factor of what was seen, with each cycle; at most of so many at once
_TYPICAL_DECAY, _WEIGHT = 0.99, 4.0  # of a typical record, with each cycle; a prior's cases
_GOES_ON = 0.97  # the chance that a text passes a stretch, before any was seen
_SURE, _LONGEST = 0.9, 64  # of texts that are as long as is said; stretches that are told apart
_LENGTH_DECAY = 0.97  # of what lengths say, with each text
_FEW_TRIES = 4  # drafts: before so many it is not known what drafts bring
_NEW, _SETTLED = 8, 4  # cycles in which estimates are renewed each time; afterwards at every 4th


class Lengths:
    """How long texts become: the chance that one goes on for another stretch, by its length so far.

    It is learned from texts that ended, recent ones above all. A drafter that must read a prompt
    first should know how much of the text is left, or it reads in vain.
    """

    STRETCH = 16  # tokens

    def __init__(self) -> None:
        self._went_on = Shares()  # by stretch: of the texts that came so far, those that passed it

    def observe(self, num_tokens: int, is_whole: bool) -> None:
        """A text of so many tokens; without `is_whole` it was cut, so it might have gone on."""
        passed = min(num_tokens // self.STRETCH, _LONGEST)
        self._went_on.add(range(passed), passed + is_whole, _LENGTH_DECAY)

    def left(self, num_tokens: int, limit: int) -> float:
        """How many more tokens a text of so many gets in nine cases of ten; at most `limit`.

        The mean would have it read where a third of the texts, all short ones, lose by it.
        """
        chance, at = 1.0, num_tokens // self.STRETCH
        for begin in range(0, limit, self.STRETCH):
            goes_on = self._went_on.share(min(at, _LONGEST - 1), _GOES_ON, does_fade=True)
            if chance * goes_on < _SURE:
                part = (1 - _SURE / chance) / (1 - goes_on)
                return min(limit, begin + self.STRETCH * part)
            chance, at = chance * goes_on, at + 1
        return limit


class Calibration:
    """How often a drafter's tokens are accepted, by tenths of its confidence in them."""

    def __init__(self, is_copy: bool = False) -> None:
        """Before anything was seen it is believed; of a copy of the target it says nothing."""
        chances = (PRIOR_OF_COPY if is_copy else (tenth + 0.5) / 10 for tenth in range(10))
        self._reached, self._accepted = [_WEIGHT] * 10, [_WEIGHT * chance for chance in chances]
        self.mean = PRIOR  # share of all judged tokens that were accepted, recent ones above all

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """A token that was judged."""
        tenth = min(9, int(10 * confidence))
        self._reached[tenth] = _TYPICAL_DECAY * self._reached[tenth] + 1
        self._accepted[tenth] = _TYPICAL_DECAY * self._accepted[tenth] + is_accepted
        self.mean += (1 - _TYPICAL_DECAY) * (is_accepted - self.mean)

    def chance(self, confidence: float) -> float:
        """The chance that a token of this confidence is accepted, if those before it are."""
        tenth = min(9, int(10 * confidence))
        return self._accepted[tenth] / self._reached[tenth]


class Shares:
    """For each position in a draft: in how many cases it was a hit. New cases fade old ones.

    Example: after add(range(2), 3, 0.85) positions 1 to 3 have a case, and 1 and 2 a hit.
    """

    def __init__(self) -> None:
        self.cases: list[float] = []
        self.hits: list[float] = []

    def add(self, hits: Collection[int], cases: int, decay: float) -> None:
        """The first `cases` positions were tried, and those in `hits` were a success, from 0.

        All positions fade, also those that were not tried: one that failed may be tried again.
        """
        self.cases = [decay * n for n in self.cases] + [0.0] * (cases - len(self.cases))
        self.hits = [decay * n for n in self.hits] + [0.0] * (cases - len(self.hits))
        for i in range(cases):
            self.cases[i] += 1
        for i in hits:
            self.hits[i] += 1

    def share(self, i: int, expected: float, does_fade: bool) -> float:
        """Hits in cases, beside four cases as expected, which may fade as cases come."""
        if i >= len(self.cases):
            return expected
        weight = _WEIGHT / (1 + self.cases[i] / _WEIGHT) if does_fade else _WEIGHT
        return (self.hits[i] + weight * expected) / (self.cases[i] + weight)


@dataclass
class Acceptance:
    """One drafter's record in one request: the conditional acceptance of each position.

    A drafter may stop before it has drafted what it was asked for. The position at which it stopped
    counts as reached and not accepted: so `reach` is the chance that a token is drafted and
    accepted.
    """

    typical: "Acceptance | None" = field(default=None, repr=False)  # of all requests
    accepted: Shares = field(default_factory=Shares)  # of the positions that were reached
    drafted: Shares = field(default_factory=Shares)  # of the positions that were asked for
    cycles: int = 0  # with a draft
    last: int = 0  # which cycle of the text had the last one
    since: int = 0  # cycles without one
    coverage: float = 1.0  # share of the cycles in which it had anything to propose when asked
    num_read: int = 0  # tokens of the text that it knows
    unread: int = 0  # and those that it will have to read first
    steps: float = 1.0  # forwards of a model for each token behind the first: fewer in copied text
    calibration: Calibration = field(default_factory=Calibration, repr=False)
    _reach: list[float] = field(default_factory=list, repr=False)
    _taken: list[float] = field(default_factory=list, repr=False)
    # Records of proposals by their evidence (see DrafterPool.guess).
    _by_evidence: dict[int, "Acceptance"] = field(default_factory=dict, repr=False)

    @property
    def is_untried(self) -> bool:
        """Whether text is to be read for a drafter that has hardly drafted for any request."""
        typical = self.typical
        is_new = typical is not None and typical.cycles < _FEW_TRIES and typical.typical is None
        return is_new and self.unread > 0

    def with_evidence(self, evidence: int) -> "Acceptance":
        """The record of proposals that rest on so much; it begins with what is typical of them.

        Example: what followed four equal words comes again more often than what followed one.
        """
        if not evidence:
            return self
        if evidence not in self._by_evidence:
            typical = self.typical.with_evidence(evidence) if self.typical else self
            self._by_evidence[evidence] = Acceptance(typical)
        return self._by_evidence[evidence]

    def observe(
        self, drafted: int, accepted: int, asked: int = 0, places: Collection[int] | None = None
    ) -> None:
        """A cycle that asked for `asked` tokens, drafted `drafted` and accepted `accepted`.

        `places` are those of the accepted ones in a tree.
        """
        if asked:
            self.coverage += (1 - _DECAY) * ((drafted > 0) - self.coverage)
        if not drafted:
            self.since += 1
            return
        # It ages with the text, drafts or not; within bounds, as one probe is not much to go by.
        decay, self.since = _DECAY ** min(1 + self.since, _OLDEST), 0
        seen = drafted, accepted if places is None else places, max(asked, drafted)
        self._count(*seen, decay)
        if self.typical:
            self.typical._count(*seen, _TYPICAL_DECAY)

    def _count(self, drafted: int, accepted: Any, asked: int, decay: float) -> None:
        """Count a draft by position; what was counted before is multiplied by `decay`."""
        self._tire()
        self.drafted.add(range(drafted), asked, decay)
        self.accepted.add(range(accepted), min(asked, accepted + 1), decay)

    def _tire(self) -> None:
        """A cycle more: estimates are made again, at every 4th one once there are many."""
        if self.cycles < _NEW or not self.cycles % _SETTLED:
            self._reach, self._taken = [], []
        self.cycles += 1

    def alphas(self, count: int) -> list[float]:
        """α₁ … α_count; where little was seen a position is thought to be like the one before.

        With a typical record it is thought to be like the same position there, but better or worse
        as this request was before.
        """
        result, before = [], PRIOR
        reach = [1.0, *self.typical.reach(count)] if self.typical else []
        expected = [b / max(a, 1e-9) for a, b in zip(reach, reach[1:], strict=False)]
        for i in range(count):
            if expected:
                level = sqrt(before / max(expected[i - 1], 1e-6)) if i else 1.0
                before = min(1.0, expected[i] * level)
            before = self.accepted.share(i, before, not self.typical)
            result.append(before)
        return result

    def reach(self, count: int) -> list[float]:
        """The chance that 1, 2, … count tokens are all accepted, as of one of the last cycles."""
        if len(self._reach) < count:
            self._reach = list(accumulate(self.alphas(count), mul))
        return self._reach[:count]

    def taken(self, count: int) -> list[float]:
        """The chance that a draft of up to `count` tokens comes to its first, second, … one."""
        if len(self._taken) < count:
            expected = self.typical.taken(count) if self.typical else [1.0] * count
            self._taken = [
                self.drafted.share(i, chance, not self.typical) for i, chance in enumerate(expected)
            ]
        return self._taken[:count]

    def learn_steps(self, num_forwards: int, num_tokens: int) -> None:
        """A draft of so many tokens took a model so many forwards."""
        if num_tokens > 1:
            steps = (num_forwards - 1) / (num_tokens - 1)
            self.steps += (1 - _DECAY) * (steps - self.steps)

    def learn_confidence(self, confidence: list[float], accepted: int) -> None:
        """Learn from a draft's `confidence` in each token; the first `accepted` were accepted."""
        calibration = (self.typical or self).calibration
        for i, sure in enumerate(confidence[: accepted + 1]):
            calibration.observe(sure, i < accepted)

    def doubts(self, least_chance: float) -> Doubts:
        """When a draft of this drafter ends: where one more token has less than `least_chance`."""
        calibration = (self.typical or self).calibration
        chances = [calibration.chance((tenth + 0.5) / 10) for tenth in range(10)]
        return Doubts(chances, calibration.mean, least_chance)


class TreeAcceptance(Acceptance):
    """The record of drafts that branch, best tokens first: how often the i-th one was accepted.

    Whatever became of those before it: it may follow another one.
    """

    def _count(self, drafted: int, accepted: Collection[int], asked: int, decay: float) -> None:
        self._tire()
        self.accepted.add(accepted, drafted, decay)

    def reach(self, count: int) -> list[float]:
        """The chance of the 1st, 2nd, … count-th token to be accepted; falling, or equal."""
        if len(self._reach) < count:
            typical = self.typical
            expected = typical.reach(count) if typical else accumulate([PRIOR] * count, mul)
            shares = (self.accepted.share(i, p, not typical) for i, p in enumerate(expected))
            self._reach = list(accumulate(shares, min))
        return self._reach[:count]
