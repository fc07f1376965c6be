"""How many tokens to draft, and who drafts: as many as pay, and none if none do.

    tokens of a draft:    α₁ + α₁α₂ + … + α₁…α_k
    its time:             k · a row of the pass + its part of the steps that are taken
    choose the drafter and the k so that tokens − rate · time is largest

The rate is what time is worth: the tokens per ms that the texts gave on average, over their last
cycles. (This cycle's own would be greedy. Example: n-gram finds nothing for once, and a model would
draft eight tokens at half the usual rate. Two are better: then n-gram may go on.) In a text that
begins it is what the best choice gives: choose at some rate, and go on with the rate of that choice
until it stays.

At a given rate each request can be looked at by itself, but for one thing: a model's step is shared
by all who draft with it. So the number of steps is chosen for all, by what they gain together. Such
a step costs nothing to who joins it. If in a cycle too few join, none is taken. Two models would
run one after the other, so requests that may choose all have the same one.

αᵢ, the chance that the i-th token is accepted once those before it are, is estimated from the
request's own cycles, recent ones counting more. A new request is thought to be like those before
it; the very first guess is high, as a good drafter that is taken for a bad one costs more than a
few drafts in vain. A drafter that costs nothing (n-gram) need not be chosen to be known: what it
would have drafted is held against what came.

K = 0 is plain decoding. A drafter that does not draft is tried all the same now and then, in a
probe: texts become easy, and what was measured while the machine was busy was wrong. All probes
together may cost a hundredth of the time. That is counted across requests, as one of them may be
too short to pay for any.

Costs and numbers of steps are kept for a few cycles (Terms): finding them takes longer than using
them. The rate is found with each choice. Whether choices pay at all the clock tells (rest.py).
Costs come from the clock (costs.py), so that K shrinks as a batch fills up. Who drafts and how much
changes no token, unless a request is verified by rejection: then the same seed gives another text
of the same distribution.
"""

from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import inf, prod
from typing import Any, NamedTuple

from drafters.panel import TREE

from .acceptance import Acceptance, TreeAcceptance
from .costs import Costs
from .rest import PlainCycles, Rest

PROBE_TOKENS, PROBE_BUDGET = 1, 0.01  # of a probe; the share of the time that probes may cost
_WORTHWHILE = 0.01  # tokens: a draft must promise to gain so much
_ROUNDS, _CLOSE = 8, 0.02  # of looking for a rate; one that is so little off costs next to nothing
_LONGEST = 64  # tokens of a draft, at most
_KEPT, _UNSETTLED = 8, 16  # cycles that terms are kept; measurements until they are
_PACE_KEPT = 0.9  # of the pace of a text, with each cycle
_SERVED = 32  # cycles for which text that a model reads now is thought to serve


