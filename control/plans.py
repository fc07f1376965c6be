"""One choice for a whole batch: who drafts for each request, and how many tokens.

    tokens of a cycle:  Σ over requests of 1 + α₁ + α₁α₂ + … + α₁…α_k
    time of a cycle:    a pass over all rows, padded to the longest + the steps that are taken
    choose the drafters and every k so that tokens − rate · time is largest

What is worth drafting depends on the tokens that a ms gives (the rate). It is known from the cycles
before (controller.py). In a text that begins it depends on what is drafted: guess a rate, choose as
if a ms cost so many tokens, and go on with the rate of that choice until it stays (Dinkelbach's
method: each round is at least as good, and the last one the best there is). At a given rate the
choice falls apart into small ones: a token is worth its chance of being reached and accepted, less
its row of the pass. These chances only fall along a draft, so a
draft ends where a token is no longer worth it. The steps of a model are shared by all requests that
draft with it: for each number of steps, let every request join that gains by it, and keep the
number that gains the most. Two models would run one after the other, so those requests that may
choose all have the same one. What costs no steps (n-gram) may always go along. All this is done for
each length of the longest draft, as the whole batch is padded to it.
"""

from collections.abc import Collection, Iterable
from itertools import accumulate, zip_longest
from math import prod
from typing import NamedTuple

_ROUNDS = 8
_CLOSE = 0.02  # a rate that is so little off costs a plan next to nothing: errors enter squared


class Offer(NamedTuple):
    """What one drafter may do for one request."""

    worth: list[float]  # of each drafted token: the chance that it and all before it are accepted
    token_ms: float  # what each of them costs: a row of the pass, and its part of a step
    read_ms: float = 0.0  # to read what the drafter has missed, by cycle that it serves
    taken: list[float] | None = None  # the chance that it is drafted at all; None: always

    def steps(self, count: int) -> list[float]:
        """For each of the first `count` tokens, the chance that it is drafted."""
        return [1.0] * count if self.taken is None else self.taken[:count]


class Choice(NamedTuple):
    """What one request is given."""

    drafter: str | None
    num_tokens: int


class Prices(NamedTuple):
    """What a batch gives and costs without a draft, and what its requests share."""

    tokens: float
    ms: float
    steps: dict[str, float]  # ms of a model's step, whoever takes part
    width_ms: float = 0.0  # of each position of the longest draft: others are padded to it
    at_once: Collection[str] = ()  # who drafts any number of tokens in one step

    def step_ms(self, name: str, step: int) -> float:
        """What the first (0), second, … step of a draft costs, whoever takes part."""
        return 0.0 if step and name in self.at_once else self.steps.get(name, 0.0)


class Plan(NamedTuple):
    """What a batch is given, and what comes of it by the estimates."""

    choices: list[Choice]
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        """Tokens per ms."""
        return self.tokens / self.ms


Offers = dict[str, Offer]  # by drafter: what one request may choose from
NOTHING = Choice(None, 0)


def best_plan(seats: list[Offers], prices: Prices) -> Plan:
    """The plan of the largest rate."""
    plan = Plan([NOTHING] * len(seats), prices.tokens, prices.ms)
    rate = plan.rate
    for _ in range(_ROUNDS):
        found = evaluate(choose(seats, prices, rate), seats, prices)
        if found.rate > plan.rate:
            plan = found
        if abs(found.rate - rate) <= _CLOSE * rate:
            break
        rate = found.rate
    return plan


def evaluate(choices: list[Choice], seats: list[Offers], prices: Prices) -> Plan:
    """What these choices give and cost."""
    tokens, ms, drafts = prices.tokens, prices.ms, list[tuple[str, list[float]]]()
    for (name, count), seat in zip(choices, seats, strict=True):
        if count:
            offer = seat[name]
            steps = offer.steps(count)
            drafts.append((name, steps))
            tokens += sum(offer.worth[:count])
            ms += sum(steps) * offer.token_ms + offer.read_ms
    for name in dict.fromkeys(name for name, _ in drafts):
        shares = anybody(steps for own, steps in drafts if own == name)
        ms += sum(share * prices.step_ms(name, i) for i, share in enumerate(shares))
    ms += prices.width_ms * sum(anybody(steps for _, steps in drafts))
    return Plan(choices, tokens, ms)


