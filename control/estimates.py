"""What the controller believes: what work costs here, how often drafts are accepted, and how long
texts become.

    αᵢ          the chance that the i-th token is accepted once those before it are
    reach(i)    α₁ · … · αᵢ: that the first i are all drafted and accepted
    taken(i)    that a draft comes to its i-th token at all: a drafter may stop before

    a pass over r rows          the curve of this machine and model, corrected by what passes take
    a draft of s steps          first_ms + (s − 1) · step_ms, which all requests that draft share

A clock errs to one side: caches are cold, or the machine does something else. Nothing is ever
measured too fast. So medians count, a few measurements are doubted if they are slow, and a fast one
wipes out what was slow before.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from operator import mul
from statistics import median_low  # of two measurements the faster is to be believed
from typing import Any, NamedTuple

from messages import Doubts

PRIOR, PRIOR_OF_COPY = 0.85, 0.97  # α before anything was seen
_DECAY, _OLDEST = 0.85, 4  # a factor of what was seen, with each cycle; at most of so many at once
_TYPICAL_DECAY, _WEIGHT = 0.99, 4.0  # of a typical record, with each cycle; a prior's cases
_GOES_ON = 0.985  # the chance that a text passes a stretch, before any was seen
_SURE, _LONGEST = 0.9, 128  # of texts that are as long as is said; stretches that are told apart
_LENGTH_DECAY = 0.97  # of what lengths say, with each text
_FEW_TRIES = 4  # drafts: before so many it is not known what drafts bring
_NEW, _SETTLED = 8, 4  # cycles in which estimates are renewed each time; afterwards at every 4th
_LATEST, _CONFIRMED = 8, 4  # measurements of a kind that are stored; so many are believed
_DOUBTFUL = 1.5  # times as long as expected: no more is believed until it is confirmed
_ROW_SHARE = 0.02  # what each further row costs of a pass, before anything is measured
_FREE_SHARE = 0.1  # of a pass: a token of a drafter without weights, until that is confirmed
_READ_SHARE, READ_ALONG = 0.05, 4  # of a step: a token to read; so many cost next to nothing
_SLOWER, _STAYS = 1.3, 32  # times as long as usual: an accident, until so many passes are so
_EXACT = 34  # rows up to which passes are told apart: a block's end may cost much
_RENEWED = 8  # passes until prices are made again


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


class Lengths:
    """How long texts become: the chance that one goes on for another stretch, by its length so far.

    A drafter that must read a prompt first should know how much of the text is left.
    """

    STRETCH = 8  # tokens

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


@dataclass
class Acceptance:
    """One drafter's record in one request; it begins with what is typical of the drafter.

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
        """The record of proposals that rest on so much.

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


def believed(known: Collection[float], expected: float) -> float:
    """What is believed of measurements: their median; few ones are doubted where they are slow."""
    if len(known) < _CONFIRMED:
        return min(min(known, default=expected), _DOUBTFUL * expected)
    return median_low(known)


def between(xs: Sequence[float], ys: Sequence[float], x: float, goes_on: bool = False) -> float:
    """The height at `x` of the line through points; beyond the last it may go on.

    It goes on as it went over its second half: the last step may be the end of a block.

    Example: between([1, 16, 32, 33], [10, 16, 32, 50], 50, goes_on=True) -> 84, not 356.
    """
    i = min(bisect_left(xs, x), len(xs) - 1)
    if x <= xs[0] or len(xs) == 1 or (x >= xs[-1] and not goes_on):
        return ys[i]
    j = i - 1 if x <= xs[i] else bisect_right(xs, xs[i] / 2) - 1
    return ys[i] + (ys[i] - ys[j]) * (x - xs[i]) / (xs[i] - xs[j])


class DraftPrice(NamedTuple):
    """What a drafter's draft costs, in ms."""

    first_ms: float  # a draft of one token
    step_ms: float  # each further step: for a model of all requests that draft, else of one
    read_ms: float  # each token of the text that it has missed


