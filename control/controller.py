"""How many tokens to draft, decided in each cycle: as many as pay, and none if none do.

    expected tokens of a cycle with K drafts:  E(K) = 1 + α₁ + α₁α₂ + … + α₁…α_K
    its cost, in passes of plain decoding:     T(K) = K · c + t_verify(K)
    choose what makes E / T largest: for one request its K, for a batch all of them (plans.py)

αᵢ, the chance that the i-th token is accepted once those before it are, is estimated from the
request's own cycles, recent ones counting more. A new request is thought to be like those before
it; the very first guess is high, as a good drafter that is taken for a bad one costs more than a
few drafts in vain. A drafter that costs nothing (n-gram) need not be chosen to be known: what it
would have drafted is held against what came.

K = 0 is plain decoding. A drafter that does not draft is tried all the same now and then, in a
probe: texts become easy, and what was measured while the machine was busy was wrong. All probes
together may cost a hundredth of the time. That is counted across requests, as one of them may be
too short to pay for any.

Costs come from the clock (costs.py), so that K shrinks as a batch fills up. Who drafts and how much
changes no token, unless a request is verified by rejection: then the same seed gives another text
of the same distribution.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod, sqrt
from operator import mul
from typing import Any

from drafters.panel import TREE

from .costs import PAD_SHARE, Costs
from .plans import (
    NOTHING,
    Choice,
    Offer,
    Offers,
    Prices,
    best_free,
    best_plan,
    evaluate,
    gains_of,
)

PRIOR = 0.85  # α before anything was seen
_KEPT, _OLDEST = 0.85, 4  # of what was seen, with each cycle; of at most so many at once
_TYPICAL_KEPT, _TYPICAL_WEIGHT = 0.99, 4.0  # the same of what is typical of a drafter
PROBE_TOKENS, PROBE_BUDGET = 1, 0.01  # of a probe; the share of the time that probes may cost
_WORTHWHILE = 1.01  # drafts must promise at least this much more than none
_SERVED = 32  # cycles for which text that a model reads now is thought to serve


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
    _reach: list[float] = field(default_factory=list, repr=False, compare=False)
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
        self._by_evidence[evidence].unread = self.unread
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
        self._reach = []
        hits = accepted if places is None else places
        self.count(kept, drafted, hits, max(asked, drafted))
        if self.typical:
            self.typical.count(_TYPICAL_KEPT, drafted, hits, max(asked, drafted))

    def count(self, kept: float, drafted: int, accepted: Any, asked: int) -> None:
        """Age what was counted by position, and count so many more."""
        self.cycles += 1
        reached = min(asked, accepted + 1)
        self.reached = _counted(self.reached, kept, reached)
        self.accepted = _counted(self.accepted, kept, accepted, reached)
        self.asked = _counted(self.asked, kept, asked)
        self.drafted = _counted(self.drafted, kept, drafted, asked)

    def alphas(self, count: int) -> list[float]:
        """α₁ … α_count; where little was seen a position is thought to be like the one before.

        With a typical record it is thought to be like the same position there, but better or worse
        as this request was before.
        """
        result, before = [], PRIOR
        expected = self.typical.alphas(count) if self.typical else []
        weight = self._weight
        for i in range(count):
            reached = self.reached[i] if i < len(self.reached) else 0.0
            accepted = self.accepted[i] if i < len(self.accepted) else 0.0
            if expected:
                level = sqrt(before / max(expected[i - 1], 1e-6)) if i else 1.0
                before = min(1.0, expected[i] * level)
            before = (accepted + weight * before) / (reached + weight)
            result.append(before)
        return result

    @property
    def _weight(self) -> float:
        """Of what is typical; what was thought before anything was seen fades."""
        return _TYPICAL_WEIGHT / (1 if self.typical else 1 + self.cycles / _TYPICAL_WEIGHT)

    def taken(self, count: int) -> list[float]:
        """The chance that a draft of up to `count` tokens comes to its first, second, … one."""
        expected = self.typical.taken(count) if self.typical else [1.0] * count
        result, weight, known = [], self._weight, len(self.asked)
        for i in range(count):
            drafted, asked = (self.drafted[i], self.asked[i]) if i < known else (0.0, 0.0)
            result.append((drafted + weight * expected[i]) / (asked + weight))
        return result

    def learn_confidence(self, confidence: list[float], accepted: int) -> None:
        """A draft with its drafter's confidence in each token, if it told; `accepted` were."""
        calibration = (self.typical or self).calibration
        for i, sure in enumerate(confidence[: accepted + 1]):
            calibration.observe(sure, i < accepted)

    def goes_on(self, least_chance: float, confidence: list[float]) -> bool:
        """Whether one more token is likely enough to be accepted, behind such tokens."""
        calibration = (self.typical or self).calibration
        return prod(map(calibration.chance, confidence)) * calibration.mean >= least_chance

    def reach(self, count: int) -> list[float]:
        """The chance that 1, 2, … count tokens are all accepted."""
        if len(self._reach) < count:
            self._reach = list(accumulate(self.alphas(count), mul))
        return self._reach[:count]


