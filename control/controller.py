"""Where K is chosen: how many tokens to draft, by which drafter. As many as pay, none if none do.

    tokens of a draft:    α₁ + α₁α₂ + … + α₁…α_K
    its time:             the call + K · (a step of the drafter + a row of the pass)
    choose the drafter and the K so that tokens − rate · time is largest

`best_draft` is this rule, for one drafter and one request. All else in this file answers four
questions that the rule leaves open.

*What is the rate?* What time is worth: the tokens per ms that the texts gave on average, over their
last cycles. This cycle's rate would be greedy. Example: n-gram finds nothing for once, and a model
would draft eight tokens at half the usual rate. Two are better: then n-gram may go on.

*Who pays for a step that several share?* Requests are looked at by themselves but for this: a
model's step is taken for all requests that draft with it. So for each model the steps that bring
most to all together are counted; joining a step costs nothing. Two models would run one after the
other, so requests that may choose have the same one.

*What if a drafter is thought not to pay?* It is tried all the same now and then, in a probe of one
token: texts become easy, and what was measured while the machine was busy was wrong. All probes
together may cost half a percent of the time. That is counted across requests, as one of them may be
too short to pay for any. A drafter that costs nothing (n-gram) need not draft to be known: what it
would have drafted is held against what came.

*Does choosing pay at all?* The clock tells (rest.py).

α comes from the request's own cycles (acceptance.py) and times from the clock (costs.py), so that K
shrinks as a batch fills up. Who drafts and how much changes no token, unless a request is verified
by rejection: then the same seed gives another text of the same distribution.
"""

from collections import Counter, deque
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, prod
from typing import Any, NamedTuple

from drafters.pool import TREE, Guess
from messages import Model

from .acceptance import Acceptance, Calibration, Lengths, TreeAcceptance
from .costs import Costs
from .rest import Recent, Rest

PROBE_BUDGET = 0.005  # of the time: what probes may cost
_WORTHWHILE = 0.03  # tokens: a draft must promise to gain so much
_CERTAIN = 0.9  # of a token: what a row of the pass costs at most, where rows are all that is paid
_PACE_DECAY = 0.95  # a factor of the pace of a text, with each cycle
_WARMER = 0.5  # temperatures that differ by so much are told apart
_SERVED = 32  # cycles for which text that a model reads now is thought to serve


class Option(NamedTuple):
    """What a drafter may do for a request: no token, if none gains."""

    drafter: str = ""
    num_tokens: int = 0
    gain: float = 0.0  # tokens, less what their time is worth
    tokens: float = 0.0  # that are expected of it
    ms: float = 0.0  # that they take; shared steps apart


NOTHING = Option()


def best_draft(
    name: str, record: Acceptance, limit: int, rate: float, once_ms: float, token_ms: float
) -> list[Option]:
    """The rule: of drafts of up to 1, 2, … `limit` tokens the one that gains the most.

    A draft of K tokens gives reach(K) more than one of K - 1, and takes `token_ms` more if it comes
    so far; `once_ms` whatever its length. The last one is the best of all.

    Example: α .8 and 1 ms a token at .5 tokens a ms -> tokens .8, 1.44, 1.95, 2.36 … for 1, 2, 3,
    4 … ms, gains .3, .44, .45, .36 …: K = 3.
    """
    best, options, tokens, ms = NOTHING, list[Option](), 0.0, once_ms
    chances = zip(record.reach(limit), record.taken(limit), strict=True)
    for k, (reach, taken) in enumerate(chances, 1):
        tokens += record.coverage * reach
        ms += taken * token_ms
        gain = tokens - rate * ms
        if gain > max(best.gain, _WORTHWHILE):
            best = Option(name, k, gain, tokens, ms)
        options.append(best)
    return options