class Prices(NamedTuple):
    """What passes and drafts cost in a batch, in ms."""

    plain_ms: float  # a pass without drafts
    drafts: dict[str, DraftPrice]
    rows_ms: dict[int, list[float]]  # see Costs.rows_ms


class Costs:
    """What is known of the target's passes and of each drafter's drafts.

    Before anything was measured, numbers of weights stand in for it: a model that decodes spends
    its time reading them. Costs are in passes of plain decoding then, and else in ms; both serve,
    as only ratios count.
    """

    def __init__(
        self,
        num_target_weights: int,
        num_step_weights: dict[str, int],
        at_once: dict[str, int] | None = None,
    ) -> None:
        """Numbers of weights that a pass, and a draft step of each drafter, read.

        Example: Costs(100, {"mtp": 20}) -> a step of mtp costs a fifth of a pass. Those in
        `at_once` draft up to so many tokens in a single step.
        """
        self.at_once = at_once or {}
        self.shares = {n: size / num_target_weights for n, size in num_step_weights.items()}
        self.curve = [1.0, 2.0], [1.0, 1.0 + _ROW_SHARE]  # rows, and what a pass over them takes
        self._measured: dict[str, DraftPrice] = {}  # of one request, in the curve's ms
        # By class of batches (1, 2 to 3, 4 to 7, …) and rows: the latest ms.
        self._passes: dict[int, dict[int, deque[float]]] = {}
        # By drafter and class of requests that draft: of one step, of each further one.
        self._drafts: dict[tuple[str, int], tuple[deque[float], deque[float]]] = {}
        self._slow = 0  # the last passes that were slower than usual
        self._this_cycle: list[tuple[str, list[int], int, float]] = []  # drafts of this cycle
        self._count = 0  # passes so far
        self._prices: dict[tuple[int, int], Prices] = {}

    def start_from(self, curve: Any) -> None:
        """Believe what was measured of this machine and model: see serving/curve.py."""
        if len(curve.pass_ms) > 1:
            self.curve = list(curve.pass_ms), list(curve.pass_ms.values())
        self._measured = {
            name: DraftPrice(each["call_ms"] + each["step_ms"], each["step_ms"], each["read_ms"])
            for name, each in curve.drafters.items()
        }
        self._prices.clear()

    @property
    def classes(self) -> list[int]:
        """The classes of batches that were measured: bit lengths of their sizes."""
        return list(self._passes)

    @property
    def drafters(self) -> set[str]:
        """Those whose drafts were measured."""
        return {name for name, _ in list(self._drafts)}

    def runs_model(self, name: str) -> bool:
        """Whether drafting takes steps of a model, which requests of a batch share."""
        return self.shares.get(name, 0.0) > 0

    def a_pass(self, batch: int, rows: float) -> float:
        """What a pass over so many rows of so many requests takes."""
        expected = self.expected(rows)
        if not self._passes:
            return expected
        kind = batch.bit_length()
        known = self._passes[min(self.classes, key=lambda other: abs(other - kind))]
        measured = sorted(known)
        most = max(measured, key=lambda r: len(known[r]))
        level = median_low(known[most]) / self.expected(most)
        ratios = [believed(known[r], level * e) / e for r in measured if (e := self.expected(r))]
        return expected * between(measured, ratios, rows)

    def expected(self, rows: float) -> float:
        """What the curve says of a pass over so many rows."""
        return between(*self.curve, rows, goes_on=True)

    def observe_draft(self, name: str, counts: list[int], unread: int, ms: float) -> None:
        """One call of a drafter, `unread` tokens having been missed.

        `counts` are each draft's forwards, where a model tells them, else its tokens.
        """
        self._this_cycle.append((name, counts, unread, ms))

    def observe_pass(self, batch: int, rows: int, ms: float) -> None:
        """A cycle with a pass over so many rows of so many requests, less drafting and choosing.

        The drafts observed before this call are those of this cycle.
        """
        self._count += 1
        rows = rows if rows <= _EXACT else rows // 4 * 4
        known = self._passes.setdefault(batch.bit_length(), {})
        latest = known.setdefault(rows, deque(maxlen=_LATEST))
        is_known = len(latest) >= _CONFIRMED
        usual = median_low(latest) if is_known else min(latest, default=ms)
        is_slow, is_fast = ms > _SLOWER * usual, _DOUBTFUL * ms < usual
        self._slow = self._slow + 1 if is_known and is_slow else 0
        if 0 < self._slow < _STAYS:
            self._this_cycle.clear()  # an accident says nothing of drafts, either
            return
        if is_known and (is_slow or is_fast):  # all that is known changes with the machine
            self._scale(ms / max(usual, 1e-9))
        elif is_fast:
            latest.clear()
        latest.append(ms)
        for name, counts, unread, draft_ms in self._this_cycle:
            self._learn_draft(name, counts, unread, draft_ms)
        self._this_cycle.clear()
        if self._count < 2 * _RENEWED or not self._count % _RENEWED:
            self._prices.clear()

    def _scale(self, factor: float) -> None:
        """The machine has become slower or faster by this factor."""
        self._slow, drafts = 0, [each for both in self._drafts.values() for each in both]
        for known in [*(d for rows in self._passes.values() for d in rows.values()), *drafts]:
            scaled = [ms * factor for ms in known]
            known.clear()
            known += scaled

    def _learn_draft(self, name: str, counts: list[int], unread: int, ms: float) -> None:
        steps, size = max(counts), len(counts)
        if name in self.at_once:
            steps = 1
        elif not self.runs_model(name):  # one request after the other
            steps, size, ms = 1, 1, ms / sum(counts)
        price = self.prices(size, size).drafts.get(name) or self._draft(name, size)
        expected = price.first_ms + (steps - 1) * price.step_ms
        first, more = self._drafts.setdefault(
            (name, size.bit_length()), (deque(maxlen=_LATEST), deque(maxlen=_LATEST))
        )
        if self.runs_model(name) and unread > READ_ALONG * size:
            ms = max(expected, ms - unread * price.read_ms)
        if steps == 1:
            first.append(ms)
        else:
            more.append(max(0.0, ms - price.first_ms) / (steps - 1))

    def _draft(self, name: str, requests: int) -> DraftPrice:
        """What a draft for so many requests takes."""
        plain_ms, share = self.a_pass(1, 1), self.shares.get(name, 0.0)
        unit, known = plain_ms, DraftPrice(share, share, _READ_SHARE * share)
        if name in self._measured:
            unit, known = plain_ms / self.curve[1][0], self._measured[name]
        known_sizes = [size for each, size in list(self._drafts) if each == name]
        kind = min(known_sizes, key=lambda size: abs(size - requests.bit_length()), default=0)
        first, more = self._drafts.get((name, kind), ((), ()))
        if not share:
            each = believed(first, _FREE_SHARE * plain_ms) if first else 0.0
            return DraftPrice(each, each, 0.0)
        grown = unit * self.a_pass(requests, requests) / max(plain_ms, 1e-9)
        first_ms = believed(first, grown * known.first_ms)
        step_ms = believed(more, first_ms * known.step_ms / max(known.first_ms, 1e-9))
        step_ms = 0.0 if name in self.at_once else step_ms
        return DraftPrice(first_ms, step_ms, unit * known.read_ms)

    def prices(self, batch: int, requests: int) -> Prices:
        """The prices of a batch in which so many requests may draft."""
        if (batch, requests) not in self._prices:
            drafts = {name: self._draft(name, requests) for name in self.shares}
            self._prices[batch, requests] = Prices(self.a_pass(batch, batch), drafts, {})
        return self._prices[batch, requests]

    def rows_ms(self, batch: int, requests: int, sharers: int, limit: int) -> list[float]:
        """What the row of each drafted token takes, if so many requests draft equally many."""
        known = self.prices(batch, requests).rows_ms
        if len(known.get(sharers, ())) < limit:
            passes = [self.a_pass(batch, batch + sharers * k) for k in range(limit + 1)]
            known[sharers] = [
                max(0.0, b - a) / sharers for a, b in zip(passes, passes[1:], strict=False)
            ]
        return known[sharers]
