"""What the controller believes: what work costs here, how often drafts are accepted, and how long
texts become.

    reach(i)              α₁ · … · αᵢ: that the first i tokens are all drafted and accepted
    α of a model          how certain the target is of this text's tokens, and what this model is
                          right more (or less) often than that
    a pass over r rows    the curve of this machine and model, corrected by what passes take
    a draft of s steps    first_ms + (s − 1) · step_ms by the curve, times what drafts take in that

A clock errs to one side: caches are cold, or the machine does something else. Nothing is ever
measured too fast. So medians count, and a few measurements are doubted if they are slow.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import fmean, median_low  # of two measurements the faster is to be believed
from typing import Any, NamedTuple

from runtime.values import MAX_SPECULATIVE_TOKENS, Json, TextSequence

PRIOR = 0.85  # α before anything was seen
CERTAIN = 0.83  # how certain the target is of its tokens, before anything was seen
# What other texts taught counts in a text as so many of its own tokens, and as so many judged ones.
# Of its own at most so many count: texts change.
_OF_OTHERS, _MOST, _JUDGED_OF_OTHERS, _MOST_JUDGED = 12, 64, 24, 32
LONGEST = MAX_SPECULATIVE_TOKENS  # positions of a draft
_PRIORS = [PRIOR**i for i in range(1, LONGEST + 1)]
# How far a cycle moves what is believed of a request and of all: at least, and as one more case
# beside what was seen and so many.
_RATE, _TYPICAL_RATE, _WEIGHT = 0.1, 0.01, 3
_FORGOTTEN = 1 / 2048  # of what is believed, by a cycle without a draft
_TEXTS = 64  # whose lengths are known
_LATEST, _CONFIRMED = 8, 4  # measurements of a kind that are stored; so many are believed
_TRIED = 2  # passes over so many rows, until a request may draft twice as many
_DOUBTFUL = 1.5  # times as long as expected: no more is believed until it is confirmed
_ROW_SHARE = 0.02  # what each further row costs of a pass, before anything is measured
_FREE_SHARE = 0.001  # of a pass: a token of a drafter without weights, until that is measured
_READ_SHARE, READ_ALONG = 0.05, 4  # of a step: a token to read; so many cost next to nothing
_SLOWER, _STAYS = 1.3, 32  # times as long as usual: an accident, until so many passes are so
_EXACT = 34  # rows up to which passes are told apart: a block's end may cost much
_RENEWED = 8  # passes until prices are made again
_FEW = 5  # drafted tokens, whose mean time is told
Call = tuple[str, list[int], int, float]  # of a drafter: see Costs.observe_pass


class Lengths:
    """How long the latest texts became: of what is left a drafter must win what reading takes.

    Whoever has a prompt of about the same length often asks for the same: a number of a long page,
    say. So texts are told apart by the powers of two that their prompts have reached.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}

    def observe(self, s: TextSequence) -> None:
        """Learn from a text that ended. What did not stop by itself might have gone on."""
        length = len(s.output) if s.finish_reason == "stop" else inf
        latest = self._latest.setdefault(self._kind(s), deque(maxlen=_TEXTS))
        latest.append(length)

    def left(self, s: TextSequence) -> float:
        """How many more tokens this text gets in half of the cases; at most what it may have."""
        known = self._latest.get(self._kind(s), ())
        longer = [length - len(s.output) for length in known if length > len(s.output)]
        return min(s.remaining, median_low(longer)) if longer else s.remaining

    @staticmethod
    def _kind(s: TextSequence) -> int:
        return (len(s.tokens) - len(s.output)).bit_length()


class Certainty:
    """How likely the target's own tokens are in one text, by its softmax of raw logits: their mean.

    Over a text a draft model is right nearly as often (the pair: .09 + .91 of it), so it tells what
    drafts would bring where nobody drafts.
    """

    def __init__(self) -> None:
        self.mean, self.count = CERTAIN, 0

    def observe(self, chances: Collection[float]) -> None:
        """Tokens that the target gave these chances, and chose."""
        for chance in chances:
            self.count = min(self.count + 1, _MOST)
            self.mean += (chance - self.mean) / (self.count + _OF_OTHERS)


