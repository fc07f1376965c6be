"""Who drafts for each request in a cycle, and how much. As much as pays, nothing if nothing does.

    plan → (the engine drafts and verifies) → learn, for each request → record_cycle

    tokens of a draft:    α₁ + α₁α₂ + … + α₁…α_K
    its time:             the drafter's steps + the pass's further rows
    choose the drafter and the K so that tokens − rate · time is largest

`best_draft` is this rule, for one drafter and one request. What it goes by is in estimates.py. All
else here answers the questions that the rule leaves open; docs/speed.md tells why so.

*What is the rate?* What time is worth: the tokens per ms that the texts gave lately.
*Who pays for a step that several share?* All of them: `Choice` counts the steps of a model that
bring most to all together. Two models would run one after the other, so requests have the same one.
*What if a drafter is thought not to pay?* It is tried now and then: `Choice.probe`.
*Does it pay at all?* The clock tells: `Account`.

Who drafts and how much changes no token, unless a request is verified by rejection: then the same
seed gives another text of the same distribution.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, prod, sqrt
from statistics import median_low
from typing import Any, NamedTuple

from drafters.plan import IDLE, FixedK, Plan, fixed, limit_of, nothing
from drafters.pool import TREE, DrafterPool, Guess, Task
from drafters.tree import longest
from messages import RESTING, Cycle, Decision, Draft, Model, TextSequence

from .estimates import READ_ALONG, Acceptance, Calibration, Costs, Lengths, TreeAcceptance

PROBE_BUDGET, CHOICE_BUDGET, LOSS_BUDGET = 0.005, 0.01, 0.02  # of the time, at most
_STAKE, _LOOK = 6.0, 1.5  # plain cycles: what may be lost in all, and after a rest
_READING = 1.0  # plain cycles: models read no more while so much is unpaid
_OUTLIER = 3.0  # times as long as usual: the machine did something else
_RENEWED, _PLAIN = 256, 4  # cycles with drafts until so many plain ones are measured again
_PAID_BACK = 32  # cycles in which the text that a model reads now has to pay
_WORTHWHILE = 0.03  # tokens: a draft must promise to gain so much
_CERTAIN = 0.9  # of a token: what a row of the pass costs at most, where rows are all that is paid
_PACE_DECAY = 0.95  # a factor of the pace of a text, with each cycle
_WARMER = 0.5  # temperatures that differ by so much are told apart
_FIRST = 5  # tokens a text drafts at most, until all of so many were accepted
_SURE, _FOLLOWED = 0.9, 4  # the chance of a prediction's next token, behind so many that came true
_FEW = 4  # a batch of which no more than this part is new keeps its plan for the others
# Kinds of cycle, beside IDLE: drafts chosen now; chosen earlier; none, in a rest.
CHOSEN, REUSED, RESTS = "chosen", "reused", "rests"


class Option(NamedTuple):
    """What a drafter may do for a request: no token, if none gains."""

    drafter: str = ""
    num_tokens: int = 0
    gain: float = 0.0  # tokens, less what their time is worth
    tokens: float = 0.0  # that are expected of it
    ms: float = 0.0  # that they take; shared steps apart


NOTHING = Option()


def best_draft(
    name: str, record: Acceptance, limit: int, rate: float, once_ms: float, token_ms: Sequence
) -> list[Option]:
    """The rule: of drafts of up to 1, 2, … `limit` tokens the one that gains the most.

    A draft of K tokens gives reach(K) more than one of K - 1, and takes token_ms[K - 1] more if it
    comes so far; `once_ms` whatever its length. The last one is the best of all.

    Example: α .8 and 1 ms a token at .5 tokens a ms -> tokens .8, 1.44, 1.95, 2.36 … for 1, 2, 3,
    4 … ms, gains .3, .44, .45, .36 …: K = 3.
    """
    best, options, tokens, ms = NOTHING, list[Option](), 0.0, once_ms
    chances = zip(record.reach(limit), record.taken(limit), token_ms, strict=False)
    for k, (reach, taken, further_ms) in enumerate(chances, 1):
        tokens += record.coverage * reach
        ms += taken * further_ms
        gain = tokens - rate * ms
        if gain > max(best.gain, _WORTHWHILE):
            best = Option(name, k, gain, tokens, ms)
        options.append(best)
    return options


@dataclass(slots=True, eq=False)
class Candidate:
    """One request, as the choice knows it."""

    able: dict[str, Acceptance]  # the records of the drafters that may propose now
    limit: int = 0  # drafted tokens, at most, now
    remaining: float = 0.0  # tokens until it ends, as is to be expected
    records: dict[str, Acceptance] = field(default_factory=dict)  # of all its drafters
    most: int = _FIRST  # drafted tokens at most, by what was accepted
    guesses: dict[str, Guess] = field(default_factory=dict)  # in this cycle, by drafter
    tokens: float = 0.0  # of its last cycles, by their estimates; old ones count less
    time: float = 0.0  # of these, in plain cycles

    @property
    def rate(self) -> float:
        """Tokens in a plain cycle's time. One cycle's is greedy: n-gram may soon hit again."""
        return self.tokens / self.time if self.time else 1.0


class Choice:
    """One choice for a batch: what each request does, and how long models take for all."""

    def __init__(
        self, costs: Costs, candidates: list[Candidate], batch: int, rate: float, read_ms: float
    ) -> None:
        """`batch` requests share the pass; those that are no candidates draft nothing.

        Models read text that they have missed only as long as that took less than `read_ms`.
        """
        self.candidates, self.rate, self._costs, self._batch = candidates, rate, costs, batch
        self._read_ms = read_ms
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

    def rows_ms(self, name: str, limit: int) -> list[float]:
        """What the row of each drafted token takes, if all who may use this drafter draft alike."""
        return self._costs.rows_ms(self._batch, len(self.candidates), self._counts[name], limit)

    def _drafts(self, name: str) -> dict[int, list[Option]]:
        """The best drafts of up to 1, 2, … tokens, by request; steps of a model apart."""
        price, runs, drafts = self.prices.drafts[name], self._costs.runs_model(name), {}
        rows_ms = self.rows_ms(name, max(candidate.limit for candidate in self.candidates))
        for i, candidate in enumerate(self.candidates):
            if record := candidate.able.get(name):
                limit = min(candidate.limit, self._costs.at_once.get(name, candidate.limit))
                served = min(_PAID_BACK, max(1.0, candidate.remaining / 2))
                once_ms = record.unread * price.read_ms / served if runs else 0.0
                step_ms = 0.0 if runs else price.step_ms
                token_ms = [record.coverage * row_ms + step_ms for row_ms in rows_ms]
                drafts[i] = best_draft(name, record, limit, self.rate, once_ms, token_ms)
        return drafts

    def _share(self, name: str, asking: set[int]) -> tuple[float, float, dict[int, Option]]:
        """How many steps of a model these requests take together, so that all gain the most.

        Returns what they gain by it, in how many ms of the model, and what each may do then.
        """
        price, best = self.prices.drafts[name], (0.0, 0.0, dict[int, Option]())
        drafts = {i: each for i, each in self._drafts(name).items() if i in asking}
        for i in self._too_many(name, drafts):
            del drafts[i]
        taken = [self.candidates[i].able[name].taken(len(each)) for i, each in drafts.items()]
        steps = max((self.candidates[i].able[name].steps for i in drafts), default=1.0)
        ms = price.first_ms - price.step_ms
        for k, chances in enumerate(zip_longest(*taken, fillvalue=0.0)):
            taken_ms = price.step_ms * (1 - prod(1 - chance for chance in chances))
            ms += taken_ms * (steps if k else 1.0)
            options = {i: each[min(k, len(each) - 1)] for i, each in drafts.items()}
            more = [max(0.0, option.gain - self.options[i].gain) for i, option in options.items()]
            gain = sum(more) - self.rate * ms
            if gain > best[0]:
                best = gain, ms, options
        return best

    def _too_many(self, name: str, drafts: dict[int, list[Option]]) -> list[int]:
        """The requests whose text a model may not read now, although it would pay.

        Of a model that nobody has tried one text is enough to see whether it does.
        """
        price, left_ms, over = self.prices.drafts[name], self._read_ms, []
        drafting = {i: self.candidates[i].able[name] for i in drafts if drafts[i][-1].num_tokens}
        readers = {i: record for i, record in drafting.items() if record.unread > READ_ALONG}
        is_tried_now = len(readers) < len(drafting)
        for i, record in readers.items():
            if left_ms <= 0 or (record.is_untried and is_tried_now):
                over.append(i)
            left_ms, is_tried_now = left_ms - record.unread * price.read_ms, True
        return over

    def probe(self, name: str, saved: float) -> bool:
        """Let the request that loses least, at most `saved`, draft a token with an idle drafter."""
        price, runs = self.prices.drafts[name], self._costs.runs_model(name)
        ms = self.rows_ms(name, 1)[0] + (0.0 if name in self.model_ms else price.first_ms)
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
            row_ms = self.rows_ms(name, 1)[0]
            even = self.rate * (record.coverage * row_ms + price.first_ms / sharers)
            more = self.rate * (row_ms + price.step_ms / sharers * record.steps)
            alpha = record.reach(1)[0]
            if alpha - even > nearest:
                nearest, c = alpha - even, price.first_ms / self.prices.plain_ms
                fields = name, option.num_tokens, alpha, c, even, more, speedup, i == self.probing
        return Decision(*fields)


@dataclass
class Account:
    """What drafts won and lost by the clock in batches of about one size, in plain cycles.

        wins and losses of cycles with drafts      + tokens − time
        the allowance, in every cycle              + LOSS_BUDGET · time
        never more than                              _STAKE

    Below 0 no drafts are chosen until the allowance has brought it to _LOOK. So over any
    stretch of time drafts lose at most the stake, the allowance and what one cycle may lose. All of
    a cycle's time counts: drafting, choosing, and whatever else the machine did. What models read
    serves many cycles, so it is counted apart: beyond a plain cycle nothing more is read until what
    drafts won, and the allowance, have paid for it.
    """

    plain: deque[float]  # ms of plain cycles; of more requests the root of their number more
    balance: float = _STAKE
    is_resting: bool = False
    unpaid: float = 0.0  # for text that models have read
    usual: float = 1.0  # the time of a cycle with drafts
    was_slow: bool = False
    drafted: int = _RENEWED  # cycles with drafts since plain ones were measured
    left: int = 0  # plain cycles that are to be measured now

    def may_draft(self) -> bool:
        """Whether drafts may be chosen for the next cycle."""
        if not self.left and self.drafted >= _RENEWED:
            self.left, self.drafted = _PLAIN, 0
        self.left -= (measures := self.left > 0)
        self.is_resting &= self.balance < _LOOK
        return not (measures or self.is_resting)

    def join(self) -> None:
        """A new text may be quite different: drafts are tried again, if nothing is owed.

        Nor may it lose all that others have won.
        """
        self.is_resting &= self.balance < 0
        self.balance = min(self.balance, _STAKE / 2)

    def see(self, tokens: float, batch: int, ms: float, read_ms: float) -> None:
        """A cycle with drafts gave each of `batch` requests so many tokens, and took `ms`.

        Of this, models read text that they had missed for `read_ms`.
        """
        self.drafted += 1
        if not self.plain:
            return
        plain_ms = median_low(self.plain) * sqrt(batch)
        time, most = max(0.0, ms - read_ms) / plain_ms, _OUTLIER * max(1.0, self.usual)
        # Once it may have been an accident.
        self.was_slow, time = time > most, time if self.was_slow else min(time, most)
        self.usual += 0.1 * (time - self.usual)
        self.unpaid += read_ms / plain_ms - max(0.0, tokens - time)
        self._add(tokens - time, time)

    def see_plain(self, batch: int, ms: float) -> None:
        """A cycle without drafts."""
        self.plain.append(ms / sqrt(batch))
        self._add(0.0, 1.0)

    def _add(self, won: float, time: float) -> None:
        self.balance = min(_STAKE, self.balance + won + LOSS_BUDGET * time)
        self.unpaid = max(0.0, self.unpaid - LOSS_BUDGET * time)
        self.is_resting |= self.balance < 0

    @property
    def room(self) -> float:
        """How many plain cycles models may take to read text that they have missed."""
        return _READING - self.unpaid


class Controller:
    """What is known across requests, and the choice for a batch by it."""

    def __init__(
        self, num_target_weights: int, *others: dict[str, int], copies: Collection[str] = ()
    ) -> None:
        """The arguments of Costs, and the names of drafters that are copies of the target."""
        self.costs, self._copies = Costs(num_target_weights, *others), copies
        self.lengths = Lengths()
        # Of all requests so far, by drafter, rule and class of temperatures.
        self._typical: dict[tuple[str, str, int], Acceptance] = {}
        self._saved: dict[str, float] = {}  # tokens that probing may cost, of each idle drafter
        self._accounts: dict[tuple[int, frozenset], Account] = {}  # by class of batches, drafters
        self._plain: dict[int, deque[float]] = {}  # what plain cycles of a class take

    @classmethod
    def of(cls, target: Model, drafters: dict[str, Any]) -> "Controller":
        """The controller for the core's target and its drafters by name."""
        sizes = {name: getattr(each, "num_step_weights", 0) for name, each in drafters.items()}
        at_once = {name: n for name, drafter in drafters.items() if (n := drafter.drafts_at_once)}
        copies = [name for name, drafter in drafters.items() if drafter.is_copy]
        return cls(target.num_weights, sizes, at_once, copies=copies)

    def planner(self, pool: DrafterPool) -> "Planner":
        """The planner that chooses by this controller among the drafters of a pool."""
        return Planner(self, pool)

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

    def account(self, batch: int, names: frozenset[str | None]) -> Account:
        """That of batches of about this size, whose requests ask for the drafters `names`."""
        size = batch.bit_length()
        if (size, names) not in self._accounts:
            plain = self._plain.setdefault(size, deque(maxlen=8))
            self._accounts[size, names] = Account(plain)
        return self._accounts[size, names]

    def join(self) -> None:
        """A new request has come."""
        for (size, _), account in self._accounts.items():
            if size == 1:  # one of many changes little
                account.join()

    def decide(
        self, candidates: list[Candidate], batch: int, cycles: float = 1, room: float = inf
    ) -> list[Decision]:
        """Decide which drafter drafts for each candidate, and how much; `batch` share the pass.

        It is the first choice for so many cycles. Of 0 cycles, no drafter is probed. Models read
        what they have missed while that took less than `room` plain cycles.
        """
        if not candidates:
            return []
        prices = self.costs.prices(batch, len(candidates))
        plain_ms, rates = prices.plain_ms, [candidate.rate for candidate in candidates]
        row_ms = self.costs.rows_ms(batch, len(candidates), 1, 1)[0]
        # Where rows have become dearer, no text can be as fast any more as it was.
        rate = (sum(rates) + batch - len(candidates)) / plain_ms
        rate = max(min(rate, _CERTAIN / max(row_ms, 1e-9)), batch / plain_ms)
        choice = Choice(self.costs, candidates, batch, rate, room * plain_ms)
        tokens = batch + sum(option.tokens for option in choice.options)
        ms = plain_ms + sum(option.ms for option in choice.options)
        ms += sum(choice.model_ms.values())
        for candidate, option in zip(candidates, choice.options, strict=True):
            candidate.tokens = _PACE_DECAY * candidate.tokens + 1 + option.tokens
            candidate.time = _PACE_DECAY * candidate.time + ms / plain_ms
        if cycles:
            self._probe(choice, cycles * PROBE_BUDGET * tokens)
        speedup = tokens / ms * plain_ms / batch
        return [choice.decision(i, speedup) for i in range(len(candidates))]

    def _probe(self, choice: Choice, budget: float) -> None:
        """Try an idle drafter that may draft now, if enough was saved for that.

        Savings are counted across requests, as one of them may be too short to pay for a probe.
        """
        able = [pair for candidate in choice.candidates for pair in candidate.able.items()]
        idle, saved = sorted({name for name, record in able if record.since}), self._saved
        for name in idle:
            saved[name] = saved.get(name, 0.0) + budget / len(idle)
        for name in sorted(idle, key=lambda name: -saved[name]):
            if choice.probe(name, saved[name]):
                saved[name] = 0.0
                break