class TreeAcceptance(Acceptance):
    """The record of drafts that branch, best tokens first: how often the i-th one was accepted.

    Whatever became of those before it: it may follow another one.
    """

    def count(self, kept: float, drafted: int, accepted: Collection[int], asked: int) -> None:
        """The same, with the places of the accepted tokens."""
        self.cycles += 1
        self.reached = _counted(self.reached, kept, drafted)
        aged = _counted(self.accepted, kept, 0, drafted)
        self.accepted = [x + (i in accepted) for i, x in enumerate(aged)]

    def reach(self, count: int) -> list[float]:
        """The chance of the 1st, 2nd, … count-th token to be accepted; falling, or equal."""
        if len(self._reach) < count:
            expected = self.typical.reach(count) if self.typical else []
            blocks: list[tuple[float, int]] = []  # (mean, tokens): a larger one is spread backwards
            for i in range(count):
                reached = self.reached[i] if i < len(self.reached) else 0.0
                accepted = self.accepted[i] if i < len(self.accepted) else 0.0
                before = expected[i] if expected else PRIOR ** (i + 1)
                mean, size = (accepted + self._weight * before) / (reached + self._weight), 1
                while blocks and blocks[-1][0] < mean:
                    other, others = blocks.pop()
                    mean, size = (other * others + mean * size) / (others + size), others + size
                blocks.append((mean, size))
            self._reach = [mean for mean, size in blocks for _ in range(size)]
        return self._reach[:count]


def _counted(counts: list[float], kept: float, more: int, length: int = 0) -> list[float]:
    """Counts by position, aged, and one more for each of the first `more`."""
    aged = [kept * x for x in counts] + [0.0] * (max(more, length) - len(counts))
    return [x + (i < more) for i, x in enumerate(aged)]


@dataclass(frozen=True)
class Decision:
    """What was chosen, and the numbers behind it; costs in passes of plain decoding."""

    drafter: str
    num_tokens: int
    alpha: float  # of the first position
    c: float
    expected_speedup: float  # of the whole batch
    break_even: float  # the α at which one drafted token would pay for itself
    least_chance: float  # a token that is less likely to be accepted is not worth its step
    is_probe: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the sentence."""
        values = {
            name: round(v, 4) if isinstance(v, float) else v for name, v in vars(self).items()
        }
        return values | {"says": str(self)}

    def __str__(self) -> str:
        alpha, c, even = map(_short, (self.alpha, self.c, self.break_even))
        if self.is_probe:
            return f"a probe of {self.drafter}: α {alpha}, break-even {even} (c {c})"
        if self.num_tokens:
            expected = f"expected {self.expected_speedup:.2f}×"
            return f"{self.drafter}, K={self.num_tokens}: α {alpha}, c {c}, {expected}"
        if self.break_even > 1:
            return f"K=0 is faster here: {self.drafter} cannot pay (c {c})"
        return f"K=0 is faster here: {self.drafter} has α {alpha} < break-even {even} (c {c})"


def _short(value: float) -> str:
    """Example: 0.714 -> ".71"."""
    return f"{value:.2f}".removeprefix("0")


@dataclass(slots=True)
class Ask:
    """One request of a batch, as the controller sees it."""

    records: dict[str, Acceptance]  # of the drafters that may propose now
    limit: int  # drafted tokens, at most
    remaining: int  # tokens until it ends


class Controller:
    """Chooses for each batch and cycle; learns from what the engine measures and what came."""

    def __init__(self, num_target_weights: int, *others: dict[str, int]) -> None:
        """What Costs takes."""
        self.costs = Costs(num_target_weights, *others)
        # Of all requests so far, by drafter and rule.
        self._typical: dict[tuple[str, str], Acceptance] = {}
        self._saved: dict[str, float] = {}  # tokens that probing may cost, of each idle drafter
        self._rates: dict[int, float] = {}  # of the last plan, by size of the batch

    @classmethod
    def of(cls, target: Any, drafters: dict[str, Any]) -> "Controller":
        """For the core's target and its drafters, each with its name."""
        sizes = {name: getattr(own, "num_step_weights", 0) for name, own in drafters.items()}
        at_once = {name: n for name, own in drafters.items() if (n := own.drafts_at_once)}
        return cls(target.num_weights, sizes, at_once)

    def record(self, name: str, num_prompt_tokens: int, rule: str) -> Acceptance:
        """For a new request, whose drafts are judged by `rule`."""
        kind = TreeAcceptance if name == TREE else Acceptance
        typical = self._typical.setdefault((name, rule), kind())
        return kind(unread=num_prompt_tokens, typical=typical)

    def plan(self, asks: list[Ask], batch: int) -> list[Decision]:
        """Who drafts for each of these asks, and how much; `batch` requests share the pass."""
        if not asks:
            return []
        cycle = _Cycle(asks, self.costs, batch, self._rates.get(batch, 0.0))
        self._rates[batch] = cycle.plan.rate
        for name in cycle.used:
            self._saved.pop(name, None)
        for name in cycle.idle:
            self._saved[name] = self._saved.get(name, 0.0) + cycle.budget()
        if probed := cycle.probe(self._saved):
            self._saved[probed] = 0.0
        else:
            cycle.join()
        return cycle.decisions()


