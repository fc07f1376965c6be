"""Who drafts for each request in a cycle, and how much. As much as pays, nothing if nothing does.

    plan → (the engine drafts and verifies) → learn, for each request → record_cycle

    tokens of a draft:    α₁ + α₁α₂ + … + α₁…α_K
    its time:             the drafter's steps + the pass's further rows
    choose the drafter and the K so that tokens − rate · time is largest

The rate is tokens per ms: plain decoding's, or more where drafts gain. `best_draft` is this rule,
for one drafter and one request. What it goes by is in estimates.py; docs/speed.md tells why so.
Nothing is decided for a text by what became of others: those count as a few of its own tokens.

*Who pays for a step that several share?* All of them: `Choice` counts the steps of a model that
bring most to all together. Two models would run one after the other, so requests have the same one.
*What if a drafter is thought not to pay?* That is forgotten in time, so it is tried again.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple

from drafters.plan import IDLE, DraftedText, FixedK, Plan, Task, fixed, limit_of, nothing
from drafters.pool import DrafterPool, checks
from runtime.sampling import confidence
from runtime.values import Cycle, Draft, Model, TextSequence

from .decision import Decision
from .estimates import READ_ALONG, Acceptance, Agreement, Certainty, Costs, Lengths

CHOICE_BUDGET = 0.01  # of the time, at most
_READING = 1.0  # plain cycles: no more texts are read for a model where one takes so long
# A model reads a text if that takes no longer than 16 plain cycles and half of the text's own ones.
_STAKE, _SHARE = 16, 0.5
_UNSURE = 2  # times as dear is reading if others must be read, too, and again if it comes later
_MOST_EVIDENCE = 8  # of a guess
_LATELY = 0.1  # how far a cycle moves the worth of time
_EACH, _NOW_AND_THEN = 32, 4  # tokens whose certainty is noted; later in one of so many cycles
CHOSEN, REUSED = "chosen", "reused"  # kinds of cycle, beside IDLE: drafts chosen now, or earlier


class Guess(NamedTuple):
    """What a drafter would have proposed, if it had been asked."""

    tokens: list[int]
    evidence: int = 0  # how much it rests on, up to 8; proposals of one number share a record


class Option(NamedTuple):
    """What a drafter may do for a request: no token, if none gains."""

    drafter: str = ""
    num_tokens: int = 0
    gain: float = 0.0  # tokens, less what their time is worth
    tokens: float = 0.0  # that are expected of it
    ms: float = 0.0  # that they take; shared steps apart


def best_draft(
    name: str, record: Acceptance, limit: int, rate: float, once_ms: float, token_ms: Sequence
) -> list[Option]:
    """The rule: of drafts of up to 1, 2, … `limit` tokens the one that gains the most.

    A draft of K tokens gives reach(K) more than one of K - 1, and takes token_ms[K - 1] more if it
    comes so far; `once_ms` whatever its length. The last one is the best of all.

    Example: α .8 and 1 ms a token at .5 tokens a ms -> tokens .8, 1.44, 1.95, 2.36 … for 1, 2, 3,
    4 … ms, gains .3, .44, .45, .36 …: K = 3.
    """
    best, options, tokens, ms = Option(), list[Option](), 0.0, once_ms
    for k, reach in enumerate(record.reach(limit), 1):
        tokens += reach
        ms += token_ms[k - 1]
        if (gain := tokens - rate * ms) > best.gain:
            best = Option(name, k, gain, tokens, ms)
        options.append(best)
    return options


@dataclass(slots=True, eq=False)
class Candidate:
    """One request, as the choice knows it."""

    able: dict[str, Acceptance]  # the records of the drafters that may propose now
    limit: int = 0  # drafted tokens, at most, now
    length: int = 0  # tokens so far
    remaining: float = 0.0  # tokens until it ends, as is to be expected
    records: dict[str, Acceptance] = field(default_factory=dict)  # of all its drafters
    guesses: dict[str, Guess | None] = field(default_factory=dict)  # in this cycle, by drafter
    certainty: Certainty = field(default_factory=Certainty)  # the target's, in this text


class Choice:
    """One choice for a batch: what each request does, and how long models take for all."""

    def __init__(
        self, costs: Costs, candidates: list[Candidate], batch: int, worth: float, read: bool
    ) -> None:
        """`batch` requests share the pass; those that are no candidates draft nothing.

        A plain cycle's time is `worth` so many tokens of each. With `read` models read text that
        they have missed: not much in one cycle.
        """
        self.candidates, self._costs = candidates, costs
        self.prices = costs.prices(batch, len(candidates))
        self.rate = worth * batch / self.prices.plain_ms
        self._waits = set[tuple[str, int]]()  # models, and whose texts they read in a later cycle
        read_ms = _READING * self.prices.plain_ms if read else 0.0
        names = dict.fromkeys(name for candidate in candidates for name in candidate.able)
        self._drafts = {name: self._best_drafts(name, read_ms) for name in names}
        self.options = [Option()] * len(candidates)
        self.model_ms: dict[str, float] = {}  # of each model that drafts
        for name, drafts in self._drafts.items():
            if not costs.runs_model(name):
                self._join({i: options[-1] for i, options in drafts.items()})
        models, asking = list(filter(costs.runs_model, names)), set(range(len(candidates)))
        for _ in models:  # the one that brings most; then another for requests that cannot have it
            shares = {name: self._share(name, asking) for name in models}
            name = max(models, key=lambda name: shares[name][0])
            gain, ms, options = shares[name]
            if gain <= 0:
                break
            self.model_ms[name] = ms
            self._join({i: each for i, each in options.items() if (name, i) not in self._waits})
            asking -= {i for i in asking if name in candidates[i].able}
        self.tokens = batch + sum(option.tokens for option in self.options)
        ms = sum(self.model_ms.values()) + sum(option.ms for option in self.options)
        self.speedup = self.tokens / batch / (1 + ms / self.prices.plain_ms)

    def _join(self, options: dict[int, Option]) -> None:
        """Give each request its option in `options` if that gains more than the present one."""
        for i, option in options.items():
            if option.gain > self.options[i].gain:
                self.options[i] = option

    def _best_drafts(self, name: str, left_ms: float) -> dict[int, list[Option]]:
        """The best drafts of up to 1, 2, … tokens, by request; steps of a model apart.

        A model reads texts until that takes `left_ms`; without any it reads none. Texts that have
        to wait count already: soon they share the steps, which may not pay for one text alone.
        """
        price, runs, drafts = self.prices.drafts[name], self._costs.runs_model(name), {}
        known = [each.able[name] for each in self.candidates if name in each.able]
        may_read, num_readers = left_ms > 0, sum(each.unread > READ_ALONG for each in known)
        token_ms = [row_ms + (0.0 if runs else price.step_ms) for row_ms in self.prices.rows_ms]
        for i, candidate in enumerate(self.candidates):
            record = candidate.able.get(name)
            must_read = runs and record and record.unread > READ_ALONG
            reading_ms = record.unread * price.read_ms if record else 0.0
            # Nobody knows how long a text becomes, so the stake grows with it.
            stake_ms = self.prices.plain_ms * (_STAKE + _SHARE * candidate.length)
            if not record or (must_read and (not may_read or reading_ms > stake_ms)):
                continue
            limit = min(candidate.limit, self.prices.most, self._costs.at_once.get(name, inf))
            once_ms = reading_ms / max(1.0, candidate.remaining / 2)  # it serves many cycles
            if num_readers > 1:
                once_ms *= _UNSURE
            if must_read and left_ms <= 0:
                once_ms *= _UNSURE
                self._waits.add((name, i))
            drafts[i] = best_draft(name, record, limit, self.rate, once_ms, token_ms)
            if must_read and drafts[i][-1].num_tokens:
                left_ms -= reading_ms
        return drafts

    def _share(self, name: str, asking: set[int]) -> tuple[float, float, dict[int, Option]]:
        """How many steps of a model these requests take together, so that all gain the most.

        Returns what they gain by it, in how many ms of the model, and what each may do then.
        """
        price, best = self.prices.drafts[name], (0.0, 0.0, dict[int, Option]())
        drafts = {i: d for i, d in self._drafts[name].items() if i in asking and d[-1].num_tokens}
        for k in range(max(map(len, drafts.values()), default=0)):
            ms = price.first_ms + k * price.step_ms
            options = {i: each[min(k, len(each) - 1)] for i, each in drafts.items()}
            more = [max(0.0, option.gain - self.options[i].gain) for i, option in options.items()]
            gain = sum(more) - self.rate * ms
            if gain > best[0]:
                best = gain, ms, options
        return best

    def decision(self, i: int) -> Decision:
        """A request's decision, with its reasons: without a draft, those of the nearest drafter."""
        option, records, nearest = self.options[i], self.candidates[i].able, -inf
        for name in (option.drafter,) if option.num_tokens else records:
            record, price, row_ms = records[name], self.prices.drafts[name], self.prices.rows_ms[0]
            sharers = len(self.candidates) if self._costs.runs_model(name) else 1
            alpha, c = record.reach(1)[0], price.first_ms / self.prices.plain_ms
            even = self.rate * (row_ms + price.first_ms / sharers)
            more = self.rate * (row_ms + price.step_ms / sharers)
            if alpha - even > nearest:
                nearest, fields = alpha - even, (name, option.num_tokens, alpha, c, even, more)
        return Decision(*fields, self.speedup)


