"""What a cycle costs: a pass of the target, a draft, and text that a drafter has yet to read.

    a pass over r rows          plain line:  fixed + slope · r,   by class of batches: 1, 2 to 3, …
    a draft of s steps          draft line:  fixed + slope · s,   by class of requests that draft

Until something was measured, numbers of weights stand in for it: a model that decodes spends its
time reading them. Costs that were never measured are in passes of plain decoding, the others in ms;
both serve, as only ratios count.

A clock errs to one side: what was measured first may be ten times too slow (cold caches, kernels
that are compiled at the first call), and so may be what was measured while the machine did
something else. Nothing is ever measured too fast. Hence a line goes through medians, a measurement
that stands alone counts for little, and a fast one wipes out slow ones of its size.
"""

from collections import deque
from collections.abc import Collection
from math import inf, sqrt
from statistics import median_low  # of two measurements the faster is to be believed
from typing import Any, NamedTuple

_LATEST, _OLDEST = 8, 200  # measurements of one size that are stored, and for how many of all
_CONFIRMED = 3  # measurements until a cost is believed whatever it is
_WARM = 12  # drafts of a drafter until that holds: its first ones may all have been cold
_OUTLIER = 3.0  # times as long: an accident, or the first call
_DOUBTFUL = 1.5  # times as long as others let expect: no more is believed until it is confirmed
_RIDGE = 4.0
_TOKEN_SHARE = 0.02  # what each further token costs of a pass, before measuring
_FEW_UNREAD = 4  # tokens of each request that a draft reads at no cost, as it does in any case
_READ_SHARE = 0.05  # of a step: a token that a drafter has to read
_STEP_SHARE = 1.0  # of a draft of one token half is its step and half the call, before measuring
_LEAST_SHARE = 0.1  # of a pass: what a step of a drafter without weights may cost
_LEARN_EACH = 8  # cycles: together they take less time


class CostLine:
    """`fixed + slope · size`, in ms, through the latest measurements of each size of work.

    Of each, because a batch that drafts all the time would forget what a pass without drafts costs.
    """

    def __init__(self, share: float) -> None:
        """`share`: the slope before sizes differ, in parts of `fixed`, which is 1 unmeasured."""
        self.share = self.slope = share
        self.fixed = 1.0
        self.count = 0  # measurements so far
        self._latest: dict[int, deque[tuple[float, float, int]]] = {}  # (ms, size, which) by class

    def at(self, size: float) -> float:
        """The time of work of this size."""
        return self.fixed + self.slope * size

    def _grows(self, size: float) -> float:
        """How the time grows with the size before anything is known."""
        return 1 + self.share * size

    def observe(self, size: float, ms: float) -> None:
        """A measurement; the line is as it was until it is fitted.

        It contradicts those that took far longer and were not far larger: they met with an
        accident, and are forgotten. Example: 400 ms for 5 rows, after 6 ms for 6 rows.
        """
        self.count += 1
        for kind, known in list(self._latest.items()):
            recent = [
                (other_ms, other, which)
                for other_ms, other, which in known
                if which > self.count - _OLDEST
                and (other_ms <= _OUTLIER * ms or other_ms <= self._most(other, size, ms))
            ]
            self._latest[kind] = deque(recent, maxlen=_LATEST)
        kind = int(size) if size < 8 else 8 + int(size) // 8
        self._latest.setdefault(kind, deque(maxlen=_LATEST)).append((ms, size, self.count))

    def _most(self, other: float, size: float, ms: float) -> float:
        """What work of another size may take, if this size takes `ms`.

        More work may take more in proportion or, as it mostly does, hardly more: the mean of both.
        """
        if other <= size:
            return _OUTLIER * ms
        return _OUTLIER * ms * sqrt(self._grows(other) / self._grows(size) * other / size)

    def moments(self) -> tuple[float, float, float]:
        """The variance, covariance and expected slope of the medians by class of sizes."""
        every = [one for known in self._latest.values() for one in known]
        level = median_low(ms / self._grows(size) for ms, size, _ in every)
        points = []
        for known in filter(None, self._latest.values()):
            ms, size, _ = median_low(known)
            if len(known) < _CONFIRMED:
                ms = min(ms, _DOUBTFUL * level * self._grows(size))
            points.append((len(known), size, ms))
        mean = sum(n * size for n, size, _ in points) / len(every)
        mean_ms = sum(n * ms for n, _, ms in points) / len(every)
        variance = sum(n * (size - mean) ** 2 for n, size, _ in points)
        covariance = sum(n * (size - mean) * (ms - mean_ms) for n, size, ms in points)
        return variance, covariance, mean_ms / (mean + 1 / self.share)

    def fit(self, slope: float) -> None:
        """Fit the line with a known slope, through the median of the remaining times."""
        every = [one for known in self._latest.values() for one in known]
        self.slope = min(slope, median_low(ms / size for ms, size, _ in every))
        self.fixed = median_low(ms - self.slope * size for ms, size, _ in every)