class _Cycle:
    """One cycle's choice for requests that are decided together."""

    def __init__(self, asks: list[Ask], costs: Costs, batch: int, rate: float) -> None:
        """`rate` guesses the tokens per ms."""
        self.asks, self.costs, self.batch = asks, costs, batch
        self.line = costs.pass_line(batch)
        self.alone_ms = self.line.at(batch)  # a pass without drafts
        names = dict.fromkeys(name for ask in asks for name in ask.records)
        self.step_ms = {name: costs.step(name, batch, self.alone_ms) for name in names}
        self.read_ms = {name: costs.read(name, self.alone_ms) for name in names}
        # A row that is fed is a pad less.
        self.row_ms = self.line.slope * (1 - PAD_SHARE if batch > 1 else 1)
        self.prices = self._prices()
        self.offers = [self._offers(ask) for ask in asks]
        self.plan = best_plan(self.offers, self.prices, rate)
        self.plain_rate = self.prices.tokens / self.prices.ms
        if self.plan.rate < _WORTHWHILE * self.plain_rate:
            self.plan = evaluate([NOTHING] * len(asks), self.offers, self.prices)
        self.choices, self.probing = self.plan.choices, set[int]()
        self._shared: dict[str, float] = {}  # what all requests gain by a model's first step
        self.used = {choice.drafter for choice in self.choices}
        self.idle = {name for ask in asks for name in ask.records} - self.used

    def _prices(self) -> Prices:
        steps = {n: fixed for n, (fixed, _) in self.step_ms.items() if self.costs.runs_model(n)}
        ms = self.alone_ms + self.costs.other(self.batch)
        # A position more for one request is a pad more for each of the others.
        width_ms = PAD_SHARE * self.batch * self.line.slope if self.batch > 1 else 0.0
        return Prices(float(self.batch), ms, steps, width_ms, self.costs.at_once)

    def _offers(self, ask: Ask) -> Offers:
        """What each drafter may do for a request; what it reads first serves for some cycles."""
        cycles = min(_SERVED, max(1, ask.remaining // 2))
        offers = {}
        for name, record in ask.records.items():
            longest = self.costs.at_once.get(name, 0)
            worth, row_ms = record.reach(min(ask.limit, longest or ask.limit)), self.row_ms
            if record.coverage < 1:  # it may have nothing to propose
                worth, row_ms = [record.coverage * x for x in worth], record.coverage * row_ms
            read_ms, each_ms = record.unread * self.read_ms[name] / cycles, self.step_ms[name][1]
            if longest:  # its part of the one step
                read_ms, each_ms = read_ms + each_ms, 0.0
            taken = record.taken(len(worth))
            offers[name] = Offer(worth, row_ms + each_ms, read_ms, taken)
        return offers

    def budget(self) -> float:
        """What this cycle allows for probes of each idle drafter, in tokens."""
        return PROBE_BUDGET * self.plan.tokens / max(1, len(self.idle))

    def _lost(self, i: int, name: str, gain: float) -> float:
        """Tokens that request i loses by a probe, the step apart, in place of what gains it so."""
        offer = self.offers[i][name]
        read_ms = self.asks[i].records[name].unread * self.read_ms[name]
        if name in self.costs.at_once:  # its part of the one step
            read_ms += self.step_ms[name][1]
        return gain + self.plan.rate * (offer.token_ms + read_ms) - offer.worth[0]

    def _free(self, offers: Offers) -> tuple[float, Choice]:
        """What a request gains without a model, and how."""
        rate = self.plan.rate
        return best_free({name: gains_of(o, rate) for name, o in offers.items()}, self.prices)

    def join(self) -> None:
        """Let a request that has long drafted nothing take part in a step that is taken anyway."""
        for i, (_, count) in enumerate(self.choices):
            for name, record in self.asks[i].records.items() if not count else ():
                saved = PROBE_BUDGET * record.since * self.plan.tokens / self.batch
                if name in self.used & self.prices.steps.keys() and self._lost(i, name, 0) <= saved:
                    self.choices[i] = Choice(name, min(PROBE_TOKENS, self.asks[i].limit))
                    self.probing.add(i)

    def probe(self, saved: dict[str, float]) -> str | None:
        """Let an idle drafter draft a token for those who lose little, once that was `saved`.

        Of the requests it takes those that make a probe cheapest for each: they share its step.
        """
        rate, steps = self.plan.rate, self.prices.steps
        free = [self._free(offers) for offers in self.offers]
        for name in sorted(self.idle, key=lambda name: -saved.get(name, 0.0)):
            # Two models in one cycle would take twice the time: the chosen one has a rest.
            rest = [
                own if choice.drafter in steps and name in steps and name in offers else choice
                for choice, (_, own), offers in zip(self.choices, free, self.offers, strict=True)
            ]
            others = evaluate(rest, self.offers, self.prices)
            is_wider = not any(choice.num_tokens for choice in rest)
            alone_ms = steps.get(name, 0.0) + is_wider * self.prices.width_ms
            lost = rate * (others.ms + alone_ms) - others.tokens
            able = sorted(
                (self._lost(i, name, free[i][0]), i)
                for i, offers in enumerate(self.offers)
                if name in offers and (name in steps or not self.choices[i].num_tokens)
            )
            if not able:
                continue
            totals = list(accumulate((own for own, _ in able), initial=lost))[1:]
            count = min(range(1, len(able) + 1), key=lambda n: totals[n - 1] / n)
            if totals[count - 1] <= saved.get(name, 0.0):
                self.choices, self.probing = rest, {i for _, i in able[:count]}
                for i in self.probing:
                    self.choices[i] = Choice(name, min(PROBE_TOKENS, self.asks[i].limit))
                return name
        return None

    def decisions(self) -> list[Decision]:
        """What each request is given, with the numbers behind it."""
        speedup = self.plan.rate / self.plain_rate
        result = []
        for i, (name, count) in enumerate(self.choices):
            name = name or self._nearest(i)
            fixed, each = self.step_ms[name]
            c = (fixed + each * self.batch) / self.alone_ms
            alpha = self.asks[i].records[name].reach(1)[0]
            values = alpha, c, speedup, self._break_even(i, name), self._least_chance(i, name)
            result.append(Decision(name, count, *values, i in self.probing))
        return result

    def _least_chance(self, i: int, name: str) -> float:
        """What one more step costs this request, in tokens, if all who draft now share it."""
        num_sharing = max(1, sum(choice.drafter == name for choice in self.choices))
        step_ms = self.prices.step_ms(name, 1) / num_sharing
        return self.plan.rate * (step_ms + self.offers[i][name].token_ms)

    def _nearest(self, i: int) -> str:
        """Whom a request that drafts nothing would rather have than others."""
        records = self.asks[i].records
        return max(records, key=lambda n: records[n].reach(1)[0] - self._break_even(i, n))

    def _break_even(self, i: int, name: str) -> float:
        """The α at which one token would pay: for its row, and for the step if that is not taken.

        Others would share the step: what they gain by it is taken off.
        """
        rate, offer = self.plan.rate, self.offers[i][name]
        needed = rate * (offer.token_ms + offer.read_ms)
        if name not in self.prices.steps or name in self.used:
            return needed
        if name not in self._shared:
            self._shared[name] = sum(
                max(0.0, o.worth[0] - rate * (o.token_ms + o.read_ms))
                for o in (offers[name] for offers in self.offers if name in offers)
            )
        others = self._shared[name] - max(0.0, offer.worth[0] - needed)
        return needed + max(0.0, rate * self.prices.steps[name] - others)