class Decision(NamedTuple):
    """What was chosen, and the numbers behind it; costs in passes of plain decoding."""

    drafter: str
    num_tokens: int
    alpha: float = 0.0  # of the first position
    c: float = 0.0
    break_even: float = 1.0  # the chance of being accepted at which a draft of a token pays
    least_chance: float = 0.0  # that at which one more token of a draft pays: its call is made
    expected_speedup: float = 1.0  # of the whole batch
    is_probe: bool = False
    is_rest: bool = False  # nothing was chosen: that would have taken longer than drafts bring

    def as_dict(self) -> dict[str, Any]:
        """A dict for JSON, with the sentence."""
        values = {
            name: round(v, 4) if isinstance(v, float) else v for name, v in self._asdict().items()
        }
        return values | {"says": str(self)}

    def __str__(self) -> str:
        if self.is_rest:
            return "K=0 for a while: cycles with drafts were no faster than plain ones"
        alpha, c, even = map(_short, (self.alpha, self.c, self.break_even))
        if self.is_probe:
            return f"a probe of {self.drafter}: α {alpha}, break-even {even} (c {c})"
        if self.num_tokens:
            expected = f"expected {self.expected_speedup:.2f}×"
            return f"{self.drafter}, K={self.num_tokens}: α {alpha}, c {c}, {expected}"
        if self.break_even > 1:
            return f"K=0 is faster here: even a certain {self.drafter} guess costs more (c {c})"
        if self.alpha >= self.break_even:  # it has text to read first, say
            return f"K=0 is faster now: {self.drafter} has α {alpha}, but to begin costs more"
        return f"K=0 is faster here: {self.drafter} has α {alpha} < break-even {even} (c {c})"


RESTING = Decision("", 0, is_rest=True)  # a request without a decision yet


def _short(value: float) -> str:
    """Example: 0.714 -> ".71"."""
    return f"{value:.2f}".removeprefix("0")


@dataclass(slots=True)
class Throughput:
    """How fast a request's text comes, by the estimates of its last cycles."""

    tokens: float = 0.0
    time: float = 0.0  # in plain cycles: what these take in ms is not known at first

    def add(self, tokens: float, time: float) -> None:
        """A cycle; those before it count less."""
        self.tokens = _PACE_DECAY * self.tokens + tokens
        self.time = _PACE_DECAY * self.time + time

    @property
    def rate(self) -> float:
        """Tokens in a plain cycle's time."""
        return self.tokens / self.time if self.time else 1.0


@dataclass(slots=True, eq=False)
class Candidate:
    """One request of a batch, as planner and controller know it."""

    able: dict[str, Acceptance]  # the records of the drafters that may propose now
    limit: int = 0  # drafted tokens, at most, now
    remaining: float = 0.0  # tokens until it ends, as is to be expected
    throughput: Throughput = field(default_factory=Throughput)
    records: dict[str, Acceptance] = field(default_factory=dict)  # of all its drafters
    most: int = 0  # drafted tokens at most, by what was accepted
    guesses: dict[str, Guess] = field(default_factory=dict)  # in this cycle, by drafter