class Controller:
    """What is known across requests, and the choice for a batch by it."""

    LEGEND = (
        "The controller chooses K, the most tokens to draft; K=0 is none. α is the chance that a\n"
        "token is accepted, c the time to draft it, in passes. Drafting pays if α is above "
        "break-even."
    )

    def __init__(self, *sizes: Any) -> None:
        """The arguments of Costs."""
        self.costs = Costs(*sizes)
        self.lengths = Lengths()
        # Of all requests so far, by drafter and rule.
        self._typical: dict[tuple[str, str], Acceptance] = {}
        # Tokens of each request, by class of batches, for a plain cycle's time: half of what drafts
        # gain is counted on.
        self.worth: dict[int, float] = {}

    @classmethod
    def of(cls, target: Model, drafters: dict[str, Any]) -> "Controller":
        """The controller for the core's target and its drafters by name."""
        sizes = {name: drafter.num_step_weights for name, drafter in drafters.items()}
        at_once = {name: n for name, drafter in drafters.items() if (n := drafter.block_size)}
        return cls(target.num_weights, sizes, at_once)

    def planner(self, pool: DrafterPool) -> "Planner":
        """The planner that chooses by this controller among the drafters of a pool."""
        return Planner(self, pool)

    def record(
        self, name: str, rule: str, certainty: Certainty | None = None, is_merged: bool = False
    ) -> Acceptance:
        """A fresh record for a new request, whose drafts are judged by `rule`.

        It begins with what other requests brought. `certainty` is that of the request's text;
        `is_merged` says that several drafters draft together under this name.
        """
        kind: Any = Acceptance
        if self.costs.runs_model(name) and not is_merged:
            kind = partial(Agreement, certainty or Certainty())
        return kind(self._typical.setdefault((name, rule), kind()))

    def join(self) -> None:
        """A new request has come: what drafts gained in another text is not to be reached in it."""
        self.worth.pop(1, None)

    def decide(self, candidates: list[Candidate], batch: int, read: bool) -> list[Decision]:
        """Decide which drafter drafts for each candidate, and how much: see Choice."""
        if not candidates:
            return []
        worth = self.worth.get(batch.bit_length(), 1.0)
        choice = Choice(self.costs, candidates, batch, worth, read)
        worth += _LATELY * (max(1.0, (1 + choice.speedup) / 2) - worth)
        self.worth[batch.bit_length()] = worth
        return [choice.decision(i) for i in range(len(candidates))]