def asked(s: TextSequence) -> str | None:
    """Who may draft: what drafts bring with a prediction says nothing of texts without one."""
    return f"{s.request.drafter} and a prediction" if s.request.prediction else s.request.drafter


class Planner(FixedK):
    """Lets the controller choose, for all requests of a batch together."""

    def __init__(self, controller: Controller, pool: DrafterPool) -> None:
        self.controller, self._pool = controller, pool
        self.decisions: dict[str, Decision] = {}  # the last one on each drafter
        self.candidates: dict[TextSequence, Candidate] = {}  # of all open sequences
        self._chosen: dict[TextSequence, Task] = {}  # what was chosen last
        self._owed_ms, self._served = 0.0, 0  # for choosing; cycles that the last choice served
        if model := pool.choices.get(TREE):  # a tree has its steps
            controller.costs.shares[TREE] = controller.costs.shares.get(model[0], 0.0)

    def open(self, s: TextSequence) -> None:
        """Give each drafter of a new sequence a record, and a tree of them."""
        text, sampling = s.drafting, s.request.sampling
        names = [*text.states, TREE] if len(self._pool.members(text, TREE)) > 1 else text.states
        how = sampling.rule, sampling.temperature
        self.candidates[s] = Candidate(
            {}, records={name: self.controller.record(name, *how) for name in names}
        )
        self.controller.join()

    def close(self, s: TextSequence) -> None:
        self.controller.lengths.observe(len(s.output), s.finish_reason == "stop")
        self.candidates.pop(s, None)
        self._chosen.pop(s, None)

    def plan(self, batch: list[TextSequence]) -> Plan:
        """Choose a drafter for each sequence, reuse what was chosen before, or let all rest."""
        names = frozenset(map(asked, batch))
        plan = Plan([], account=self.controller.account(len(batch), names))
        new = [s for s in batch if s.num_steps and s not in self._chosen]
        if not plan.account.may_draft():
            plan.kind, self._owed_ms, self._chosen = RESTS, 0.0, {}
            plan.tasks = [self._resting(s, plan.account.is_resting) for s in batch]
        elif self._owed_ms > 0 and len(new) <= len(batch) // _FEW:
            plan.kind, self._served = REUSED, self._served + 1
            if new:
                self._choose(plan, new, len(batch))
            plan.tasks = list(map(self._reused, batch))
        else:
            served, self._served, self._chosen = self._served + 1, 0, {}
            plan.kind = CHOSEN if self._choose(plan, batch, len(batch), served) else IDLE
            plan.tasks = [self._chosen.get(s) or nothing(s) for s in batch]
        for s, task in zip(batch, plan.tasks, strict=True):
            name = task.drafter
            if task.limit and name in self.candidates[s].records:
                plan.unread[name] = plan.unread.get(name, 0) + self._missed(s, name)
        return plan

    def _reused(self, s: TextSequence) -> Task:
        """The task chosen before, where it is still possible."""
        task = self._chosen.get(s, Task())
        is_probe = task.decision and task.decision.is_probe
        can = task.limit and (task.drafter in s.drafting.states or task.drafter == TREE)
        if not can or is_probe:
            return nothing(s)
        return task._replace(limit=min(task.limit, limit_of(s)))

    def _resting(self, s: TextSequence, is_rest: bool) -> Task:
        """The task where all rest, or are timed: no draft, but for a request with a fixed K."""
        if s.request.fixed_k:
            return fixed(s)
        if not (s.drafting.states and s.num_steps):
            return nothing(s)
        said = s.drafting.task.decision or RESTING
        said = said._replace(num_tokens=0, expected_speedup=1.0, is_probe=False)
        return Task(decision=said._replace(is_rest=is_rest, is_timing=not is_rest))

    def _missed(self, s: TextSequence, name: str) -> int:
        """The tokens of a text that a drafter does not know; for a tree, the most of a member."""
        names = self._pool.members(s.drafting, TREE) if name == TREE else [name]
        return len(s.tokens) - min(self.candidates[s].records[name].num_read for name in names)

    def _choose(
        self, plan: Plan, sequences: list[TextSequence], batch: int, cycles: int = 0
    ) -> list[Decision]:
        """Choose for these of a batch. Returns the decisions on requests that have a choice.

        It is the first choice for so many cycles: 0, if it is one for newcomers alone.
        """
        began, asking = time.perf_counter(), list[TextSequence]()
        # Reading pays where many cycles are like this one: not while a batch fills up.
        is_full = all(other.num_steps for other in self.candidates)
        room = plan.account.room if is_full else 0.0
        for s in [s for s in sequences if s.num_steps]:  # the others read their prompts
            candidate, candidate.guesses = self.candidates[s], {}
            self._chosen[s] = fixed(s) if s.request.fixed_k else nothing(s)
            candidate.limit = min(limit_of(s), candidate.most)
            candidate.remaining = self.controller.lengths.left(len(s.output), s.remaining)
            if candidate.limit and not s.request.fixed_k:
                candidate.able = self._able(s, candidate, room > 0)
                asking += [s] if candidate.able else []
        decisions = self.controller.decide(
            [self.candidates[s] for s in asking], batch, cycles, room
        )
        for s, decision in zip(asking, decisions, strict=True):
            self.decisions[decision.drafter], goes_on = decision, None
            if decision.num_tokens and s.request.sampling.is_coupled:  # else see Chain
                record = self.candidates[s].records[decision.drafter]
                goes_on = record.doubts(decision.least_chance)
            self._chosen[s] = Task(decision.drafter, decision.num_tokens, goes_on, decision)
        plan.choice_ms = (time.perf_counter() - began) * 1e3
        return decisions

    def _able(self, s: TextSequence, candidate: Candidate, may_read: bool) -> dict[str, Acceptance]:
        """The records of the drafters to choose from: those that may have a proposal now.

        Where models may not read, those that would have to are left out.
        """
        text, able = s.drafting, dict[str, Acceptance]()
        for name in list(text.states):
            record = self._record(s, name)
            guess = self._pool.guess(text, name, candidate.limit)
            if guess is not None:
                candidate.guesses[name] = guess
            if guess is None or guess.tokens:
                able[name] = record.with_evidence(guess.evidence if guess else 0)
        sure = able.get("prediction")
        if sure and sure.reach(1)[0] > _SURE:
            if candidate.guesses["prediction"].evidence >= _FOLLOWED:
                return {"prediction": sure}  # no model needs to read the text, to be probed
        able = able or candidate.records  # guessing may have cost it a drafter
        names = [n for n in able if n in text.states and (may_read or not self._reads(able[n], n))]
        able = {name: able[name] for name in names}
        if s.request.drafter == TREE and len(self._pool.members(text, TREE)) > 1:
            able[TREE] = self._record(s, TREE)  # beside a chain of each of its drafters
        return able

    def _reads(self, record: Acceptance, name: str) -> bool:
        """Whether a model would first read text that it has missed."""
        return record.unread > READ_ALONG and self.controller.costs.runs_model(name)

    def _record(self, s: TextSequence, name: str) -> Acceptance:
        """A drafter's record, with what it has missed."""
        record = self.candidates[s].records[name]
        record.unread, record.since = self._missed(s, name), s.num_steps - 1 - record.last
        return record

    def learn(self, plan: Plan, s: TextSequence, cycle: Cycle) -> None:
        """Learn what a cycle says of each drafter that the request may choose from.

        Of those that did not draft, or not alone: of what they would have drafted, how much came
        true. Where nothing was chosen, only of a model that drafted.
        """
        candidate, text = self.candidates[s], s.drafting
        if cycle.num_accepted < cycle.num_drafted:
            candidate.most = _FIRST
        elif cycle.num_drafted >= candidate.most:
            candidate.most *= 2
        for name in text.drafts.keys() & candidate.records.keys():
            candidate.records[name].num_read = cycle.cached + 1  # it observes all at once
        name = text.task.drafter
        if plan.kind == CHOSEN:
            began = time.perf_counter()
            for each in list(text.states):
                self._learn_of(each, s, cycle)
            plan.choice_ms += (time.perf_counter() - began) * 1e3
        elif name in text.states and name not in candidate.guesses:
            self._learn_of(name, s, cycle)
        if name == TREE and cycle.is_whole:  # a cut one teaches nothing
            places, record = cycle.path[: cycle.num_accepted], candidate.records[TREE]
            record.observe(len(cycle.draft.tokens), len(places), text.task.limit, places)
            record.last = cycle.number

    def _learn_of(self, name: str, s: TextSequence, cycle: Cycle) -> None:
        """Learn from a cycle about one drafter."""
        candidate, text = self.candidates[s], s.drafting
        record, draft = candidate.records[name], text.drafts.get(name)
        tokens = [token.id for token in cycle.tokens]
        guess = candidate.guesses.get(name) or self._pool.guess(text, name, len(tokens))
        if name == text.task.drafter:
            # What a cut has left of a draft does not say that the drafter stopped.
            asked = text.task.limit if cycle.is_whole else cycle.num_drafted
            seen = cycle.num_drafted, cycle.num_accepted, asked
            sure, path = cycle.draft.confidence, cycle.path[: cycle.num_drafted]
            record.learn_confidence([sure[i] for i in path] if sure else [], seen[1])
            if draft and draft.num_forwards:  # the drafter says
                record.learn_steps(draft.num_forwards, len(draft.tokens))
        elif draft is not None:
            seen = _came_true(longest(draft).tokens, tokens)
        else:
            seen = _came_true(guess.tokens, tokens) if guess else (0, 0, 0)
        record.observe(*seen)
        if seen[0]:
            record.last = cycle.number
        if guess and guess.evidence:
            record.with_evidence(guess.evidence).observe(*seen)

    def record_cycle(
        self, plan: Plan, drafts: list[Draft], cycles: Collection[Cycle], times: list[float] | None
    ) -> None:
        drafting_ms = 0.0
        for name, (counts, ms) in self._pool.spent.items():
            self.controller.costs.observe_draft(name, counts, plan.unread[name], ms)
            drafting_ms += ms
        if times:
            ms = (times[-1] - times[0]) * 1e3
            num_tokens = sum(cycle.num_kept for cycle in cycles)
            self.observe_pass(plan, drafts, num_tokens, ms=ms, drafting_ms=drafting_ms)

    def observe_pass(
        self, plan: Plan, drafts: list[Draft], num_tokens: int, *, ms: float, drafting_ms: float
    ) -> None:
        """A whole cycle gave so many tokens in `ms`, of which drafting took `drafting_ms`."""
        batch, rows = len(drafts), sum(len(draft.tokens) + 1 for draft in drafts)
        self.controller.costs.observe_pass(batch, rows, max(0.0, ms - drafting_ms - plan.choice_ms))
        self._owed_ms = max(0.0, self._owed_ms + plan.choice_ms / CHOICE_BUDGET - ms)
        if plan.kind in (CHOSEN, REUSED):
            prices = self.controller.costs.prices(batch, batch).drafts
            read_ms = sum(n * prices[name].read_ms for name, n in plan.unread.items())
            plan.account.see(num_tokens / batch, batch, ms, min(read_ms, drafting_ms))
        elif rows == batch:
            plan.account.see_plain(batch, ms)


def _came_true(guessed: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """How many tokens would have been drafted, how many of them came, and for how many asked."""
    drafted, came_true = min(len(guessed), len(tokens)), 0
    while came_true < drafted and guessed[came_true] == tokens[came_true]:
        came_true += 1
    return drafted, came_true, len(tokens)