class Choice:
    """One choice for a batch: what each request does, and how long models take for all."""

    def __init__(self, costs: Costs, candidates: list[Candidate], batch: int, rate: float) -> None:
        """`batch` requests share the pass; those that are no candidates draft nothing."""
        self.candidates, self.rate, self._costs = candidates, rate, costs
        self.prices = costs.prices(batch, len(candidates))
        self._counts = Counter(name for candidate in candidates for name in candidate.able)
        self.options = [NOTHING] * len(candidates)
        self.model_ms: dict[str, float] = {}  # of each model that drafts
        self.probing: int | None = None  # which request
        for name in self._counts:
            if not costs.runs_model(name):
                self._join({i: options[-1] for i, options in self._drafts(name).items()})
        models, asking = list(filter(costs.runs_model, self._counts)), set(range(len(candidates)))
        while models:  # the one that brings most; then another for requests that cannot have it
            shares = {name: self._share(name, asking) for name in models}
            name = max(models, key=lambda name: shares[name][0])
            gain, ms, options = shares[name]
            if gain > 0:
                self.model_ms[name] = ms
                self._join(options)
            asking -= {i for i in asking if name in candidates[i].able}
            models = [n for n in models if any(n in candidates[i].able for i in asking)]

    def _join(self, options: dict[int, Option]) -> None:
        """Give each request its option in `options` if that gains more than the present one."""
        for i, option in options.items():
            if option.gain > self.options[i].gain:
                self.options[i] = option

    def _drafts(self, name: str) -> dict[int, list[Option]]:
        """The best drafts of up to 1, 2, … tokens, by request; steps of a model apart."""
        price, runs, drafts = self.prices.drafts[name], self._costs.runs_model(name), {}
        is_tried = False  # by a text of this batch: one is enough to see what it brings
        for i, candidate in enumerate(self.candidates):
            if record := candidate.able.get(name):
                if runs and record.is_untried:
                    if is_tried:
                        continue
                    is_tried = True
                limit = min(candidate.limit, self._costs.at_once.get(name, candidate.limit))
                served = min(_SERVED, max(1.0, candidate.remaining / 2))
                once_ms = record.unread * price.read_ms / served if runs else 0.0
                token_ms = record.coverage * self.prices.row_ms + (0.0 if runs else price.step_ms)
                drafts[i] = best_draft(name, record, limit, self.rate, once_ms, token_ms)
        return drafts

    def _share(self, name: str, asking: set[int]) -> tuple[float, float, dict[int, Option]]:
        """How many steps of a model these requests take together, so that all gain the most.

        Returns what they gain by it, in how many ms of the model, and what each may do then.
        """
        price, best = self.prices.drafts[name], (0.0, 0.0, dict[int, Option]())
        drafts = {i: each for i, each in self._drafts(name).items() if i in asking}
        taken = [self.candidates[i].able[name].taken(len(each)) for i, each in drafts.items()]
        steps = max((self.candidates[i].able[name].steps for i in drafts), default=1.0)
        ms = price.call_ms
        for k, chances in enumerate(zip_longest(*taken, fillvalue=0.0)):
            taken_ms = price.step_ms * (1 - prod(1 - chance for chance in chances))
            ms += taken_ms * (steps if k else 1.0)
            options = {i: each[min(k, len(each) - 1)] for i, each in drafts.items()}
            more = [max(0.0, option.gain - self.options[i].gain) for i, option in options.items()]
            gain = sum(more) - self.rate * ms
            if gain > best[0]:
                best = gain, ms, options
        return best

    def probe(self, name: str, saved: float) -> bool:
        """Let the request that loses least, at most `saved`, draft a token with an idle drafter."""
        price, runs = self.prices.drafts[name], self._costs.runs_model(name)
        ms = self.prices.row_ms + (0.0 if name in self.model_ms else price.first_ms)
        users, losses = Counter(option.drafter for option in self.options), []
        for i, (candidate, best) in enumerate(zip(self.candidates, self.options, strict=True)):
            record = candidate.able.get(name)
            if record and record.since and best.drafter != name:
                spare_ms = self.model_ms.get(best.drafter, 0.0) if users[best.drafter] == 1 else 0.0
                more_ms = ms - spare_ms + runs * record.unread * price.read_ms
                losses.append((best.gain + self.rate * more_ms - record.reach(1)[0], i))
        lost, i = min(losses, default=(inf, 0))
        if lost > saved:
            return False
        self.options[i], self.probing = Option(name, 1), i
        return True

    def decision(self, i: int, speedup: float) -> Decision:
        """A request's decision, with its reasons: without a draft, those of the nearest drafter."""
        option, records, nearest = self.options[i], self.candidates[i].able, -inf
        for name in (option.drafter,) if option.num_tokens else records:
            record, price = records[name], self.prices.drafts[name]
            sharers = self._counts[name] if self._costs.runs_model(name) else 1
            row_ms, step_ms = self.prices.row_ms, price.step_ms / sharers
            even = self.rate * (record.coverage * row_ms + price.call_ms / sharers + step_ms)
            more = self.rate * (row_ms + step_ms * record.steps)
            alpha = record.reach(1)[0]
            if alpha - even > nearest:
                nearest, c = alpha - even, price.first_ms / self.prices.plain_ms
                fields = name, option.num_tokens, alpha, c, even, more, speedup, i == self.probing
        return Decision(*fields)