def fit(lines: Collection[CostLine]) -> None:
    """Give these lines the slope that they have in common, by least squares.

    A row of a request costs the same in batches of all sizes, so there is more to go by. What is
    expected before sizes differ counts as much as a few measurements: a ridge.
    """
    every = [line.moments() for line in lines]
    covariance = sum(m[1] for m in every) + _RIDGE * sum(m[2] for m in every) / len(every)
    slope = max(0.0, covariance / (sum(m[0] for m in every) + _RIDGE))
    for line in lines:
        line.fit(slope)


class DraftPrice(NamedTuple):
    """What a drafter's draft costs, in ms."""

    call_ms: float  # whatever its length
    step_ms: float  # each step: for a model a token of all requests that draft, else of one request
    read_ms: float  # each token of the text that it has missed

    @property
    def first_ms(self) -> float:
        """The price of a draft of one token."""
        return self.call_ms + self.step_ms


class Prices(NamedTuple):
    """What passes, rows and drafts cost in a batch, in ms."""

    plain_ms: float  # a pass without drafts
    row_ms: float  # a drafted token in it
    drafts: dict[str, DraftPrice]


class Costs:
    """What is known of the target's passes and of each drafter's drafts."""

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
        self.passes: dict[int, CostLine] = {}  # by class of batches: 1, 2 to 3, 4 to 7, …
        self.drafts: dict[str, dict[int, CostLine]] = {}  # by drafter, and class of requests
        self.reads: dict[str, list[float]] = {}  # the latest: ms for a token that was missed
        self._this_cycle: list[tuple[str, list[int], int, float]] = []  # drafts of this cycle
        self._cycles: list[tuple[int, int, float, list[tuple]]] = []  # nobody has looked at yet
        self._prices: dict[tuple[int, int], Prices] = {}
        self.curve: Any = None

    def start_from(self, curve: Any) -> None:
        """Begin with a measured Curve (serving/curve.py)."""
        self.curve = curve

    def runs_model(self, name: str) -> bool:
        """Whether drafting takes steps of a model, which requests of a batch share."""
        return self.shares.get(name, 0.0) > 0

    def observe_draft(self, name: str, counts: list[int], unread: int, ms: float) -> None:
        """One call of a drafter, `unread` tokens having been missed.

        `counts` are each draft's forwards, where a model tells them, else its tokens.
        """
        self._this_cycle.append((name, counts, unread, ms))

    def observe_pass(self, batch: int, rows: int, ms: float) -> None:
        """A cycle with a pass over so many rows of so many requests, less drafting and choosing.

        The drafts observed before this call are those of this cycle.
        """
        if len(self._cycles) < _LEARN_EACH:  # of more there is little to learn
            self._cycles.append((batch, rows, ms, self._this_cycle))
        self._this_cycle = []
        line = self.passes.get(batch.bit_length())
        if line is None or line.count < _CONFIRMED:  # /health shows it, however short the run
            self._learn()

    def _learn(self) -> None:
        """Learn from what was observed since the last time: together that takes less time."""
        for batch, rows, ms, drafts in self._cycles:
            line = self.passes.setdefault(batch.bit_length(), CostLine(_TOKEN_SHARE))
            believed = line.at(rows) if line.count else ms
            line.observe(rows, ms)
            if line.count == 1:  # the price of drafts is derived from it
                fit([line])
            # In a cycle that was slow as a whole it was not the drafter that has become slower.
            slowdown = max(1.0, ms / believed) if believed else 1.0
            for name, counts, unread, draft_ms in drafts:
                self._learn_draft(name, counts, unread, draft_ms / slowdown)
        self._cycles.clear()
        self._prices.clear()
        fit(self.passes.values())

    def _learn_draft(self, name: str, counts: list[int], unread: int, ms: float) -> None:
        steps, size = max(counts), len(counts)
        if name in self.at_once:
            steps = 1
        elif not self.runs_model(name):  # one request after the other
            steps, size, ms = 1, 1, ms / sum(counts)
        price = self._draft(name, size, self.pass_line(size).at(size))
        expected = price.call_ms + steps * price.step_ms
        is_reading = self.runs_model(name) and unread > _FEW_UNREAD * len(counts)
        if not is_reading or _OUTLIER * ms < expected:
            lines = self.drafts.setdefault(name, {})
            lines.setdefault(size.bit_length(), CostLine(_STEP_SHARE)).observe(steps, ms)
            fit(lines.values())
        elif name in self.drafts and ms > expected:
            read_ms = (ms - expected) / unread
            known = [other for other in self.reads.get(name, ()) if other <= _OUTLIER * read_ms]
            self.reads[name] = [*known, read_ms][-_LATEST:]

    def pass_line(self, batch: int) -> CostLine:
        """The line of the measured class of batches nearest to this size; else nominal."""
        return _nearest(self.passes, batch) if self.passes else CostLine(_TOKEN_SHARE)

    def prices(self, batch: int, requests: int) -> Prices:
        """The prices of a batch in which so many requests may draft."""
        is_new = any(line.count < 2 * _LEARN_EACH for line in self.passes.values())
        if len(self._cycles) >= (1 if is_new else _LEARN_EACH):
            self._learn()
        if (batch, requests) not in self._prices:
            line = self.pass_line(batch)
            plain = line.at(batch)
            drafts = {name: self._draft(name, requests, plain) for name in self.shares}
            self._prices[batch, requests] = Prices(plain, line.slope, drafts)
        return self._prices[batch, requests]

    def _draft(self, name: str, requests: int, plain_ms: float) -> DraftPrice:
        share, call, step = self.shares.get(name, 0.0), 0.0, 0.0
        if lines := self.drafts.get(name):
            line = _nearest(lines, requests)
            call, step = line.fixed, line.slope
            if line.count < _WARM:
                most = _OUTLIER * max(share, _LEAST_SHARE) * plain_ms
                believed = min(1.0, most / (call + step)) if call + step else 0.0
                call, step = believed * call, believed * step
        else:
            step = share * plain_ms
        read = _READ_SHARE * share * plain_ms
        if known := self.reads.get(name):
            most = _OUTLIER * read if len(known) < _CONFIRMED else inf
            read = min(median_low(known), most)
        if not share:  # one request after the other
            call, step = 0.0, call + step
        elif name in self.at_once:
            call, step = call + step, 0.0
        return DraftPrice(call, step, read)

    def as_dict(self) -> dict[str, Any]:
        """A dict for JSON, by class of batches; a draft step is that of its smallest batch."""
        classes = {}
        for size, line in sorted(dict(self.passes).items()):
            batch = 1 << size - 1
            classes["1" if batch == 1 else f"{batch} to {2 * batch - 1}"] = {
                "pass_ms": round(line.fixed, 4),
                "token_ms": round(line.slope, 4),
                "draft_step_ms": {
                    name: round(self._draft(name, batch, line.at(batch)).first_ms, 4)
                    for name in list(self.drafts)
                },
            }
        return classes


def _nearest(lines: dict[int, CostLine], size: int) -> CostLine:
    """The line of the class nearest to this size."""
    kind = size.bit_length()
    return lines.get(kind) or lines[min(lines, key=lambda other: abs(other - kind))]