def anybody(drafts: Iterable[list[float]]) -> list[float]:
    """From the chances of each draft to come to each token: that at least one comes there."""
    columns = zip_longest(*drafts, fillvalue=0.0)
    return [1 - prod(1 - share for share in column) for column in columns]


def choose(seats: list[Offers], prices: Prices, rate: float) -> list[Choice]:
    """What gains the most tokens if a ms costs `rate` of them: the best of all widths."""
    gains = [{name: gains_of(offer, rate) for name, offer in seat.items()} for seat in seats]
    widest = max((len(own) for seat in gains for own in seat.values()), default=0)
    best, choices = 0.0, [NOTHING] * len(seats)
    for width in range(widest, 0, -1):
        cut = [{name: own[:width] for name, own in seat.items()} for seat in gains]
        total, found = _choose_within(cut, seats, prices, rate)
        total -= rate * prices.width_ms * width
        if total > best:
            best, choices = total, found
        if not prices.width_ms:
            break
    return choices


def _choose_within(
    gains: list[dict[str, list[float]]], seats: list[Offers], prices: Prices, rate: float
) -> tuple[float, list[Choice]]:
    """The best choices from these gains, and what they gain in all."""
    free = [best_free(own, prices) for own in gains]
    models = [[name for name in seat if name in prices.steps] for seat in seats]
    runs, own = {}, {}
    for name in dict.fromkeys(name for names in models for name in names):
        able = [i for i, names in enumerate(models) if name in names]
        bound = [i for i in able if len(models[i]) == 1]  # who was asked for no other model
        lost = {i: free[i][0] + rate * seats[i][name].read_ms for i in able}
        taken = anybody(seats[i][name].steps(len(gains[i][name])) for i in able)
        costs = [rate * share * prices.step_ms(name, step) for step, share in enumerate(taken)]
        runs[name] = _run(name, able, gains, lost, costs)
        own[name] = runs[name] if bound == able else _run(name, bound, gains, lost, costs)
    favourite = max(runs, key=lambda name: runs[name][0] - own[name][0], default=None)
    choices = [choice for _, choice in free]
    total = sum(gain for gain, _ in free)
    for name in runs:
        gain, joined = runs[name] if name == favourite else own[name]
        total += gain
        for i, count in joined.items():
            choices[i] = Choice(name, count)
    return total, choices


def best_free(gains: dict[str, list[float]], prices: Prices) -> tuple[float, Choice]:
    """The best of the drafters without steps for one request: (gain in tokens, choice)."""
    best = 0.0, NOTHING
    for name, own in gains.items():
        if name not in prices.steps and own and own[-1] > best[0]:
            best = own[-1], Choice(name, len(own))
    return best


def gains_of(offer: Offer, rate: float) -> list[float]:
    """What a draft of 1, 2, … tokens gains, up to the length that gains the most."""
    pairs = zip(offer.worth, offer.steps(len(offer.worth)), strict=True)
    cost = rate * offer.token_ms
    gains = list(accumulate(worth - cost * taken for worth, taken in pairs))
    best = max(gains, default=0.0)
    return gains[: gains.index(best) + 1] if best > 0 else []


def _run(
    name: str,
    able: list[int],
    seats: list[dict[str, list[float]]],
    lost: dict[int, float],
    costs: list[float],
) -> tuple[float, dict[int, int]]:
    """The best length of one model's drafts: (gain in tokens, how many each request joins).

    Who joins has `lost` what it would have had instead, and each further token `costs` so much for
    all together; in tokens, both.
    """
    most, more = {}, []  # more[j]: what step j + 1 adds to the gains of all
    for i in able:
        before, gains = 0.0, seats[i][name]
        if not gains or gains[-1] <= lost[i]:
            continue
        most[i] = len(gains), next(j for j, gain in enumerate(gains, 1) if gain > lost[i])
        more += [0.0] * (len(gains) - len(more))
        for j, gain in enumerate(gains):
            if gain > lost[i]:
                more[j] += gain - lost[i] - before
                before = gain - lost[i]
    best, best_steps, total = 0.0, 0, 0.0
    for count, (gain, cost) in enumerate(zip(more, costs, strict=False), 1):
        total += gain - cost
        if total > best:
            best, best_steps = total, count
    taken = {
        i: min(best_steps, largest) for i, (largest, least) in most.items() if best_steps >= least
    }
    return best, taken