class Controller:
    """Chooses for each batch and cycle; learns from what the engine measures and what came."""

    def __init__(
        self, num_target_weights: int, *others: dict[str, int], copies: Collection[str] = ()
    ) -> None:
        """The arguments of Costs, and the names of drafters that are copies of the target."""
        self.costs, self._copies = Costs(num_target_weights, *others), copies
        self.lengths = Lengths()
        # Of all requests so far, by drafter, rule and class of temperatures.
        self._typical: dict[tuple[str, str, int], Acceptance] = {}
        self._saved: dict[str, float] = {}  # tokens that probing may cost, of each idle drafter
        self._rests: dict[tuple[int, frozenset], Rest] = {}  # by class of batches and drafters
        self._plain: dict[int, deque[float]] = {}  # what plain cycles of a class take

    @classmethod
    def of(cls, target: Model, drafters: dict[str, Any]) -> "Controller":
        """The controller for the core's target and its drafters by name."""
        sizes = {name: getattr(each, "num_step_weights", 0) for name, each in drafters.items()}
        at_once = {name: n for name, drafter in drafters.items() if (n := drafter.drafts_at_once)}
        copies = [name for name, drafter in drafters.items() if drafter.is_copy]
        return cls(target.num_weights, sizes, at_once, copies=copies)

    def record(self, name: str, rule: str, temperature: float = 0.0) -> Acceptance:
        """A fresh record for a new request, whose drafts are judged by `rule`.

        It begins with what requests of about this temperature brought; at first there are none,
        and the nearest ones say what to expect.
        """
        kind, heat = TreeAcceptance if name == TREE else Acceptance, int(temperature / _WARMER)
        if (name, rule, heat) not in self._typical:
            known = [(abs(h - heat), h) for n, r, h in self._typical if (n, r) == (name, rule)]
            like = self._typical[name, rule, min(known)[1]] if known else None
            calibration = deepcopy(like.calibration) if like else Calibration(name in self._copies)
            self._typical[name, rule, heat] = kind(like, calibration=calibration)
        return kind(self._typical[name, rule, heat])

    def rest(self, batch: int, names: frozenset[str | None]) -> Rest:
        """The rest of batches of about this size, whose requests ask for the drafters `names`."""
        size = batch.bit_length()
        if (size, names) not in self._rests:
            plain = self._plain.setdefault(size, Recent())
            self._rests[size, names] = Rest(plain=plain)
        return self._rests[size, names]

    def join(self) -> None:
        """A new request has come."""
        for (size, _), rest in self._rests.items():
            rest.join(1 << size - 1)

    def decide(self, candidates: list[Candidate], batch: int, cycles: int = 1) -> list[Decision]:
        """Decide which drafter drafts for each candidate, and how much; `batch` share the pass.

        It is the first choice for so many cycles. Of 0 cycles, no drafter is probed.
        """
        if not candidates:
            return []
        prices = self.costs.prices(batch, len(candidates))
        plain_ms, rates = prices.plain_ms, [candidate.throughput.rate for candidate in candidates]
        rate = (sum(rates) + batch - len(candidates)) / plain_ms
        # Where rows have become dearer, no text can be as fast any more as it was.
        rate = max(min(rate, _CERTAIN / max(prices.row_ms, 1e-9)), batch / plain_ms)
        choice = Choice(self.costs, candidates, batch, rate)
        tokens = batch + sum(option.tokens for option in choice.options)
        ms = plain_ms + sum(option.ms for option in choice.options)
        ms += sum(choice.model_ms.values())
        for candidate, option in zip(candidates, choice.options, strict=True):
            candidate.throughput.add(1 + option.tokens, ms / plain_ms)
        if cycles:
            self._probe(choice, cycles * PROBE_BUDGET * tokens)
        speedup = tokens / ms * plain_ms / batch
        return [choice.decision(i, speedup) for i in range(len(candidates))]

    def _probe(self, choice: Choice, budget: float) -> None:
        """Try an idle drafter that may draft now, if enough was saved for that."""
        able = [pair for candidate in choice.candidates for pair in candidate.able.items()]
        idle, saved = sorted({name for name, record in able if record.since}), self._saved
        for name in idle:
            saved[name] = saved.get(name, 0.0) + budget / len(idle)
        for name in sorted(idle, key=lambda name: -saved[name]):
            if choice.probe(name, saved[name]):
                saved[name] = 0.0
                break
