"""What is known of a drafter's tokens: how often they are accepted, by position and by confidence.

    αᵢ          the chance that the i-th token is accepted once those before it are
    reach(i)    α₁ · … · αᵢ: that the first i are all drafted and accepted
    taken(i)    that a draft comes to its i-th token at all: a drafter may stop before

A record belongs to one drafter and one request. It begins with what is typical of that drafter, and
what was seen last counts most.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod, sqrt
from operator import mul
from typing import Any

from .statistics import count_first

PRIOR = 0.85  # α before anything was seen
_KEPT, _OLDEST = 0.85, 4  # of what was seen, with each cycle; of at most so many at once
_TYPICAL_KEPT, _TYPICAL_WEIGHT = 0.99, 4.0  # the same of what is typical of a drafter
_NEW, _SETTLED = 8, 4  # cycles in which estimates are renewed each time; afterwards at every 4th
_LARGE = 1e9  # a unit that is brought back to 1, before numbers overflow


class Calibration:
    """How often tokens are accepted that a drafter was so sure of, by tenths of its confidence."""

    def __init__(self) -> None:
        """Before anything was seen it is believed."""
        self._reached = [_TYPICAL_WEIGHT] * 10
        self._accepted = [_TYPICAL_WEIGHT * (tenth + 0.5) / 10 for tenth in range(10)]
        self.mean = PRIOR  # share of all judged tokens that were accepted, recent ones above all

    def observe(self, confidence: float, is_accepted: bool) -> None:
        """A token that was judged."""
        tenth = min(9, int(10 * confidence))
        self._reached[tenth] = _TYPICAL_KEPT * self._reached[tenth] + 1
        self._accepted[tenth] = _TYPICAL_KEPT * self._accepted[tenth] + is_accepted
        self.mean += (1 - _TYPICAL_KEPT) * (is_accepted - self.mean)

    def chance(self, confidence: float) -> float:
        """That such a token is accepted, if those before it are."""
        tenth = min(9, int(10 * confidence))
        return self._accepted[tenth] / self._reached[tenth]


@dataclass
class Acceptance:
    """One drafter's record in one request: the conditional acceptance of each position.

    A drafter may stop before it has drafted what it was asked for. The position at which it stopped
    counts as reached and not accepted: so `reach` is the chance that a token is drafted and
    accepted.
    """

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)  # cycles that asked for so many tokens
    drafted: list[float] = field(default_factory=list)  # and those in which they were drafted
    since: int = 0  # cycles without a draft
    cycles: int = 0  # with one
    coverage: float = 1.0  # share of the cycles in which it had anything to propose when asked
    unread: int = 0  # tokens of the text that it will have to read first
    typical: "Acceptance | None" = field(default=None, repr=False, compare=False)
    calibration: Calibration = field(default_factory=Calibration, repr=False, compare=False)
    unit: float = 1.0  # what counts as one now: old cycles fade as it grows
    # What the controller made of it: for which terms and limit, and the option.
    known: tuple[Any, int, Any] = field(default=(None, 0, None), repr=False, compare=False)
    _reach: list[float] = field(default_factory=list, repr=False, compare=False)
    _taken: list[float] = field(default_factory=list, repr=False, compare=False)
    _alphas: list[float] = field(default_factory=list, repr=False, compare=False)
    # Records of proposals by their evidence (see Panel.guess).
    _by_evidence: dict[int, "Acceptance"] = field(default_factory=dict, repr=False, compare=False)

    def with_evidence(self, evidence: int) -> "Acceptance":
        """The record of proposals that rest on so much; it begins with what is typical of them.

        Example: what followed four equal words comes again more often than what followed one.
        """
        if not evidence:
            return self
        if evidence not in self._by_evidence:
            typical = self.typical.with_evidence(evidence) if self.typical else self
            self._by_evidence[evidence] = Acceptance(typical=typical)
        return self._by_evidence[evidence]

    def observe(
        self, drafted: int, accepted: int, asked: int = 0, places: Collection[int] | None = None
    ) -> None:
        """A cycle that asked for `asked` tokens, drafted `drafted` and accepted `accepted`.

        `places` are those of the accepted ones in a tree.
        """
        if asked:
            self.coverage += (1 - _KEPT) * ((drafted > 0) - self.coverage)
        if not drafted:
            self.since += 1
            return
        # It ages with the text, drafts or not; within bounds, as one probe is not much to go by.
        kept, self.since = _KEPT ** min(1 + self.since, _OLDEST), 0
        hits = accepted if places is None else places
        self.count(kept, drafted, hits, max(asked, drafted))
        if self.typical:
            self.typical.count(_TYPICAL_KEPT, drafted, hits, max(asked, drafted))

    def count(self, kept: float, drafted: int, accepted: Any, asked: int) -> None:
        """Age what was counted by position, and count so many more."""
        self._fade(kept)
        count_first(self.asked, asked, self.unit)
        count_first(self.drafted, drafted, self.unit)
        count_first(self.reached, min(asked, accepted + 1), self.unit)
        count_first(self.accepted, accepted, self.unit)

    def _fade(self, kept: float) -> None:
        """Let old counts weigh `kept` of what they did.

        The unit grows in their place: that is one number, and they are many.
        """
        if self.cycles < _NEW or not self.cycles % _SETTLED:
            self._reach, self._taken, self._alphas, self.known = [], [], [], (None, 0, None)
        self.cycles += 1
        self.unit /= kept
        if self.unit > _LARGE:
            for counts in (self.reached, self.accepted, self.asked, self.drafted):
                counts[:] = [count / self.unit for count in counts]
            self.unit = 1.0

    def alphas(self, count: int) -> list[float]:
        """α₁ … α_count; where little was seen a position is thought to be like the one before.

        With a typical record it is thought to be like the same position there, but better or worse
        as this request was before.
        """
        result, before = [], PRIOR
        expected = self.typical.settled(count) if self.typical else []
        for i in range(count):
            reached = self.reached[i] if i < len(self.reached) else 0.0
            accepted = self.accepted[i] if i < len(self.accepted) else 0.0
            weight = self._weight(self.reached, i) * self.unit
            if expected:
                level = sqrt(before / max(expected[i - 1], 1e-6)) if i else 1.0
                before = min(1.0, expected[i] * level)
            before = (accepted + weight * before) / (reached + weight)
            result.append(before)
        return result

    def settled(self, count: int) -> list[float]:
        """The same, not always up to the last cycle."""
        if len(self._alphas) < count:
            self._alphas = self.alphas(count)
        return self._alphas

    def _weight(self, counts: list[float], i: int) -> float:
        """Of what is typical at position i, beside what was counted there.

        What was thought before anything was seen fades with the cycles that came so far.
        """
        if self.typical:
            return _TYPICAL_WEIGHT
        cases = self.cycles * counts[i] / max(counts[0], 1e-9) if i < len(counts) else 0.0
        return _TYPICAL_WEIGHT / (1 + cases / _TYPICAL_WEIGHT)

    def taken(self, count: int) -> list[float]:
        """The chance that a draft of up to `count` tokens comes to its first, second, … one."""
        if len(self._taken) >= count:
            return self._taken[:count]
        expected = self.typical.taken(count) if self.typical else [1.0] * count
        self._taken = result = []
        for i in range(count):
            drafted = self.drafted[i] if i < len(self.drafted) else 0.0
            asked = self.asked[i] if i < len(self.asked) else 0.0
            weight = self._weight(self.asked, i) * self.unit
            result.append((drafted + weight * expected[i]) / (asked + weight))
        return result[:]

    def learn_confidence(self, confidence: list[float], accepted: int) -> None:
        """A draft with its drafter's confidence in each token, if it told; `accepted` were."""
        calibration = (self.typical or self).calibration
        for i, sure in enumerate(confidence[: accepted + 1]):
            calibration.observe(sure, i < accepted)

    def goes_on(self, least_chance: float, confidence: list[float]) -> bool:
        """Whether one more token is likely enough to be accepted, behind such tokens."""
        calibration = (self.typical or self).calibration
        return prod(map(calibration.chance, confidence)) * calibration.mean >= least_chance

    def doubts(self, least_chance: float) -> "Doubts":
        """The same question, to be asked of a draft in the making."""
        return Doubts(self, least_chance)

    def reach(self, count: int) -> list[float]:
        """The chance that 1, 2, … count tokens are all accepted."""
        if len(self._reach) < count:
            self._reach = list(accumulate(self.alphas(count), mul))
        return self._reach[:count]


