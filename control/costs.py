"""What a cycle costs: a pass of the target, a draft step, and text that a drafter has yet to read.

Until something was measured, numbers of weights stand in for it: a model that decodes spends its
time reading them. Costs that were never measured are in passes of plain decoding, the others in ms;
both serve, as only ratios count.

A clock errs to one side: what was measured first may be ten times too slow (cold caches, kernels
that are compiled at the first call), and so may be what was measured while the machine did
something else. Nothing is ever measured too fast. Hence a line goes through medians, a measurement
that stands alone counts for little, and a fast one wipes out slow ones of its size.
"""

from collections import deque
from collections.abc import Iterable
from math import sqrt
from typing import Any

_LATEST, _OLDEST = 8, 200  # measurements of one size that are kept, and for how many of all
_CONFIRMED = 3  # measurements until a cost is believed whatever it is
_OUTLIER = 3.0  # times as long: an accident, or the first call
_DOUBTFUL = 1.5  # times as long as others let expect: no more is believed until it is confirmed
_RIDGE = 4.0
_TOKEN_SHARE = 0.02  # what each further token costs of a pass, before measuring
_REQUEST_SHARE = 0.1  # and each further request of a draft step
_FEW_UNREAD = 4  # tokens of each request that a step reads by the way, as it does in any case
_READ_SHARE = 0.05  # and a token that a drafter has to read
_LEAST_SHARE = 0.1  # of a pass: what a step of a drafter without weights may cost


class Line:
    """`fixed + slope · size`, in ms, through the latest measurements of each size of work.

    Of each, because a batch that drafts all the time would forget what a pass without drafts costs.
    """

    def __init__(self, share: float = 0.0) -> None:
        """`share`: the slope before sizes differ, in parts of `fixed`."""
        self.share = share
        self.fixed = self.slope = 0.0
        self.count = 0  # measurements so far
        self._latest: dict[int, deque[tuple[float, float, int]]] = {}  # (ms, size, which) by class

    def at(self, size: float) -> float:
        """The time of work of this size."""
        return self.fixed + self.slope * size

    def observe(self, size: float, ms: float) -> None:
        """A measurement; the line is as it was until it is fitted.

        It contradicts those that took far longer and were not far larger: they met with an
        accident, and are forgotten. Example: 400 ms for 5 rows, after 6 ms for 6 rows.
        """
        self.count += 1
        least_ms = _OUTLIER * ms  # what takes no longer is not contradicted, whatever its size
        for kind, known in list(self._latest.items()):
            kept = [
                one
                for one in known
                if one[2] > self.count - _OLDEST
                and (one[0] <= least_ms or one[0] <= self._most(one[1], size, ms))
            ]
            if len(kept) < len(known):
                self._latest[kind] = deque(kept, maxlen=_LATEST)
                if not kept:
                    del self._latest[kind]
        kind = int(size) if size < 8 else 8 + int(size) // 8
        self._latest.setdefault(kind, deque(maxlen=_LATEST)).append((ms, size, self.count))

    def _most(self, other: float, size: float, ms: float) -> float:
        """What work of another size may take, if this size takes `ms`.

        More work may take more in proportion or, as it mostly does, hardly more: the mean of both.
        """
        if other <= size:
            return _OUTLIER * ms
        hardly_more = (1 + self.share * other) / (1 + self.share * size)
        return _OUTLIER * ms * sqrt(hardly_more * other / max(size, 1.0))

    @property
    def is_confirmed(self) -> bool:
        """Whether there are measurements enough to believe whatever they say."""
        return sum(map(len, self._latest.values())) >= _CONFIRMED

    def fit(self, slope: float | None = None) -> None:
        """Least squares through the median of each class of sizes, or by a slope that is known."""
        if slope is None:
            mean, mean_ms = self.moments()[2:]
            self.slope = min(slope_of([self]), mean_ms / max(mean, 1.0))
            self.fixed = max(mean_ms - self.slope * mean, 0.0)
            return
        rest = [ms - slope * size for known in self._latest.values() for ms, size, _ in known]
        self.slope, self.fixed = slope, max(_low_median(rest), 0.0)

    def moments(self) -> tuple[float, float, float, float]:
        """Of the medians of each class of sizes: variance of sizes, covariance, and both means."""
        every = [one for known in self._latest.values() for one in known]
        level = _low_median([ms / (1 + self.share * size) for ms, size, _ in every])
        points = []
        for known in self._latest.values():
            ms, size, _ = _low_median(known)
            if len(known) < _CONFIRMED:
                ms = min(ms, _DOUBTFUL * level * (1 + self.share * size))
            points.append((len(known), size, ms))
        mean = sum(n * size for n, size, _ in points) / len(every)
        mean_ms = sum(n * ms for n, _, ms in points) / len(every)
        variance = sum(n * (size - mean) ** 2 for n, size, _ in points)
        covariance = sum(n * (size - mean) * (ms - mean_ms) for n, size, ms in points)
        return variance, covariance, mean, mean_ms


