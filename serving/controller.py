"""How many tokens to draft, decided per request and cycle: as many as pay, and none if none do.

    expected tokens of a cycle with K drafts:  E(K) = 1 + α₁ + α₁α₂ + … + α₁…α_K
    its cost, in passes of plain decoding:     T(K) = K · c + t_verify(K)
    choose the K from 0 to the request's limit that makes E(K) / T(K) largest

αᵢ, the chance that the i-th token is accepted once those before it are, is estimated from the
request's own cycles, recent ones counting more. The first guess is high, as a good drafter that is
taken for a bad one costs more than a few drafts in vain. K = 0 is plain decoding; now and then a
probe drafts all the same, so that a text that has become easy is noticed. A drafter that costs
nothing (n-gram) needs no probe, nor to be chosen: what it would have drafted is held against what
came.

Costs come from the clock for greedy requests: a pass costs a + b · (tokens fed), fitted to this
process's cycles, so that K shrinks as a batch fills up. Which tokens a *sampled* request emits
depends on where its drafts end (not their distribution: the tokens). With the clock in it, the same
seed would give another text whenever the machine is busy. So sampled requests are decided by
nominal costs, from the sizes of the weights: the same everywhere, and none of the neighbours'
business.
"""

from dataclasses import dataclass, field, replace
from typing import Any

_PRIOR, _PRIOR_WEIGHT = 0.85, 2.0  # α before anything was seen, and how many cycles that counts for
_KEPT, _OLDEST = 0.85, 4  # of what was seen, with each cycle; of at most so many at once
_PROBE, _PROBING = 1, 0.02  # tokens of a probe; the share of the time that probes may cost
_TOKEN_SHARE = 0.02  # what each further token costs of a pass, before measuring
_FIT_KEPT, _FIT_RIDGE, _OUTLIER = 0.98, 4.0, 3.0
_WORTHWHILE = 1.01  # a draft must promise at least this much more than none


@dataclass
class Acceptance:
    """One drafter's record in one request: the conditional acceptance of each position."""

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    since: int = 0  # cycles without a draft
    cycles: int = 0  # with one
    coverage: float = 1.0  # share of the cycles in which it had anything to propose when asked

    def observe(self, drafted: int, accepted: int, asked: int = 0) -> None:
        """A cycle in which `accepted` of `drafted` tokens were; `asked` for were so many."""
        if asked:
            self.coverage += (1 - _KEPT) * ((drafted > 0) - self.coverage)
        if not drafted:
            self.since += 1
            return
        # It ages with the text, drafts or not; within bounds, as one probe is not much to go by.
        kept, self.since = _KEPT ** min(1 + self.since, _OLDEST), 0
        self.cycles += 1
        reached = min(drafted, accepted + 1)
        grown = max(0, reached - len(self.reached))
        self.reached = [kept * x for x in self.reached] + [0.0] * grown
        self.accepted = [kept * x for x in self.accepted] + [0.0] * grown
        for i in range(reached):
            self.reached[i] += 1
            self.accepted[i] += i < accepted

    def alphas(self, count: int) -> list[float]:
        """α₁ … α_count; where little was seen a position is thought to be like the one before."""
        result, before = [], _PRIOR
        for i in range(count):
            reached = self.reached[i] if i < len(self.reached) else 0.0
            accepted = self.accepted[i] if i < len(self.accepted) else 0.0
            weight = _PRIOR_WEIGHT / (1 + self.cycles)  # what was thought before fades
            before = (accepted + weight * before) / (reached + weight)
            result.append(before)
        return result