class Planner(FixedK):
    """Lets the controller choose, for all requests of a batch together."""

    def __init__(self, controller: Controller, pool: DrafterPool) -> None:
        self.controller, self._pool = controller, pool
        self.decisions: dict[str, Decision] = {}  # the last one on each drafter
        self.candidates: dict[TextSequence, Candidate] = {}  # of all open sequences
        self._chosen: dict[TextSequence, Task] = {}  # what was chosen last
        self._owed_ms = 0.0  # for choosing
        for name in pool.merging:  # drafters that draft together take the steps of the first
            shares = controller.costs.shares
            shares[name] = shares.get(pool.choices[name][0], 0.0)

    def open(self, s: TextSequence) -> None:
        """Give each drafter of a new sequence a record, and all of them together."""
        text, sampling = s.drafting, s.request.sampling
        certainty = Certainty()
        record = partial(self.controller.record, rule=sampling.rule, certainty=certainty)
        records = {name: record(name) for name in text.states}
        if len(self._pool.members(text, text.merge)) > 1:
            records[text.merge] = record(text.merge, is_merged=True)
        self.candidates[s] = Candidate({}, records=records, certainty=certainty)
        self.controller.join()

    def close(self, s: TextSequence) -> None:
        self.controller.lengths.observe(s)
        self.candidates.pop(s, None)
        self._chosen.pop(s, None)

    def plan(self, batch: list[TextSequence]) -> Plan:
        """Choose a drafter for each sequence, or reuse what was chosen before."""
        if not batch:  # all wait
            return Plan([])
        plan = Plan([])
        if self._owed_ms > 0 and self._chosen:  # who joins waits for the next choice
            plan.kind, plan.tasks = REUSED, list(map(self._reused, batch))
        else:
            plan.kind = CHOSEN if self._choose(plan, batch) else IDLE
            plan.tasks = [self._chosen.get(s) or nothing(s) for s in batch]
        for s, task in zip(batch, plan.tasks, strict=True):
            if task.limit and (record := self.candidates[s].records.get(task.drafter)):
                plan.unread[task.drafter] += len(s.tokens) - record.num_read
        return plan

    def _reused(self, s: TextSequence) -> Task:
        """The task chosen before, where it is possible."""
        if s.request.fixed_k:
            return fixed(s)
        task = self._chosen.get(s, Task())
        can = task.limit and self._pool.members(s.drafting, task.drafter)
        return task._replace(limit=min(task.limit, limit_of(s))) if can else nothing(s)

    def _choose(self, plan: Plan, batch: list[TextSequence]) -> list[Decision]:
        """Choose for a batch. Returns the decisions on requests that have a choice."""
        began, asking, self._chosen = time.perf_counter(), list[TextSequence](), {}
        for s in [s for s in batch if s.num_steps]:  # the others read their prompts
            candidate, candidate.guesses = self.candidates[s], {}
            self._chosen[s] = fixed(s) if s.request.fixed_k else nothing(s)
            candidate.limit, candidate.length = limit_of(s), len(s.output)
            candidate.remaining = self.controller.lengths.left(s)
            if candidate.limit and not s.request.fixed_k:
                candidate.able = self._able(s, candidate)
                asking += [s] if candidate.able else []
        # Reading pays where many cycles are like this one: not while a batch fills up.
        may_read = all(other.num_steps for other in self.candidates)
        candidates = [self.candidates[s] for s in asking]
        decisions = self.controller.decide(candidates, len(batch), may_read)
        for s, decision in zip(asking, decisions, strict=True):
            name, count, alpha = decision[:3]
            self.decisions[name], least = decision, 0.0
            members = self._pool.members(s.drafting, name)
            is_copy = any(self._pool.drafters[member].is_copy for member in members)
            if count and s.request.sampling.is_coupled and not is_copy:
                least = min(1.0, decision.least_chance / alpha)  # for the rule of rejection: Chain
            self._chosen[s] = Task(name, count, least, decision)
        plan.choice_ms = (time.perf_counter() - began) * 1e3
        return decisions

    def _able(self, s: TextSequence, candidate: Candidate) -> dict[str, Acceptance]:
        """The records of the drafters to choose from: those that may have a proposal now."""
        text, able = s.drafting, dict[str, Acceptance]()
        for record in candidate.records.values():
            record.unread = len(s.tokens) - record.num_read
        for name in list(text.states):  # guessing may cost it a drafter
            guess = candidate.guesses[name] = self.guess(text, name, candidate.limit)
            if guess is None or guess.tokens:
                able[name] = candidate.records[name].with_evidence(guess.evidence if guess else 0)
        able = {n: each for n, each in (able or candidate.records).items() if n in text.states}
        if len(self._pool.members(text, text.merge)) > 1:
            able[text.merge] = candidate.records[text.merge]  # beside each drafter for itself
        return able

    def guess(self, text: DraftedText, name: str, max_tokens: int) -> Guess | None:
        """What a drafter would propose if it was asked; None from those that cannot tell."""
        pool, drafter = self._pool, self._pool.drafters[name]
        if name not in text.states or not drafter.can_guess:
            return None
        check = checks and partial(checks.checked_ids, most=max_tokens, vocab_size=pool.vocab_size)
        with pool.containing(text, name, "guess"):
            if not pool.prepare(text, name, max_tokens):
                return Guess([])
            state = text.states[name]
            then = check and (lambda tokens: None if tokens is None else check(tokens))
            if (tokens := drafter.call("guess", state, max_tokens, then=then)) is None:
                return None
            evidence = drafter.call("evidence", state, then=int) if tokens else 0
            if drafter.accepts_forced_prefix and text.forced_tokens(max_tokens):
                evidence = _MOST_EVIDENCE
            return Guess(tokens, max(0, min(evidence, _MOST_EVIDENCE)))
        return Guess([])

    def learn(self, plan: Plan, s: TextSequence, cycle: Cycle) -> None:
        """Learn what a cycle says of each drafter that the request may choose from.

        Of those that did not draft, or not alone: of what they would have drafted, how much came
        true. A cycle for which nothing was chosen teaches of the model that drafted, if one did.
        """
        records, text = self.candidates[s].records, s.drafting
        for name in text.drafts.keys() & records.keys():
            records[name].num_read = cycle.cached + 1  # it observes all at once
        if text.merge in records:
            known = [records[name].num_read for name in self._pool.members(text, text.merge)]
            records[text.merge].num_read = min(known, default=0)
        certainty, certain = self.candidates[s].certainty, list[float]()
        models = [name for name, record in records.items() if isinstance(record, Agreement)]
        if models and (certainty.count < _EACH or not cycle.number % _NOW_AND_THEN):
            certainty.observe(certain := self.certain(cycle))
        began = time.perf_counter()
        for name in records if plan.kind == CHOSEN else models:
            if plan.kind == CHOSEN or name == text.task.drafter:
                self._learn_of(name, s, cycle, certain)
        plan.choice_ms += (time.perf_counter() - began) * 1e3

    def certain(self, cycle: Cycle) -> list[float]:
        """The probability of each of the target's tokens by its raw logits, before transforms."""
        rows = [0, *(i + 1 for i in cycle.path)]
        return [confidence(cycle.logits, t.id, i) for t, i in zip(cycle.tokens, rows, strict=False)]

    def _learn_of(self, name: str, s: TextSequence, cycle: Cycle, certain: list[float]) -> None:
        """Learn from a cycle about one drafter."""
        candidate, text = self.candidates[s], s.drafting
        record, draft = candidate.records[name], text.drafts.get(name)
        guess, tokens = candidate.guesses.get(name), [token.id for token in cycle.tokens]
        places = cycle.path[: cycle.num_accepted] if name == text.merge else None
        if name == text.task.drafter:
            # What a cut has left of a draft does not say that the drafter stopped.
            asked = text.task.limit if cycle.is_whole else cycle.num_drafted
            seen = cycle.num_drafted, cycle.num_accepted, asked
        elif draft is not None:
            seen = _came_true(draft.longest().tokens, tokens)
        else:
            seen = _came_true(guess.tokens, tokens) if guess else (0, 0, 0)
        record.observe(*seen, places, certain)
        if guess and guess.evidence:
            record.with_evidence(guess.evidence).observe(*seen)

    def record_cycle(
        self, plan: Plan, drafts: list[Draft], cycles: Collection[Cycle], times: list[float] | None
    ) -> None:
        """Learn what the pass and the drafts of a cycle cost."""
        if not times:
            return
        spent, costs = self._pool.spent.items(), self.controller.costs
        calls = [(name, counts, plan.unread[name], ms) for name, (counts, ms) in spent]
        ms, drafting_ms = (times[-1] - times[0]) * 1e3, sum(ms for *_, ms in calls)
        pass_ms = max(1e-6, ms - drafting_ms - plan.choice_ms)
        rows = sum(len(draft.tokens) + 1 for draft in drafts)
        costs.observe_pass(len(drafts), rows, pass_ms, calls)
        self._owed_ms = max(0.0, self._owed_ms + plan.choice_ms / CHOICE_BUDGET - ms)


def _came_true(guessed: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """How many tokens would have been drafted, how many of them came, and for how many asked."""
    came = [guess == token for guess, token in zip(guessed, tokens, strict=False)]
    return len(came), [*came, False].index(False), len(tokens)