def slope_of(lines: Iterable[Line]) -> float:
    """The slope that they have in common; a ridge keeps it sane."""
    every = [(line.share, *line.moments()) for line in lines]
    expected = [share * ms / (1 + share * mean) for share, _, _, mean, ms in every]
    covariance = sum(own[2] for own in every) + _RIDGE * sum(expected) / len(every)
    return max(0.0, covariance / (sum(own[1] for own in every) + _RIDGE))


def _low_median(values: Iterable[Any]) -> Any:
    """The lower one of two: of two measurements the faster is to be believed."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Costs:
    """What is known of the target's passes and of each drafter's steps."""

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
        self.passes: dict[int, Line] = {}  # cycles, by class of batches: 1, 2 to 3, 4 to 7, …
        self.steps: dict[str, Line] = {}
        self.reads: dict[str, Line] = {}
        self._drafts: list[tuple[str, list[int], int, float]] = []  # of this cycle, so far
        self._cycles: list[tuple[int, int, float, list[Any]]] = []  # that nobody has looked at yet

    def runs_model(self, name: str) -> bool:
        """Whether drafting takes steps of a model, which requests of a batch share."""
        return self.shares.get(name, 0.0) > 0

    def observe_pass(self, batch: int, tokens: int, ms: float) -> None:
        """A cycle with a pass over so many tokens of so many requests, less drafting and choosing.

        Drafts that were told of before may be in it. A further row of a request costs the same in
        batches of all sizes: the slope that they have in common has more to go by.
        """
        self._cycles.append((batch, tokens, ms, self._drafts))
        self._drafts = []
        line = self.passes.get(batch.bit_length())
        if line is None or line.count <= _CONFIRMED:  # /health shows it, however short the run
            self._learn()

    def _learn(self) -> None:
        """Learn from what was observed since the last time; together that takes less time."""
        changed, cycles, self._cycles = set[int](), self._cycles, []
        for batch, tokens, ms, drafts in cycles:
            believed = self._nearest(batch).at(tokens) if self.passes else ms
            # In a cycle that was slow as a whole it was not the drafter that has become slower.
            slowdown = max(1.0, ms / believed) if believed else 1.0
            for name, num_tokens, unread, draft_ms in drafts:
                self._learn_draft(name, num_tokens, unread, draft_ms, slowdown)
            line = self.passes.setdefault(batch.bit_length(), Line(_TOKEN_SHARE))
            line.observe(tokens, ms)
            if line.count <= _CONFIRMED:  # it is to be believed in the next cycle
                line.fit(slope_of(self.passes.values()))
            changed.add(batch.bit_length())
        slope = slope_of(self.passes.values()) if changed else 0.0
        for size in changed:
            self.passes[size].fit(slope)
        for name, num_tokens, unread, draft_ms in self._drafts:
            self._learn_draft(name, num_tokens, unread, draft_ms, 1.0)
        self._drafts = []

    def observe_draft(self, name: str, num_tokens: list[int], unread: int, ms: float) -> None:
        """One call of a drafter: drafts of so many tokens, `unread` tokens having been missed.

        It counts once the pass behind it is known.
        """
        self._drafts.append((name, num_tokens, unread, ms))

    def _learn_draft(
        self, name: str, num_tokens: list[int], unread: int, ms: float, slowdown: float
    ) -> None:
        num_tokens = [1 for _ in num_tokens] if name in self.at_once else num_tokens
        steps, drafted = max(num_tokens), sum(num_tokens)
        is_model = self.runs_model(name)
        line = self.steps.setdefault(name, Line(_REQUEST_SHARE if is_model else 0.0))
        if not is_model:  # one request after the other
            expected = line.fixed * drafted
        elif line.count:
            expected = sum(line.at(sum(n > i for n in num_tokens)) for i in range(steps))
        else:
            expected = steps * self.shares[name] * self._nearest(1).at(1)
        # Nor has it become faster: it may have been the pass alone that was slow.
        ms = max(ms / slowdown, min(ms, expected))
        if not is_model:
            line.observe(0, ms / drafted)
            line.fit()
            return
        if unread <= _FEW_UNREAD * len(num_tokens) or _OUTLIER * ms < expected:
            line.observe(drafted / steps, ms / steps)
            line.fit()
        elif line.count:
            rest = max(ms - expected, 0.0)
            read = self.reads.setdefault(name, Line())
            read.observe(0, rest / unread)
            read.fit()

    def pass_line(self, batch: int) -> Line:
        """Of the class of batches nearest to this size that was measured; else nominal."""
        self._learn()
        return self._nearest(batch)

    def _nearest(self, batch: int) -> Line:
        size = batch.bit_length()
        if line := self.passes.get(size):
            return line
        if not self.passes:
            return _nominal_pass()
        return self.passes[min(self.passes, key=lambda other: abs(other - size))]

    def step(self, name: str, batch: int, plain: float) -> tuple[float, float]:
        """A draft step costs (fixed, more for each request in it); a pass of the batch `plain`."""
        self._learn()
        return self._step(name, batch, plain)

    def _step(self, name: str, batch: int, plain: float) -> tuple[float, float]:
        share, line = self.shares.get(name, 0.0), self.steps.get(name)
        if line is None:
            return share * plain, 0.0
        fixed, each = (line.fixed, line.slope) if share else (0.0, line.fixed)
        if not line.is_confirmed:
            most = _OUTLIER * max(share, _LEAST_SHARE) * plain
            believed = min(1.0, most / max(fixed + each * batch, most))
            return fixed * believed, each * believed
        return fixed, each

    def read(self, name: str, plain: float) -> float:
        """What it costs a drafter to read a token that it has missed."""
        line, expected = self.reads.get(name), _READ_SHARE * self.shares.get(name, 0.0) * plain
        if line is None:
            return expected
        return line.fixed if line.is_confirmed else min(line.fixed, _OUTLIER * expected)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, by class of batches; a draft step is that of the smallest batch in it."""
        found = {}
        for size, line in sorted(dict(self.passes).items()):
            batch = 1 << size - 1
            steps = {name: self._step(name, batch, line.at(batch)) for name in list(self.steps)}
            found["1" if batch == 1 else f"{batch} to {2 * batch - 1}"] = {
                "pass_ms": round(line.fixed, 4),
                "token_ms": round(line.slope, 4),
                "draft_step_ms": {
                    name: round(fixed + each * batch, 4) for name, (fixed, each) in steps.items()
                },
            }
        return found


def _nominal_pass() -> Line:
    line = Line(_TOKEN_SHARE)
    line.fixed, line.slope = 1.0, _TOKEN_SHARE
    return line