@dataclass
class Costs:
    """Times in ms; `pass_ms + token_ms · tokens fed` is a pass of the target.

    The fit is a weighted regression that forgets; a ridge keeps it sane while all passes are of one
    size, and outliers (the machine did something else) are cut to what is believable.
    """

    pass_ms: float = 0.0
    token_ms: float = 0.0
    draft_ms: dict[str, float] = field(default_factory=dict)  # per draft step, by drafter
    _sums: tuple[float, ...] = (0.0,) * 5  # of 1, tokens, ms, tokens², tokens · ms

    @classmethod
    def nominal(cls, target: int, steps: dict[str, int]) -> "Costs":
        """From numbers of weights: a model that decodes spends its time reading them.

        Example: nominal(100, {"mtp": 20}) -> a draft step costs a fifth of a pass.
        """
        return cls(1.0, _TOKEN_SHARE, {name: size / target for name, size in steps.items()})

    def verify(self, tokens: int) -> float:
        """A pass over so many tokens in all."""
        return self.pass_ms + self.token_ms * tokens

    def observe_pass(self, tokens: int, ms: float) -> None:
        """A pass that was measured."""
        if self.is_known:  # an outlier counts for less, but it counts: times may have changed
            ms = min(ms, _OUTLIER * self.verify(tokens))
        new = (1.0, tokens, ms, tokens * tokens, tokens * ms)
        self._sums = tuple(_FIT_KEPT * old + x for old, x in zip(self._sums, new, strict=True))
        weight, mean, mean_ms, square, product = (x / self._sums[0] for x in self._sums)
        variance, covariance = square - mean * mean, product - mean * mean_ms
        ridge = _FIT_RIDGE / self._sums[0]
        slope = (covariance + ridge * _TOKEN_SHARE * mean_ms) / (variance + ridge)
        self.token_ms = min(max(slope, 0.0), mean_ms / max(mean, 1.0))
        self.pass_ms = max(mean_ms - self.token_ms * mean, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether a pass was measured, or its cost given."""
        return self._sums[0] > 0 or self.pass_ms > 0

    def observe_draft(self, name: str, steps: int, ms: float, share: float = 0.0) -> None:
        """A drafter's time for a batch of drafts, the longest of `steps` tokens.

        `share` is what a step should cost of a pass, going by the weights. A first measurement far
        above would put an end to drafting, and so to measuring.
        """
        known, new = self.draft_ms.get(name), ms / steps
        if known is None:
            most = _OUTLIER * share * self.verify(1)
            self.draft_ms[name] = min(new, most) if most else new
        elif new <= _OUTLIER * known:
            self.draft_ms[name] = _KEPT * known + (1 - _KEPT) * new
        else:  # not ignored for ever: it may have become slower
            self.draft_ms[name] = 1.1 * known


@dataclass(frozen=True)
class Decision:
    """What was chosen, and the numbers behind it; costs in passes of plain decoding."""

    drafter: str
    num_tokens: int
    alpha: float  # of the first position
    c: float
    expected_speedup: float  # of the best K, which is below 1 where none pays
    break_even: float  # the α at which one drafted token would pay for itself
    is_probe: bool = False

    @property
    def probe_cost(self) -> float:
        """What a draft of one token costs more than it is expected to bring."""
        return self.break_even - self.alpha

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the sentence."""
        values = {
            name: round(v, 4) if isinstance(v, float) else v for name, v in vars(self).items()
        }
        return values | {"says": str(self)}

    def __str__(self) -> str:
        if self.num_tokens and not self.is_probe:
            return (
                f"{self.drafter}, K={self.num_tokens}: α {_short(self.alpha)}, c {_short(self.c)}, "
                f"expected {self.expected_speedup:.2f}×"
            )
        probe = "a probe; " if self.is_probe else ""
        return (
            f"{probe}K=0 is faster here: {self.drafter} has α {_short(self.alpha)} < break-even "
            f"{_short(self.break_even)} (c {_short(self.c)})"
        )


def _short(value: float) -> str:
    """Example: 0.714 -> ".71"."""
    return f"{value:.2f}".removeprefix("0")


class Controller:
    """Chooses for each request and cycle; learns costs from what the engine measures."""

    def __init__(self, num_target_weights: int, num_step_weights: dict[str, int]) -> None:
        """Numbers of weights that a pass, and a draft step of each drafter, read."""
        self._nominal = Costs.nominal(num_target_weights, num_step_weights)
        self.costs: dict[int, Costs] = {}  # as measured, by the size of the batch: see `measured`

    def measured(self, batch: int) -> Costs:
        """To be observed by: batches of 1, 2 to 3, 4 to 7, … are measured apart."""
        return self.costs.setdefault(batch.bit_length(), Costs())

    def costs_steps(self, name: str) -> bool:
        """Whether drafting takes steps of a model."""
        return self.share(name) > 0

    def share(self, name: str) -> float:
        """What a step of this drafter costs of a pass, going by the weights."""
        return self._nominal.draft_ms.get(name, 0.0) / self._nominal.verify(1)

    def _known(self, batch: int) -> Costs:
        """What was measured in the batches nearest to this size; else what the weights say."""
        known = [size for size, costs in self.costs.items() if costs.is_known]
        nearest = min(known, key=lambda size: abs(size - batch.bit_length()), default=None)
        return self._nominal if nearest is None else self.costs[nearest]

    def choose(
        self,
        records: dict[str, Acceptance],
        limit: int,
        batch: int,
        is_greedy: bool,
        num_paid_steps: int = 0,
    ) -> Decision:
        """The drafter and number of tokens, at most `limit`, for one of `batch` requests.

        `records` has one entry per drafter to choose from. So many draft steps are taken for
        others of the batch anyway.
        """
        costs, batch = (self._known(batch), batch) if is_greedy else (self._nominal, 1)
        decisions = [
            self._best(name, record, limit, batch, costs, num_paid_steps if is_greedy else 0)
            for name, record in records.items()
        ]
        # Whoever has nothing to propose leaves a cycle of plain decoding.
        best = max(
            decisions,
            key=lambda d: records[d.drafter].coverage * (d.expected_speedup - 1),
        )
        for other in decisions:  # what is passed over may have become better, too
            lost = other.probe_cost + max(best.expected_speedup - 1, 0.0)
            is_due = lost <= _PROBING * records[other.drafter].since
            if other is not best and self.costs_steps(other.drafter) and is_due:
                return replace(other, num_tokens=min(limit, _PROBE), is_probe=True)
        if best.expected_speedup > _WORTHWHILE:
            return best
        # The cheaper a probe, the more often: a draft that is nearly free is nearly always made.
        if best.probe_cost > _PROBING * (1 + records[best.drafter].since):
            return replace(best, num_tokens=0)
        return replace(best, num_tokens=min(limit, _PROBE), is_probe=True)

    def _best(
        self,
        name: str,
        record: Acceptance,
        limit: int,
        batch: int,
        costs: Costs,
        num_paid: int,
    ) -> Decision:
        plain = costs.verify(batch)
        # A step that was not measured yet costs what its weights say.
        step = costs.draft_ms.get(name, self.share(name) * plain)
        best, best_speedup, expected, reach = 0, 0.0, 1.0, 1.0
        alphas = record.alphas(limit)
        for k, alpha in enumerate(alphas, 1):
            reach *= alpha
            expected += reach
            cost = max(k, num_paid) * step + costs.verify(batch * (k + 1))
            speedup = expected * (plain + num_paid * step) / cost
            if speedup > best_speedup:
                best, best_speedup = k, speedup
        break_even = (step + costs.verify(2 * batch)) / plain - 1
        return Decision(name, best, alphas[0], step / plain, best_speedup, break_even)