class Acceptance:
    """One drafter's record in one request. It begins with what is typical of the drafter.

    A drafter may stop before it has drafted what it was asked for. In a draft that branches the
    best tokens stand first, and each is counted whatever became of those before it.
    """

    def __init__(self, typical: "Acceptance | None" = None) -> None:
        """`typical` is the record of all requests, which itself begins with what is likely."""
        self.typical = typical
        # Of each position: that it is drafted and accepted.
        self.chances = typical.chances if typical else _PRIORS
        self.cycles = 0  # in which it was asked
        self.num_read, self.unread = 0, 0  # tokens of the text that it knows, or has to read first
        # Records of proposals by their evidence (see Planner.guess).
        self._by_evidence: dict[int, Acceptance] = {}

    def with_evidence(self, evidence: int) -> "Acceptance":
        """The record of proposals that rest on so much.

        Example: what followed four equal words comes again more often than what followed one.
        """
        if not evidence:
            return self
        if evidence not in self._by_evidence:
            record = Acceptance(self.typical and self.typical.with_evidence(evidence))
            record.chances = (record.typical or self).chances
            self._by_evidence[evidence] = record
        return self._by_evidence[evidence]

    def observe(
        self, drafted: int, accepted: int, asked: int = 0,
        places: Collection[int] | None = None, certain: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """A cycle that asked for `asked` tokens, drafted `drafted` and accepted `accepted`.

        `places` are those of the accepted ones in a tree; `certain` says how likely the target's
        own tokens were there.
        """
        asked, hits = max(asked, drafted), range(accepted) if places is None else places
        if not asked:
            self._forget()
        else:
            came = [float(i in hits) for i in range(min(asked, LONGEST))]
            while len(came) < LONGEST:  # a longer draft is thought to go on as this one ended
                came.append(PRIOR * came[-1])
            self._move(came, _RATE)
            if self.typical:
                self.typical._move(came, _TYPICAL_RATE)

    def _move(self, came: list[float], rate: float) -> None:
        """Move what is believed towards what came."""
        self.cycles += 1
        rate = max(rate, 1 / (self.cycles + _WEIGHT))
        self.chances = [
            chance + rate * (each - chance) for chance, each in zip(self.chances, came, strict=True)
        ]

    def _forget(self) -> None:
        """Believe a little less of what was seen, in a cycle that says nothing of the drafter.

        So one that is thought not to pay is tried again, if rarely.
        """
        for record in filter(None, (self, self.typical)):
            record.chances = [
                chance + _FORGOTTEN * (prior - chance)
                for chance, prior in zip(record.chances, _PRIORS, strict=True)
            ]

    def reach(self, count: int) -> list[float]:
        """The chance that 1, 2, … count tokens are all drafted and accepted."""
        return list(accumulate(self.chances[:count], min))


class Agreement(Acceptance):
    """That of a drafter that runs a model: it is right where the target is certain of its token.

    So what it keeps of a text, and of all texts, is how much more often than that it is right. A
    token is judged beside the target's certainty of that very token, so one that is rejected where
    the target doubts says little.

    Example: certainty .95 in this text, and .1 less often right in others -> α .85.
    """

    def __init__(self, certainty: Certainty, typical: "Agreement | None" = None) -> None:
        super().__init__(typical)
        self._certainty = certainty
        self.more = typical.more if typical else PRIOR - CERTAIN

    def observe(
        self, drafted: int, accepted: int, asked: int = 0,
        places: Collection[int] | None = None, certain: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """The same; what was asked for and is not there was not judged, unless nothing came."""
        if not asked and not drafted:
            self._forget()
        is_missed = drafted > accepted or (asked and not drafted)
        for i in range(accepted + bool(is_missed)):
            chance = certain[i] if i < len(certain) else self._certainty.mean
            for record, least in ((self, 1 / _MOST_JUDGED), (self.typical, _TYPICAL_RATE)):
                if record:
                    record.cycles += 1
                    rate = max(least, 1 / (record.cycles + _JUDGED_OF_OTHERS))
                    record.more += rate * ((i < accepted) - chance - record.more)

    def _forget(self) -> None:
        for record in filter(None, (self, self.typical)):
            record.more += _FORGOTTEN * (PRIOR - CERTAIN - record.more)

    def reach(self, count: int) -> list[float]:
        alpha = min(0.98, max(0.02, self._certainty.mean + self.more))
        return [alpha**i for i in range(1, count + 1)]


def believed(known: Collection[float]) -> float:
    """What is believed of ratios to what was expected: their median; few slow ones are doubted."""
    return median_low(known) if len(known) >= _CONFIRMED else min(_DOUBTFUL, *(known or [1.0]))


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
    rows_ms: list[float]  # of each drafted token's row, if all draft equally many
    most: int  # drafted tokens of a request: passes have confirmed half as many rows


class Costs:
    """What is known of the target's passes and of each drafter's drafts.

    Before anything was measured, numbers of weights stand in for it: a model that decodes spends
    its time reading them. Costs are in passes of plain decoding then, and else in ms; both serve,
    as only ratios count.
    """

    def __init__(
        self, num_weights: int, step_weights: dict[str, int], at_once: dict[str, int] | None = None
    ) -> None:
        """Numbers of weights that a pass, and a draft step of each drafter, read.

        Example: Costs(100, {"mtp": 20}) -> a step of mtp costs a fifth of a pass. Those in
        `at_once` draft up to so many tokens in a single step.
        """
        self.at_once = at_once or {}
        self.shares = {n: size / num_weights for n, size in step_weights.items()}
        self.curve = [1.0, 2.0], [1.0, 1.0 + _ROW_SHARE]  # rows, and what a pass over them takes
        self._told: dict[str, DraftPrice] = {}  # by the curve: of one request, in plain passes
        self._slowness = 1.0  # how many times as long as on the curve all passes take now
        # By class of batches (1, 2 to 3, 4 to 7, …) and rows: the latest, in what was expected.
        self.passes: dict[int, dict[int, deque[float]]] = {}
        # By drafter and class of requests that draft: the latest, in what was expected.
        self.drafts: dict[tuple[str, int], deque[float]] = {}
        self._slow = self._fast = 0  # passes in a row that were slower; plain ones, faster
        self._count = 0  # passes so far
        self._prices: dict[tuple[int, int], Prices] = {}

    def start_from(self, curve: Any) -> None:
        """Believe what was measured of this machine and model: see server/curve.py."""
        if len(curve.pass_ms) > 1:
            self.curve = list(curve.pass_ms), list(curve.pass_ms.values())
        plain_ms = self.curve[1][0]
        for name, each in curve.drafters.items():
            parts = each["call_ms"] + each["step_ms"], each["step_ms"], each["read_ms"]
            self._told[name] = DraftPrice(*(ms / plain_ms for ms in parts))
        for known in (self.drafts, self.passes, self._prices):  # something else was expected
            known.clear()

    def runs_model(self, name: str) -> bool:
        """Whether drafting takes steps of a model, which requests of a batch share."""
        return self.shares.get(name, 0.0) > 0

    def a_pass(self, batch: int, rows: float) -> float:
        """What a pass over so many rows of so many requests takes."""
        return self.passes_of(batch, [rows])[0]

    def passes_of(self, batch: int, rows: Sequence[float]) -> list[float]:
        """The same for several numbers of rows."""
        if not self.passes:
            return list(map(self.expected, rows))
        known = self.passes[min(list(self.passes), key=lambda kind: abs(kind - batch.bit_length()))]
        measured = sorted(known)
        ratios = [believed(known[each]) for each in measured]
        return [self.expected(each) * between(measured, ratios, each) for each in rows]

    def expected(self, rows: float) -> float:
        """What the curve says of a pass over so many rows, as fast as the machine is now."""
        return self._slowness * between(*self.curve, rows, goes_on=True)

    def observe_pass(self, batch: int, rows: int, ms: float, calls: Collection[Call] = ()) -> None:
        """A cycle with a pass over so many rows of so many requests, less drafting and choosing.

        `calls` of drafters came before it: (name, counts, unread, ms). Counts are each draft's
        tokens; `unread` ones of the texts had been missed.
        """
        self._count += 1
        rows, ms = rows if rows <= _EXACT else rows // 4 * 4, max(ms, 1e-6)
        ratio = ms / self.expected(rows)
        passes, kind = self.passes, batch.bit_length()
        latest = passes.get(kind, {}).get(rows, ())
        if len(latest) >= _CONFIRMED:
            change = ratio / median_low(latest)
            self._slow = self._slow + 1 if change > _SLOWER else 0
            if 0 < self._slow < _STAYS:
                return  # an accident says nothing of drafts, either
            if rows == batch:  # plain passes are many: they tell how fast the machine is
                self._fast = self._fast + 1 if change < 1 / _DOUBTFUL else 0
            if self._slow or self._fast >= _CONFIRMED:
                # All is learnt anew, by the curve: a factor on what is known, which may be doubtful
                # itself, would add up to any number on a busy machine.
                self._slow = self._fast = 0
                passes = {}
        if not passes:
            self._slowness, ratio = self._slowness * ratio, 1.0
        passes.setdefault(kind, {}).setdefault(rows, deque(maxlen=_LATEST)).append(ratio)
        self.passes = passes  # never empty again: /health reads it meanwhile
        for call in calls:
            self._learn_draft(*call)
        if self._count < 2 * _RENEWED or not self._count % _RENEWED:
            self._prices.clear()

    def _learn_draft(self, name: str, counts: list[int], unread: int, ms: float) -> None:
        steps, size = max(counts), len(counts)
        if unread > READ_ALONG * size:
            return  # what reading takes is not known well enough to be told from drafting
        if not self.runs_model(name):  # one request after the other
            steps, size, ms = 1, 1, ms / sum(counts)
        first_ms, step_ms, _ = self._expected_draft(name, size)
        level = ms / max(first_ms + (steps - 1) * step_ms, 1e-9)
        self.drafts.setdefault((name, size.bit_length()), deque(maxlen=_LATEST)).append(level)

    def _expected_draft(self, name: str, requests: int) -> DraftPrice:
        """What a draft for so many requests takes, as the curve says, or numbers of weights."""
        plain_ms = self.a_pass(1, 1)
        if not self.runs_model(name):
            return DraftPrice(_FREE_SHARE * plain_ms, _FREE_SHARE * plain_ms, 0.0)
        share, ms = self.shares[name], self.a_pass(requests, requests)
        first, step, read = self._told.get(name, (share, share, _READ_SHARE * share))
        return DraftPrice(ms * first, ms * step * (name not in self.at_once), plain_ms * read)

    def _level(self, name: str, requests: int) -> float:
        """How many times as long as expected such drafts take."""
        kinds = [size for each, size in list(self.drafts) if each == name]
        nearest = min(kinds, key=lambda size: abs(size - requests.bit_length()), default=0)
        return believed(self.drafts.get((name, nearest), ()))

    def by_batch(self) -> Json:
        """What passes and drafts take, by class of batches, as of the smallest batch of each."""
        classes, measured = Json(), sorted({name for name, _ in list(self.drafts)})
        for size in sorted(self.passes):
            batch = 1 << size - 1
            prices = self.prices(batch, batch)
            classes["1" if batch == 1 else f"{batch} to {2 * batch - 1}"] = {
                "pass_ms": round(prices.plain_ms, 4),
                "token_ms": round(fmean(prices.rows_ms[:_FEW]), 4),
                "draft_step_ms": {n: round(prices.drafts[n].first_ms, 4) for n in measured},
            }
        return classes

    def prices(self, batch: int, requests: int) -> Prices:
        """The prices of a batch in which so many requests may draft."""
        if (batch, requests) not in self._prices:
            drafts = {}
            for name in self.shares:
                first_ms, step_ms, read_ms = self._expected_draft(name, requests)
                level = self._level(name, requests)
                drafts[name] = DraftPrice(first_ms * level, step_ms * level, read_ms)
            passes = self.passes_of(batch, range(batch, batch + requests * LONGEST + 1, requests))
            rows_ms = [max(0.0, more - ms) / requests for ms, more in pairwise(passes)]
            known = self.passes.get(batch.bit_length(), {})
            rows = [rows for rows, latest in list(known.items()) if len(latest) >= _TRIED]
            most = 2 * max([1, *rows]) // batch if known else LONGEST
            self._prices[batch, requests] = Prices(passes[0], drafts, rows_ms, max(2, most))
        return self._prices[batch, requests]