@dataclass(frozen=True)
class Doubts:
    """Whether a draft goes on behind tokens of such confidence."""

    record: Acceptance
    least_chance: float

    def __call__(self, confidence: list[float]) -> bool:
        return self.record.goes_on(self.least_chance, confidence)

    @property
    def numbers(self) -> tuple[list[float], float, float]:
        """For a chain in C: chances by tenths of the confidence, their mean, and the least."""
        calibration = (self.record.typical or self.record).calibration
        chances = [calibration.chance((tenth + 0.5) / 10) for tenth in range(10)]
        return chances, calibration.mean, self.least_chance


class TreeAcceptance(Acceptance):
    """The record of drafts that branch, best tokens first: how often the i-th one was accepted.

    Whatever became of those before it: it may follow another one.
    """

    def count(self, kept: float, drafted: int, accepted: Collection[int], asked: int) -> None:
        """The same, with the places of the accepted tokens."""
        self._fade(kept)
        count_first(self.reached, drafted, self.unit)
        count_first(self.accepted, drafted, 0.0)
        for i in accepted:
            self.accepted[i] += self.unit

    def reach(self, count: int) -> list[float]:
        """The chance of the 1st, 2nd, … count-th token to be accepted; falling, or equal."""
        if len(self._reach) < count:
            expected = self.typical.reach(count) if self.typical else []
            blocks: list[tuple[float, int]] = []  # (mean, tokens): a larger one is spread backwards
            for i in range(count):
                reached = self.reached[i] if i < len(self.reached) else 0.0
                accepted = self.accepted[i] if i < len(self.accepted) else 0.0
                weight = self._weight(self.reached, i) * self.unit
                before = expected[i] if expected else PRIOR ** (i + 1)
                mean, size = (accepted + weight * before) / (reached + weight), 1
                while blocks and blocks[-1][0] < mean:
                    other, others = blocks.pop()
                    mean, size = (other * others + mean * size) / (others + size), others + size
                blocks.append((mean, size))
            self._reach = [mean for mean, size in blocks for _ in range(size)]
        return self._reach[:count]
