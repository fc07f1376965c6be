"""How many tokens to draft, decided in each cycle: as many as pay, and none if none do.

    expected tokens of a cycle with K drafts:  E(K) = 1 + α₁ + α₁α₂ + … + α₁…α_K
    its cost, in passes of plain decoding:     T(K) = K · c + t_verify(K)
    choose what makes E − rate · T largest:    for one request its K, for a batch all (plans.py)

The rate is what time is worth: the tokens per ms that the text gives on average, over the last
cycles. (This cycle's own E / T would be greedy. Example: n-gram finds nothing for once, and a model
would draft eight tokens at half the usual rate. Two are better: then n-gram may go on.)

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

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from drafters.panel import TREE

from .acceptance import Acceptance, TreeAcceptance
from .costs import PAD_SHARE, Costs
from .plans import (
    NOTHING,
    Choice,
    Offer,
    Offers,
    Plan,
    Prices,
    best_free,
    best_plan,
    choose,
    evaluate,
    gains_of,
)

PROBE_TOKENS, PROBE_BUDGET = 1, 0.01  # of a probe; the share of the time that probes may cost
_WORTHWHILE = 0.01  # of what a cycle gives without drafts: they must promise so much more
_PACE_KEPT = 0.9  # of the pace of a text, with each cycle
_SERVED = 32  # cycles for which text that a model reads now is thought to serve
_FIRST_GAIN, _GAIN_KEPT = 0.2, 0.8  # of drafting, before it is known, and with each cycle
_SMALL_EFFORT = 0.02  # of a cycle: so much for choosing is no reason to rest
_FIRST_REST, _LONGEST_REST, _LOOKS = 4, 16, 4  # cycles


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
    is_rest: bool = False  # nothing was chosen: that would have taken longer than drafts bring

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the sentence."""
        values = {
            name: round(v, 4) if isinstance(v, float) else v for name, v in vars(self).items()
        }
        return values | {"says": str(self)}

    def __str__(self) -> str:
        alpha, c, even = map(_short, (self.alpha, self.c, self.break_even))
        if self.is_rest:
            return "K=0 is faster here: choosing takes longer than drafts would save"
        if self.is_probe:
            return f"a probe of {self.drafter}: α {alpha}, break-even {even} (c {c})"
        if self.num_tokens:
            expected = f"expected {self.expected_speedup:.2f}×"
            return f"{self.drafter}, K={self.num_tokens}: α {alpha}, c {c}, {expected}"
        if self.break_even > 1:
            return f"K=0 is faster here: even a certain {self.drafter} guess costs more (c {c})"
        return f"K=0 is faster here: {self.drafter} has α {alpha} < break-even {even} (c {c})"


def _short(value: float) -> str:
    """Example: 0.714 -> ".71"."""
    return f"{value:.2f}".removeprefix("0")


@dataclass(slots=True)
class Pace:
    """How fast a request's text comes, by the estimates of its last cycles."""

    tokens: float = 0.0
    ms: float = 0.0

    def add(self, tokens: float, ms: float) -> None:
        """A cycle; those before it count less."""
        self.tokens = _PACE_KEPT * self.tokens + tokens
        self.ms = _PACE_KEPT * self.ms + ms


@dataclass(slots=True)
class Rest:
    """Choosing takes time, too. Where drafts bring less than that, nothing is chosen for a while.

    After each pause a few cycles are looked at, and each pause is twice as long as the one before.
    """

    gain: float = _FIRST_GAIN  # of the last cycles that were looked at, less the effort
    length: int = _FIRST_REST  # of the next pause, in cycles
    looks: int = 0  # cycles since the last one
    left: int = 0  # cycles of this one

    def goes_on(self) -> bool:
        """Whether this cycle belongs to a pause."""
        if not self.left:
            return False
        self.left -= 1
        return True

    def learn(self, gain: float, effort: float) -> None:
        """A cycle that was looked at; both in cycles of plain decoding."""
        self.looks += 1
        self.gain = _GAIN_KEPT * self.gain + (1 - _GAIN_KEPT) * (gain - effort)
        if self.gain >= 0:
            self.length = _FIRST_REST
        elif effort > _SMALL_EFFORT and self.looks >= _LOOKS:
            self.left, self.looks = self.length, 0
            self.length = min(2 * self.length, _LONGEST_REST)


@dataclass(slots=True)
class Ask:
    """One request of a batch, as the controller sees it."""

    records: dict[str, Acceptance]  # of the drafters that may propose now
    limit: int  # drafted tokens, at most
    remaining: int  # tokens until it ends
    pace: Pace = field(default_factory=Pace)