class Decision(NamedTuple):
    """What was chosen, and the numbers behind it; costs in passes of plain decoding."""

    drafter: str
    num_tokens: int
    alpha: float  # of the first position
    c: float
    break_even: float  # the α at which one drafted token would pay for itself
    least_chance: float  # a token that is less likely to be accepted is not worth its step
    expected_speedup: float  # of the whole batch
    is_probe: bool = False
    is_rest: bool = False  # nothing was chosen: that would have taken longer than drafts bring

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the sentence."""
        values = {
            name: round(v, 4) if isinstance(v, float) else v for name, v in self._asdict().items()
        }
        return values | {"says": str(self)}

    def __str__(self) -> str:
        if self.is_rest:
            return "K=0 is faster here: choosing takes longer than drafts would save"
        alpha, c, even = map(_short, (self.alpha, self.c, self.break_even))
        if self.is_probe:
            return f"a probe of {self.drafter}: α {alpha}, break-even {even} (c {c})"
        if self.num_tokens:
            expected = f"expected {self.expected_speedup:.2f}×"
            return f"{self.drafter}, K={self.num_tokens}: α {alpha}, c {c}, {expected}"
        if self.break_even > 1:
            return f"K=0 is faster here: even a certain {self.drafter} guess costs more (c {c})"
        return f"K=0 is faster here: {self.drafter} has α {alpha} < break-even {even} (c {c})"


RESTING = Decision("", 0, 0.0, 0.0, 1.0, 1.0, 1.0, is_rest=True)  # of whom nothing was said yet


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
class Ask:
    """One request of a batch, as the controller sees it."""

    records: dict[str, Acceptance]  # of the drafters that may propose now
    limit: int  # drafted tokens, at most
    remaining: int  # tokens until it ends
    pace: Pace = field(default_factory=Pace)


class Option(NamedTuple):
    """The best that a drafter may do for a request: no token, if none gains."""

    drafter: str
    num_tokens: int
    alpha: float
    c: float
    break_even: float
    least_chance: float
    gain: float = 0.0  # tokens, less what their time is worth
    tokens: float = 0.0  # that are expected of it
    ms: float = 0.0


class Terms:
    """What time is worth to a batch and what drafts cost there: good for some cycles."""

    def __init__(self, costs: Costs, asks: list[Ask], batch: int) -> None:
        """`batch` requests share the pass; those that do not ask draft nothing."""
        self._costs, self.batch, self.num_asks = costs, batch, len(asks)
        line = costs.pass_line(batch)
        self.plain_ms, self._row_ms = line.at(batch), line.slope
        self.left = _KEPT if line.count >= _UNSETTLED else 1  # cycles
        self.plain_rate = batch / self.plain_ms
        self._steps = {name: costs.step(name, batch, self.plain_ms) for name in costs.shares}
        self._models = [name for name in costs.shares if costs.runs_model(name)]
        self._reads = {name: costs.read(name, self.plain_ms) for name in self._models}
        counts = {name: sum(name in ask.records for ask in asks) for name in self._models}
        self._sharing = {name: count for name, count in counts.items() if count > 1}
        # Of each model that several may draft with, the ms of 0, 1, … steps, as long as they pay.
        self._runs: dict[str, list[float]] = {}
        self._favourite: str | None = None  # of the models
        self._version = object()  # of these terms, for what is known of records
        self.rate = self.plain_rate
        if any(not ask.pace.ms for ask in asks):
            self._settle(asks)
        self.see(asks)
        self._settle(asks)
        # Who has not drafted for a while, and what a probe costs in tokens, at the very least.
        self.idle = {n: 0.0 for ask in asks for n, own in ask.records.items() if own.since}
        for name in self.idle:
            self.idle[name] = (
                min(self._probe_cost(name, ask) for ask in asks if name in ask.records)
                + self.rate * self._steps.get(name, (0.0, 0.0))[0]
            )

    def see(self, asks: list[Ask]) -> None:
        """Find out what time is worth by now."""
        if all(ask.pace.ms for ask in asks):
            others = (self.batch - len(asks)) / self.plain_ms
            rate = others + sum(ask.pace.tokens / ask.pace.ms for ask in asks)
            self.rate = max(rate, self.plain_rate)
            return
        for _ in range(_ROUNDS):  # a text begins: as if all of it were like this
            _, tokens, ms = self.choose(asks)
            found = tokens / ms
            if found <= (1 + _CLOSE) * self.rate:
                break
            self.rate = found

    def _settle(self, asks: list[Ask]) -> None:
        """Find how many steps of models are taken together, and the model that gains the most."""
        self._runs.clear()
        gains, free = {}, [self._best(ask, without_models=True).gain for ask in asks]
        for name in self._sharing:
            able = [(ask, own) for ask, own in zip(asks, free, strict=True) if name in ask.records]
            gains[name] = self._share(name, able)
        self._favourite = max(gains, key=gains.__getitem__, default=None)

    def _share(self, name: str, able: list[tuple[Ask, float]]) -> tuple[float, int]:
        """Find how many steps of a model several requests may take; returns what that gains.

        In tokens, and in steps. Each of them would gain so much without the model.
        """
        taken = [ask.records[name].taken(self._limit(name, ask)) for ask, _ in able]
        chances = [1 - prod(1 - each for each in step) for step in zip_longest(*taken, fillvalue=0)]
        run = [ms * chance for ms, chance in zip(self._steps_ms(name), chances, strict=False)]
        self._runs[name] = run = list(accumulate(run, initial=0.0))
        gains = [0.0] * len(run)  # of all, by the steps that they may take
        for ask, without in able:
            best = without
            for count, tokens, ms in self._known(name, ask)[0]:
                best = max(best, tokens - self.rate * ms)
                gains[count] += best - without
            for longer in range(count + 1, len(run)):
                gains[longer] += best - without
        totals = [gain - self.rate * ms for gain, ms in zip(gains, run, strict=True)]
        most = totals.index(max(totals))
        del run[most + 1 :]
        return totals[most], most

    def _steps_ms(self, name: str) -> list[float]:
        """What each step of the longest draft takes, whoever takes part."""
        fixed = self._steps.get(name, (0.0, 0.0))[0]
        return [fixed] * _LONGEST if name not in self._costs.at_once else [fixed, *[0.0] * _LONGEST]

    def _limit(self, name: str, ask: Ask) -> int:
        return min(ask.limit, self._costs.at_once.get(name, ask.limit))

    def option(self, name: str, ask: Ask) -> Option:
        """The best length of this drafter's draft for a request; shared steps cost it nothing."""
        lengths, c, token_ms, once_ms, step_ms = self._known(name, ask)
        rate, best, chosen = self.rate, _WORTHWHILE, (0, 0.0, 0.0)
        most = len(self._runs[name]) - 1 if name in self._runs else len(lengths)
        for count, tokens, ms in lengths:
            if count > most:
                break
            if (gain := tokens - rate * ms) > best:
                best, chosen = gain, (count, tokens, ms)
        alpha, even = lengths[0][1], rate * (token_ms + once_ms + step_ms)
        chance = rate * (token_ms + step_ms)
        return Option(
            name, chosen[0], alpha, c, even, chance, best if chosen[0] else 0.0, *chosen[1:]
        )

    def _known(self, name: str, ask: Ask) -> Any:
        """Of each length of a draft its tokens and ms; c, and the ms of a token, once, a step."""
        record, limit = ask.records[name], self._limit(name, ask)
        if record.known[:2] != (self._version, limit):
            record.known = self._version, limit, self._lengths(name, record, limit, ask.remaining)
        return record.known[2]

    def _lengths(self, name: str, record: Acceptance, limit: int, remaining: int) -> Any:
        fixed, each_ms = self._steps.get(name, (0.0, 0.0))
        once_ms = record.unread * self._reads.get(name, 0.0) / min(_SERVED, max(1, remaining // 2))
        c = (fixed + each_ms * self.batch) / self.plain_ms
        if name in self._costs.at_once:
            once_ms, each_ms = once_ms + each_ms, 0.0
        steps_ms = [0.0] * limit if name in self._sharing else self._steps_ms(name)
        coverage, tokens, ms, lengths = record.coverage, 0.0, once_ms, []
        pairs = zip(record.reach(limit), record.taken(limit), strict=True)
        token_ms = coverage * self._row_ms + each_ms
        for i, (worth, taken) in enumerate(pairs):
            tokens += coverage * worth
            ms += taken * (token_ms + steps_ms[i])
            lengths.append((i + 1, tokens, ms))
        return lengths, c, token_ms, once_ms, fixed / self._sharing.get(name, 1)

    def choose(self, asks: list[Ask]) -> tuple[list[Option], float, float]:
        """What gains the most for each request; and all tokens and ms of such a cycle."""
        options, ms = [self._best(ask) for ask in asks], self.plain_ms
        for name in {one.drafter for one in options if one.num_tokens} & self._sharing.keys():
            takers = [i for i, one in enumerate(options) if one.drafter == name and one.num_tokens]
            free = [self._best(asks[i], without_models=True) for i in takers]
            run_ms = self._runs[name][max(options[i].num_tokens for i in takers)]
            more = sum(options[i].gain - own.gain for i, own in zip(takers, free, strict=True))
            if more >= self.rate * run_ms:
                ms += run_ms
                continue
            for i, own in zip(takers, free, strict=True):  # too few take part this time
                options[i] = own
        tokens = self.batch + sum(option.tokens for option in options)
        return options, tokens, ms + sum(option.ms for option in options)

    def _best(self, ask: Ask, without_models: bool = False) -> Option:
        own = self._favourite if self._favourite in ask.records else None
        best = _NOBODY
        for name in ask.records:
            if name in self._reads and (without_models or (own and name != own)):
                continue
            option = self.option(name, ask)
            # Where nothing gains, who comes nearest to it.
            if option.gain > best.gain or (
                not best.gain and option.alpha - option.break_even > best.alpha - best.break_even
            ):
                best = option
        return best

    def probe(
        self, name: str, asks: list[Ask], options: list[Option], saved: float
    ) -> dict[int, Option]:
        """Options of those who lose little by one token of this drafter, if no more than `saved`.

        All who could take part have no other model meanwhile: it would take twice the time. Of the
        requests those are taken that make a probe cheapest for each: they share its step.
        """
        lost = self.rate * self._steps.get(name, (0.0, 0.0))[0]
        able, rest = list[tuple[float, int]](), dict[int, Option]()
        for i, (ask, option) in enumerate(zip(asks, options, strict=True)):
            if name not in ask.records:
                continue
            if name in self._reads and option.drafter in self._reads:
                rest[i] = self._best(ask, without_models=True)
                lost += option.gain - rest[i].gain
            able.append((rest.get(i, option).gain + self._probe_cost(name, ask), i))
        if not able:
            return {}
        for other in {options[i].drafter for i in rest} & self._sharing.keys():
            most = max(options[i].num_tokens for i in rest if options[i].drafter == other)
            lost -= self.rate * self._runs[other][most]  # that is not taken now
        totals = list(accumulate((own for own, _ in sorted(able)), initial=lost))[1:]
        count = min(range(len(able)), key=lambda n: totals[n] / (n + 1))
        if totals[count] > saved:
            return {}
        for _, i in sorted(able)[: count + 1]:
            rest[i] = self.option(name, asks[i])._replace(num_tokens=PROBE_TOKENS)
        return rest

    def join(self, asks: list[Ask], options: list[Option]) -> None:
        """Let who has long drafted nothing take part in a step that is taken anyway."""
        used = {one.drafter for one in options if one.num_tokens} & self._sharing.keys()
        for i, (ask, option) in enumerate(zip(asks, options, strict=True)) if used else ():
            for name in used & ask.records.keys() if not option.num_tokens else ():
                if self._probe_cost(name, ask) <= PROBE_BUDGET * ask.records[name].since:
                    options[i] = self.option(name, ask)._replace(num_tokens=PROBE_TOKENS)

    def _probe_cost(self, name: str, ask: Ask) -> float:
        """What one token of a drafter costs a request, less what it brings; the step apart."""
        record, (_, each_ms) = ask.records[name], self._steps.get(name, (0.0, 0.0))
        ms = self._row_ms + each_ms + record.unread * self._reads.get(name, 0.0)
        return self.rate * ms - record.reach(1)[0]


_NOBODY = Option("", 0, 0.0, 0.0, inf, 1.0)  # who gains less than anybody


class Controller:
    """Chooses for each batch and cycle; learns from what the engine measures and what came."""

    def __init__(self, num_target_weights: int, *others: dict[str, int]) -> None:
        """What Costs takes."""
        self.costs = Costs(num_target_weights, *others)
        # Of all requests so far, by drafter and rule.
        self._typical: dict[tuple[str, str], Acceptance] = {}
        self._saved: dict[str, float] = {}  # tokens that probing may cost, of each idle drafter
        self.who: Any = None  # may draft in this cycle
        self._rests: dict[tuple[int, Any], Rest] = {}  # by class of batches, and by who may draft
        self._plain = PlainCycles()
        self._terms: Terms | None = None

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

    def _rest(self, batch: int) -> Rest:
        return self._rests.setdefault((batch.bit_length(), self.who), Rest())

    def rests(self, batch: int) -> bool:
        """Whether this cycle is plain decoding, without a choice; counts it."""
        return self._rest(batch).begin()

    def keeps(self, batch: int) -> int:
        """For how many more cycles a choice is kept."""
        return self._rest(batch).keeps

    def took(self, batch: int, tokens: int, ms: float, choice_ms: float) -> None:
        """A cycle for which drafts were chosen, in choice_ms, or before in 0, took so long."""
        rest, plain_ms = self._rest(batch), self._plain.ms(batch)
        rest.see(tokens / batch, ms / plain_ms if plain_ms else 0.0)
        if choice_ms:
            rest.see_choice(choice_ms / (plain_ms or ms))

    def took_plain(self, batch: int, ms: float) -> None:
        """A cycle without drafts took so long."""
        self._plain.see(batch, ms)

    def join(self) -> None:
        """A new request has come."""
        self._terms = None
        for (size, _), rest in self._rests.items():
            rest.join(1 << size - 1)

    def plan(self, asks: list[Ask], batch: int) -> list[Decision]:
        """Who drafts for each of these asks, and how much; `batch` requests share the pass."""
        if not asks:
            return []
        terms = self._terms
        if not (terms and terms.left and (terms.batch, terms.num_asks) == (batch, len(asks))):
            terms = self._terms = Terms(self.costs, asks, batch)
        else:
            terms.see(asks)
        terms.left -= 1
        options, tokens, ms = terms.choose(asks)
        for ask, option in zip(asks, options, strict=True):
            ask.pace.add(1 + option.tokens, ms)
        speedup = tokens / ms / terms.plain_rate
        probed = self._probe(terms, asks, options, PROBE_BUDGET * tokens)
        return [Decision(*one[:6], speedup, one.drafter == probed) for one in options]

    def _probe(
        self, terms: Terms, asks: list[Ask], options: list[Option], budget: float
    ) -> str | None:
        """An idle drafter that may draft now, as that was saved: it changes the options."""
        for option in options:
            if option.num_tokens and option.drafter in terms.idle:
                del terms.idle[option.drafter]
                self._saved.pop(option.drafter, None)
        terms.join(asks, options)
        saved = self._saved
        for name in terms.idle:
            saved[name] = saved.get(name, 0.0) + budget / len(terms.idle)
        able = [name for name, least in terms.idle.items() if saved[name] >= least]
        for name in sorted(able, key=lambda name: -saved[name]):
            if probing := terms.probe(name, asks, options, saved[name]):
                options[:] = map(probing.get, range(len(options)), options)
                saved[name] = 0.0
                return name
        return None