class Controller:
    """Chooses for each batch and cycle; learns from what the engine measures and what came."""

    def __init__(self, num_target_weights: int, *others: dict[str, int]) -> None:
        """What Costs takes."""
        self.costs = Costs(num_target_weights, *others)
        # Of all requests so far, by drafter and rule.
        self._typical: dict[tuple[str, str], Acceptance] = {}
        self._saved: dict[str, float] = {}  # tokens that probing may cost, of each idle drafter
        self._rests: dict[int, Rest] = {}  # by class of batches

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

    def rests(self, batch: int) -> bool:
        """Whether this cycle is plain decoding, without a choice; counts it."""
        rest = self._rests.get(batch.bit_length())
        return rest is not None and rest.goes_on()

    def wake(self) -> None:
        """Something new is there to be looked at."""
        for rest in self._rests.values():
            rest.left = 0

    def plan(self, asks: list[Ask], batch: int) -> list[Decision]:
        """Who drafts for each of these asks, and how much; `batch` requests share the pass."""
        rest = self._rests.setdefault(batch.bit_length(), Rest())
        effort = self.costs.choice(batch) / self.costs.plain(batch)
        if not asks:
            rest.learn(0.0, effort)
            return []
        cycle = _Cycle(asks, self.costs, batch)
        cycle.keep_pace()
        rest.learn(cycle.gain(), effort)
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

    def __init__(self, asks: list[Ask], costs: Costs, batch: int) -> None:
        """`batch` requests share the pass; those that do not ask draft nothing."""
        self.asks, self.costs, self.batch = asks, costs, batch
        self.line = costs.pass_line(batch)
        self.alone_ms = self.line.at(batch)  # a pass without drafts
        names = dict.fromkeys(name for ask in asks for name in ask.records)
        self.step_ms = {name: costs.step(name, batch, self.alone_ms) for name in names}
        self.read_ms = {name: costs.read(name, self.alone_ms) for name in names}
        # A row that is fed is a pad less.
        self.row_ms = self.line.slope * (1 - PAD_SHARE if batch > 1 else 1)
        self.row_ms += costs.other_line(batch).slope
        self.prices = self._prices()
        self.offers = [self._offers(ask) for ask in asks]
        self.plain_rate = self.prices.tokens / self.prices.ms
        self.rate, self.plan = self._best()
        self.choices, self.probing = self.plan.choices, set[int]()
        self._shared: dict[str, float] = {}  # what all requests gain by a model's first step
        self.used = {choice.drafter for choice in self.choices}
        self.idle = {name for ask in asks for name in ask.records} - self.used

    def _best(self) -> tuple[float, Plan]:
        """What a ms is worth, in tokens, and the plan that gains the most by that."""
        if all(ask.pace.ms for ask in self.asks):
            others = (self.batch - len(self.asks)) / self.prices.ms
            rate = others + sum(ask.pace.tokens / ask.pace.ms for ask in self.asks)
            rate = max(rate, self.plain_rate)
            plan = evaluate(choose(self.offers, self.prices, rate), self.offers, self.prices)
        else:  # a text that begins: as if all of it were like this
            plan = best_plan(self.offers, self.prices)
            rate = plan.rate
        plain = evaluate([NOTHING] * len(self.asks), self.offers, self.prices)
        gain = plan.tokens - plain.tokens - rate * (plan.ms - plain.ms)
        return rate, plan if gain > _WORTHWHILE * plain.tokens else plain

    def gain(self) -> float:
        """What the drafts bring, less their time: in cycles of plain decoding."""
        tokens, ms = self.plan.tokens / self.prices.tokens, self.plan.ms / self.prices.ms
        return tokens - ms

    def keep_pace(self) -> None:
        """Let each request know how fast its text comes."""
        for ask, offers, (name, count) in zip(
            self.asks, self.offers, self.plan.choices, strict=True
        ):
            drafted = sum(offers[name].worth[:count]) if name else 0.0
            ask.pace.add(1 + drafted, self.plan.ms)

    def _prices(self) -> Prices:
        steps = {n: fixed for n, (fixed, _) in self.step_ms.items() if self.costs.runs_model(n)}
        ms = self.costs.plain(self.batch)
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
        return gain + self.rate * (offer.token_ms + read_ms) - offer.worth[0]

    def _free(self, offers: Offers) -> tuple[float, Choice]:
        """What a request gains without a model, and how."""
        rate = self.rate
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
        rate, steps = self.rate, self.prices.steps
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
            more_ms = others.ms + alone_ms - self.plan.ms
            lost = rate * more_ms + self.plan.tokens - others.tokens
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
        return self.rate * (step_ms + self.offers[i][name].token_ms)

    def _nearest(self, i: int) -> str:
        """Whom a request that drafts nothing would rather have than others."""
        records = self.asks[i].records
        return max(records, key=lambda n: records[n].reach(1)[0] - self._break_even(i, n))

    def _break_even(self, i: int, name: str) -> float:
        """The α at which one token would pay: for its row, and for the step if that is not taken.

        Others would share the step: what they gain by it is taken off.
        """
        rate, offer = self.rate, self.offers[i][name]
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
