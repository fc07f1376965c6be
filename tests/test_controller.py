"""`auto` never loses a token, whatever it chooses, and is meant never to lose time either.

It measures what drafts cost and how often they are right, drafts as much as pays by that, tries a
drafter that does not pay now and then, and rests where drafts lose by the clock. Times are made up
here, so no busy machine decides what is chosen.
"""

import random
import re
import time
from collections import Counter
from dataclasses import replace
from itertools import accumulate, product, takewhile
from math import inf
from operator import mul
from types import SimpleNamespace
from unittest.mock import Mock

import conftest
import numpy as np
import pytest
from conftest import ScriptedDrafter, before, finish, run

from drafters import base
from drafters.auto import Controller, Planner, estimates
from drafters.auto.estimates import Acceptance, Agreement, Certainty, Costs, Lengths
from drafters.auto.planner import CHOICE_BUDGET, CHOSEN, REUSED, Candidate, Guess
from drafters.plan import DraftedText, FixedK, Task
from drafters.pool import DrafterPool
from runtime.statistics import Statistics
from runtime.values import Cycle, Draft, Request, Verdict
from server import assembly, core, warming
from server.curve import Curve
from server.options import MOST_K, Options
from server.warming import uncounted, warm_up

K = 8
WEIGHTS = 100, {"model": 20, "other": 20, "free": 0}


def settled(alpha):
    """A long record of a drafter whose tokens are accepted in this share of cases."""
    record = Acceptance()
    record.cycles = 1000
    record.chances = [alpha**i for i in range(1, len(record.chances) + 1)]
    return record


def measure(costs, batch=1, pass_ms=10.0, call_ms=0.0, **step_ms):
    """As if each of these had been measured often enough."""
    for tokens in (batch, 50 * batch) * 4:
        costs.observe_pass(batch, tokens, pass_ms + 0.2 * tokens)
    for num_drafted in (1, K) * (12 if step_ms else 1):
        calls = [(n, [num_drafted], 0, call_ms + num_drafted * ms) for n, ms in step_ms.items()]
        costs.observe_pass(batch, batch, pass_ms + 0.2 * batch, calls)


def measured(c=0.2, batch=1, **given):
    """With measured costs: a pass of 10 ms, a draft step of c passes."""
    result = Controller(*WEIGHTS, *given.values())
    measure(result.costs, batch, model=c * 10.0)
    return result


def decide(controller, *asks, limit=K):
    """The decisions on requests with such records by drafter, in a new batch."""
    controller.worth.clear()  # time is worth what plain decoding makes of it
    return controller.decide([Candidate(able, limit, 1000) for able in asks], len(asks), True)


def script_of(token):
    """It drafts this token, however many are asked for."""
    return lambda tokens, limit: [token] * limit


@pytest.fixture
def controller():
    """A controller that has measured nothing."""
    return Controller(*WEIGHTS)


@pytest.fixture
def costs(controller):
    """What it will have measured."""
    return controller.costs


def engine_of(demo_engine, shares, **scripts):
    """The embedded target and drafters that cost such shares of its 100 weights, by no clock.

    Each follows its script; who has none is the embedded one of that name.
    """
    loaded = scripted(**scripts)
    loaded |= {n: demo_engine.pool.drafters[n] for n in shares if n not in scripts}
    controller = Controller(100, shares)
    controller.costs.observe_pass = lambda *_: None
    engine = core.Engine(demo_engine.target, loaded, "auto", controller=controller)
    engine.planner.record_cycle = lambda *_: None  # so that it chooses in every cycle
    return engine


@pytest.fixture
def steady(demo_engine):
    """One whose only drafter, `model`, always drafts as much as it is asked for."""
    return engine_of(demo_engine, {"model": 1}, model=script_of(1))


def scripted(**scripts):
    """Drafters by name."""
    return {name: ScriptedDrafter(script) for name, script in scripts.items()}


@pytest.mark.parametrize(("cycles", "least", "most"), [
    ([(1, 1, 4), (4, 4, 4)] * 200, 0.44, 0.56),  # it stopped behind one token, which was right
    ([(1, 1, 0)] * 200 + [(1, 0, 0)] * 20, 0, 0.5),  # a mean of all would be .8
    ([(0, 0, 0)] * 9, estimates.PRIOR**2, estimates.PRIOR**2),  # nobody asked
    ([(0, 0, 4)] * 30, 0, 0.05),  # it had nothing to propose
    ([(17, 17, 17)], estimates.PRIOR**2, 1),  # as many as a cycle of 16 drafted tokens may give
], ids=["stopped", "latest", "not asked", "nothing", "bonus"])  # fmt: skip
def test_a_record_knows_what_was_asked_for_and_the_latest_cycles_most(cycles, least, most):
    record = Acceptance()
    for cycle in cycles:
        record.observe(*cycle)
    assert least <= record.reach(2)[1] <= most


def test_one_rejected_token_proves_nothing_and_least_where_the_target_doubts():
    alphas = []
    for chance in (0.95, 0.3):
        certainty = Certainty()
        certainty.observe([0.95] * 48)
        record = Agreement(certainty)
        record.observe(3, 0, 3, certain=[chance])
        alphas.append(record.reach(1)[0])
    assert 0.88 < alphas[0] < alphas[1] < 0.97
    for _ in range(40):
        record.observe(3, 0, 3, certain=[0.95])
    assert record.reach(1)[0] < 0.4  # many do


def test_certainty_is_of_raw_logits_and_of_the_tokens_that_the_text_got(steady, prompts):
    """Whatever temperature chose them, and in drafts as in plain cycles."""
    noted, sampling = [], core.Sampling(temperature=0.7, top_k=20)
    before(steady.planner, "learn", lambda plan, s, cycle: noted.append(cycle))
    run(steady, prompts["code_class"], max_tokens=12, drafter="model", sampling=sampling)
    for cycle in noted:
        rows = [0, *(i + 1 for i in cycle.path)][: len(cycle.tokens)]
        likely = cycle.logits[rows].softmax(-1)
        chances = likely[range(len(rows)), [token.id for token in cycle.tokens]].tolist()
        assert steady.planner.certain(cycle) == pytest.approx(chances, rel=1e-4)
    assert len(noted) > 3


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_step_must_bring_is_what_it_costs(batch):
    """In tokens: plain decoding's rate times a step and a row; the first pays for the call, too.

    Two requests give tokens at nearly twice the rate, and share the step.
    """
    controller = Controller(*WEIGHTS)
    drafters = {"model": {"call_ms": 3.0, "step_ms": 1.0, "read_ms": 0.1}}
    controller.costs.start_from(Curve({1: 10.2, 2: 10.4, 50: 20.0}, drafters))
    measure(controller.costs, batch, call_ms=3.0, model=1.0)
    decision = decide(controller, *[{"model": settled(0.9)}] * batch)[0]
    rate = batch / controller.costs.a_pass(batch, batch)
    assert decision.break_even == pytest.approx(rate * ((3 + 1) / batch + 0.2), rel=0.1)
    assert decision.least_chance == pytest.approx(rate * (1 / batch + 0.2), rel=0.1)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "copy"])
def test_a_model_s_draft_ends_with_a_token_in_doubt(demo_engine, prompts, rule, monkeypatch):
    """Where it is so unlikely that a further one is not worth its step. But where rejection judges,
    the length of a draft would tell later cycles of tokens that were never judged. Whoever drafts
    what a copy of the target is sure of is right whether it is sure or not."""
    verification = "rejection" if rule == "rejection" else "coupled"
    sampling = core.Sampling(temperature=0.8, verification=verification)
    request = Request(prompts["hard_docs"], 40, "mtp", 5, sampling=sampling)
    engine = engine_of(demo_engine, {"mtp": 1})
    decide = engine.controller.decide
    engine.controller.decide = lambda *asks: [d._replace(least_chance=0.25) for d in decide(*asks)]
    monkeypatch.setattr(engine.pool.drafters["mtp"], "is_copy", rule == "copy")
    monkeypatch.setattr("runtime.kernels.can_chain", lambda *_: False)  # for C see test_kernels
    drafts, least = [], []
    for s, cycle in engine.generate(request):
        if cycle.draft.tokens:
            drafts.append(cycle.draft)
            least.append(s.drafting.task.least_confidence)
    if rule == "coupled":
        assert len({*least}) > 3 and min(least) >= 0.25
        for draft, limit in zip(drafts, least, strict=True):
            *sure, likely = accumulate(draft.confidence, mul)
            assert min(sure, default=1) >= limit and (len(draft.tokens) == 5 or likely < limit)
        assert len({len(draft.tokens) for draft in drafts}) > 1
    else:
        assert drafts and not any(least) and not any(draft.confidence for draft in drafts)
    fixed = engine.generate(replace(request, fixed_k=True))
    assert [len(cycle.proposals) for _, cycle in fixed if cycle.number][:4] == [5] * 4


@pytest.mark.parametrize("alpha", [0.06, 0.5, 0.95])
@pytest.mark.parametrize(("c", "at_once"), [(0.0, 0), (0.3, 0), (1.5, 0), (0.1, 5), (1.0, 5)])
def test_the_choice_is_the_best_of_all_k_by_the_formula(alpha, c, at_once):
    """E(K) − T(K) is largest: (1 − α^(K+1)) / (1 − α) less K · c + t_verify(K + 1) plain passes.

    E(K) / T(K) is at most 4 % below the largest here. Who drafts `at_once` is paid once: c is then
    for the whole draft, of so many tokens at most.
    """
    controller = measured(c, at_once={"model": at_once} if at_once else {})
    a_pass, every = controller.costs.a_pass, range((at_once or K) + 1)
    tokens = [(1 - alpha ** (k + 1)) / (1 - alpha) for k in every]
    steps = [min(k, 1) if at_once else k for k in every]
    times = [(steps[k] * c * 10 + a_pass(1, k + 1)) / a_pass(1, 1) for k in every]
    speedups = [tokens[k] / times[k] for k in every]
    (decision,) = decide(controller, {"model": settled(alpha)})
    chosen = decision.num_tokens
    assert tokens[chosen] - times[chosen] > max(tokens[k] - times[k] for k in every) - 0.01
    assert speedups[chosen] >= 0.96 * max(speedups)
    assert decision.expected_speedup == pytest.approx(speedups[chosen], rel=0.01)


@pytest.mark.parametrize("name", ["model", "free"])
def test_what_a_drafter_did_is_forgotten_in_time_so_it_is_tried_again(name):
    """One that is never right costs hardly anything; one that has become right comes back."""
    controller = measured()
    typical = controller.record(name, "greedy")
    record, spent = controller.record(name, "greedy"), []
    for _ in range(200):
        record.observe(K, 0, K, certain=[0.9])
    for _ in range(4000):
        (decision,) = decide(controller, {name: record})
        spent.append(decision.num_tokens * decision.break_even)
        record.observe(decision.num_tokens, 0, certain=[0.9])
    assert 0 < sum(spent) < 0.01 * len(spent)
    while not decide(controller, {name: record})[0].num_tokens:
        record.observe(0, 0)
    for _ in range(40):
        (decision,) = decide(controller, {name: record})
        record.observe(decision.num_tokens, decision.num_tokens, certain=[0.9] * K)
    assert decision.num_tokens >= 5
    assert controller.record(name, "greedy").reach(1)[0] < typical.reach(1)[0]  # others know of it


def test_batches_of_other_sizes_have_costs_of_their_own():
    controller, records = measured(c=0.2), {"model": settled(0.3)}
    measure(controller.costs, 8, pass_ms=100.0)
    one, eight = (controller.costs.prices(batch, 1) for batch in (1, 9))
    assert one.plain_ms == pytest.approx(10.2, rel=0.1)
    assert eight.plain_ms == pytest.approx(100 + 9 * 0.2, rel=0.1)
    assert controller.costs.a_pass(1, 8) < 20
    first, *_ = decide(controller, *[records] * 9)
    assert decide(controller, records)[0].num_tokens > first.num_tokens == 0


def test_it_says_why():
    ((good,), (poor,)) = (decide(measured(), {"model": settled(each)}) for each in (0.95, 0.05))
    assert re.fullmatch(r"model, K=\d: α .9\d, c .20, expected \d\.\d\d×", str(good))
    assert str(poor) == "K=0 is faster here: model has α .05 < break-even .22 (c .20)"
    dear = "K=0 is faster now: starting model would not pay yet (α .85)"
    assert str(poor._replace(alpha=0.85)) == dear


USUAL, SLOW = [(1, 1.0, 0, 10.4)] * 8, [(1, 50.0, 0, 520.0), (0, 0.0, 0, 10.4)] * 40


@pytest.mark.parametrize(("name", "cycles", "step_ms"), [
    ("model", [(1, 500.0, 0, 10.4)], 1.5), ("free", [(1, 500.0, 0, 10.4)], 0.015),
    ("model", [(1, 500.0, 0, 10.4)] * 12, 500), ("free", [(2, 500.0, 0, 10.4)] * 12, 250),
    ("model", [(2, 8.0, 100, 10.4)] * 12, 1),
    ("model", [*USUAL, *SLOW, (1, 100.0, 0, 10.4)], 1),
    ("model", USUAL + [(n, 100.0 * n, 0, 10.4) for n in (5, 1, K)] * 14, 100),
], ids=["once", "once, free", "often", "often, free", "reading", "accident", "longer"])  # fmt: skip
def test_what_a_step_takes_is_believed_if_it_lasts(costs, name, cycles, step_ms):
    """The first call may have to set things up. Who never drafts again is never measured again.

    Text to read makes no step dear. What a cycle that took far too long says of its draft is not
    believed.
    """
    drafters = {"model": {"call_ms": 0.0, "step_ms": 1.0, "read_ms": 0.06}}
    costs.start_from(Curve({1: 10.2, 2: 10.4, 50: 20.0}, drafters))
    for count, ms, unread, pass_ms in cycles:
        costs.observe_pass(1, 2, pass_ms, [(name, [count], unread, ms)] if count else [])
    assert costs.prices(1, 1).drafts[name].first_ms == pytest.approx(step_ms, rel=0.05)


@pytest.mark.parametrize(("passes", "known"), [
    ([(1, 20.0)] * 31, {1: 10, 8: 24}),
    ([(1, 20.0)] * 39, {1: 20, 8: 40}),  # nobody measured eight rows again: they changed with it
    ([(1, 20.0)] * 39 + [(1, 10.0)] * 8, {1: 10, 8: 20}),
    ([(1, 6.0)] * 3 + [(1, 10.0)], {1: 10, 8: 24}),
    ([(2, 17.6)] * 4 + [(2, 11.0)] * 12 + [(1, 10.0)] * 2, {1: 10, 2: 11, 8: 24}),
    ([(2, 17.6), (1, 10.0)] * 4 + [(2, 11.0), (1, 10.0)] * 12, {1: 10, 2: 11, 8: 24}),
    ([(3, 0.0)] * 9, {1: 10, 8: 24}),  # a clock that stands still
], ids=["slow", "slower", "fast again", "quick", "slow at first", "in turns", "0"])  # fmt: skip
def test_a_few_passes_are_an_accident_and_many_another_machine(costs, passes, known):
    """Something else had the cores. Of a kind that was slow at first that alone is learned anew."""
    costs.start_from(Curve({1: 10.0, 2: 11.0, 8: 20.0}))
    for rows, ms in [(1, 10.0), (8, 24.0)] * 8 + passes:  # eight not quite as the curve says
        costs.observe_pass(1, rows, ms)
    assert {rows: costs.a_pass(1, rows) for rows in known} == pytest.approx(known)


def test_it_starts_from_the_curve_and_corrects_it(costs):
    """Between points it goes straight on, and beyond the last one as it went before."""
    costs.start_from(Curve({1: 10.0, 4: 13.0, 8: 37.0}))
    assert [costs.a_pass(1, rows) for rows in (1, 2, 6, 9)] == [10, 11, 25, 43]
    assert costs.prices(1, 1).rows_ms[:5] == pytest.approx([1, 1, 1, 6, 6])
    assert costs.prices(2, 2).rows_ms[:2] == pytest.approx([1, 6])  # two that draft alike
    # Kernels work in blocks: row 33 costs 15 ms more than 32, and 48 rows not 15 times that.
    blocks = Costs(*WEIGHTS)
    blocks.start_from(Curve({1: 10.0, 16: 20.0, 32: 40.0, 33: 55.0}))
    assert blocks.a_pass(1, 50) == pytest.approx(55.0 + 17 * 35 / 17)
    for _ in range(8):
        costs.observe_pass(1, 1, 20.0)
        costs.observe_pass(1, 4, 52.0)
    assert [costs.a_pass(1, rows) for rows in (1, 4, 8)] == [20, 52, 148]


def test_drafts_grow_as_passes_confirm_what_the_curve_says(costs):
    """It may say that rows cost nothing."""
    costs.start_from(Curve({1: 10.0, 64: 10.1}))
    for rows in (1, 3, 5):
        for _ in range(2):
            costs.observe_pass(1, rows, 10.0)
        assert costs.prices(1, 1).most == 2 * rows


# ------------------------------------------------------------------------- one choice for all


@pytest.mark.parametrize("seed", range(5))
def test_one_choice_for_all_is_nearly_the_best_of_all_choices(controller, seed):
    """Three requests, two models and maybe a free drafter, up to three tokens: 10³ choices.

    In tokens, less those that plain decoding gives in the time. Two models would run one after the
    other, so none of the 10³ has two.
    """
    chance = random.Random(seed)
    models = ("model", "other")
    names = (*models, "free")[: 2 + seed % 2]
    measure(controller.costs, 3, **{name: chance.uniform(0.2, 4.0) for name in models})
    records = [
        {name: settled(chance.random()) for name in names if chance.random() < 0.8}
        or {"model": settled(0.5)}
        for _ in range(3)
    ]
    prices = controller.costs.prices(3, 3)

    def gain(choices):
        tokens, ms = 0, 0.0
        for record, (name, k) in zip(records, choices, strict=True):
            tokens += sum(record[name].reach(k)) if k else 0
            ms += prices.rows_ms[0] * k + (prices.drafts[name].step_ms * k if name == "free" else 0)
        for model in models:
            longest = max(k if name == model else 0 for name, k in choices)
            price = prices.drafts[model]
            ms += price.first_ms * (longest > 0) + price.step_ms * max(0, longest - 1)
        return tokens - 3 / prices.plain_ms * ms

    every = [[("", 0), *((n, k) for n in record for k in (1, 2, 3))] for record in records]
    found = [decision[:2] for decision in decide(controller, *records, limit=3)]
    for choices in product(*every):
        if len({name for name, count in choices if count and name in models}) < 2:
            assert gain(found) >= gain(choices) - 0.03


def test_requests_that_may_choose_share_one_model_in_a_cycle(controller):
    """Each would do better with another one; who can have one alone gets it."""
    measure(controller.costs, 2, model=1.0, other=1.0)
    good, poor = settled(0.9), settled(0.2)
    both = decide(controller, {"model": good, "other": poor}, {"model": poor, "other": good})
    assert len({d.drafter for d in both if d.num_tokens}) == 1
    only = decide(controller, {"model": good}, {"other": good})
    assert [d.drafter for d in only] == ["model", "other"]


# ------------------------------------------------------------------------------ in the engine


def test_who_has_nothing_to_propose_is_not_chosen(demo_engine):
    """n-gram looked better by its record, but finds no match: the model drafts at once."""
    engine = engine_of(demo_engine, {"ngram": 0, "steady": 20}, steady=script_of(5))
    for prompt, expected in (([1, 2, 3, 4], "steady"), ([1, 2, 1, 2, 1, 2], "ngram")):
        s = engine.open(Request(prompt, 8, "auto"))
        engine.step([s])
        s.drafting.states["ngram"] = engine.pool.drafters["ngram"].open(
            prompt, conftest.GREEDY, s.noise
        )
        s.drafting.unseen.clear()
        # And text to read is forgotten.
        engine.planner.candidates[s].records = {"ngram": Acceptance(), "steady": Acceptance()}
        engine.step([s])
        assert s.drafting.task.decision.drafter == expected
        engine.close(s)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_costs_nothing_is_judged_by_what_came(demo_engine, prompts, temperature):
    """Each cycle's own tokens against the guess; a silent model always drafts."""
    engine = engine_of(demo_engine, {"silent": 0, "ngram": 0}, silent=lambda tokens, n: [])
    decide, ngram = engine.controller.decide, demo_engine.pool.drafters["ngram"]
    engine.controller.decide = lambda asks, *terms: decide(
        [Candidate({"silent": ask.records["silent"]}, ask.limit, 1) for ask in asks], *terms
    )
    engine.planner.close = lambda s: None  # what it learned stays
    prompt, sampling = prompts["repetitive_sentence"], core.Sampling(temperature=temperature)
    sequence, _ = run(engine, prompt, max_tokens=30, drafter="auto", sampling=sampling, seed=1)
    # Neither at the prefill nor for the last token was anybody to be asked.
    expected, tokens = Acceptance(Acceptance()), [*prompt, sequence.output[0]]
    for token in sequence.output[1:-1]:
        guess = ngram.open(tokens, sampling, None).continuation(1)
        expected.observe(len(guess), int(guess == [token]), 1)
        tokens.append(token)
    seen, silent = (engine.planner.candidates[sequence].records[n] for n in ("ngram", "silent"))
    assert seen.chances == expected.chances and seen.cycles == expected.cycles > 20
    assert (seen.num_read, silent.num_read) == (0, len(sequence.tokens) - 1)
    assert silent.cycles == seen.cycles and silent.reach(1)[0] < 0.15


# ------------------------------------------------------------ texts on machines that are made up

MACHINES = {  # what a pass over so many rows takes, in ms
    # Qwen2.5-Coder 1.5B in Q4_K_M on two cores; weights of float32, which memory is slow to bring.
    "pair": {1: 17.9, 2: 19.7, 4: 25.9, 6: 30.3, 8: 34.8, 16: 64.2, 64: 200.0, 128: 380.0},
    "memory": {1: 20.0, 2: 20.4, 4: 21.0, 8: 22.0, 16: 25.0, 64: 48.0},
}
MODEL = {"call_ms": 0.0, "step_ms": 6.0, "read_ms": 0.3}  # of the draft model, for one request
KINDS = {  # tokens of prompt and text, how certain the target is, how often a copy begins
    "code": (115, 96, 0.93, 0.06), "chat": (60, 96, 0.65, 0.01), "edit": (190, 96, 0.95, 0.15),
    "extraction": (600, 16, 0.88, 0.05), "poem": (60, 96, 0.4, 0.01),
    "summary": (2000, 96, 0.88, 0.06), "answer": (2000, 30, 0.88, 0.06),
}  # fmt: skip
WRONG = -1  # a token that no text has
PLAIN = "model", 0  # a drafter, and the tokens that it always drafts


class MadeUp(DraftedText):
    """A text as the planner sees the core's sequences. Its i-th token is i."""

    num_steps, num_read, finish_reason = 0, 0, None

    def __init__(self, kind, seed, fixed, length=None, is_right=None):
        """The model is right where the target is certain, or as `is_right` says."""
        num_read, most, mean, copies = KINDS[kind]
        (first, k), self.kind, self.length = fixed or ("model", MOST_K), kind, length or most
        super().__init__(Request([WRONG] * num_read, 96, "auto", k), core.Noise(0))
        self.states = dict.fromkeys([first] if fixed else ["model", "ngram"])
        self.drafting, self.tokens, self.output, self.remaining = self, [WRONG] * num_read, [], 96
        chance, self.copied = random.Random(seed), []  # of a copy that begins here: its length
        mean = min(0.97, mean + chance.gauss(0, 0.06))
        self.certain = [chance.betavariate(mean, 1 - mean) for _ in range(120)]
        rights = [chance.random() < each for each in self.certain]
        self.is_right = rights if is_right is None else [is_right] * len(rights)
        while len(self.copied) < 120:
            count = 1 + int(chance.expovariate(1 / 8)) if chance.random() < copies else 0
            self.copied += range(count, 0, -1) or [0]

    def guess(self, limit):
        """What n-gram proposes: a copy and two tokens too many, or a match by chance."""
        at, count = len(self.output), self.copied[len(self.output)]
        tokens = [*range(at, at + count), WRONG, WRONG] if count or at % 3 == 0 else []
        return Guess(tokens[:limit], 3 if count else 1)

    def propose(self, task):
        """Draft as the task says. The model is wrong behind a wrong token."""
        at, self.task, is_model = len(self.output), task, task.drafter == "model" and task.limit
        tokens = [*takewhile(self.is_right.__getitem__, range(at, at + task.limit))]
        tokens += [WRONG] * (task.limit - len(tokens))
        draft = Draft(tokens if is_model else self.guess(task.limit).tokens)
        self.drafts = {task.drafter: draft} if task.limit else {}
        self.unread = len(self.tokens) - self.num_read if is_model else 0
        self.num_read += self.unread
        return draft

    def append(self, draft):
        """Judge a draft, and append what stays. Returns the cycle."""
        at, number = len(self.output), self.num_steps
        judged, path = core.verify(draft, lambda i: at + i + 1)
        kept = range(at, min(at + len(path) + 1, self.length))
        self.output += kept
        self.tokens += kept
        self.remaining -= len(kept)
        self.finish_reason = "stop" if len(self.output) == self.length else None
        self.num_steps, certain = number + 1, [self.certain[i] for i in kept]
        path, cached = range(len(draft.tokens)), len(self.tokens) - 1
        return Cycle(number, draft, path, judged, len(kept), 0, cached, [], certain, certain)


def served(kinds, clients, fixed=None, machine="pair", step_ms=MODEL["step_ms"], **text):
    """The ms that texts of these kinds take, by kind: by `auto`, or with fixed drafts.

    A step of the model takes `step_ms`, and the controller is told what MODEL says.
    """
    each = dict.fromkeys(("model", "ngram"), Mock(is_copy=False))
    pool = Mock(merging=(), members=lambda text, name: [name] if name else [], drafters=each)
    controller, pass_ms = Controller(100, {"model": 33, "ngram": 0}), MACHINES[machine]
    controller.costs.start_from(Curve(pass_ms, {"model": MODEL}))
    planner = FixedK() if fixed else Planner(controller, pool)
    planner.certain = lambda cycle: cycle.logits
    planner.guess = lambda text, name, limit: text.guess(limit) if name == "ngram" else None
    chance, took, running, waiting = random.Random(0), Counter(), [], [*enumerate(kinds)]
    while waiting or running:
        while waiting and len(running) < clients:
            number, kind = waiting.pop(0)
            running.append(MadeUp(kind, number, fixed, **text))
            planner.open(running[-1])
        plan, has_prefill = planner.plan(running), not all(s.num_steps for s in running)
        drafts = [s.propose(task) for s, task in zip(running, plan.tasks, strict=True)]
        steps = [len(s.drafts["model"].tokens) for s in running if "model" in s.drafts]
        sharers = [sum(n > i for n in steps) for i in range(max(steps, default=0))]
        ms = step_ms * sum(0.91 + 0.09 * n for n in sharers)  # hardly more for several
        ms += MODEL["read_ms"] * sum(s.unread for s in running)
        pool.spent = {"model": (steps, ms)} if steps else {}
        rows = sum(len(draft.tokens) + 1 for draft in drafts)
        noise = chance.choice([0.98, 1.01, 1.04] * 33 + [2.5])  # at times something else runs
        choice_ms = 0.05 * len(running) * (plan.kind == CHOSEN)
        ms += np.interp(rows, [*pass_ms], [*pass_ms.values()]) * noise + choice_ms + 0.3
        cycles = [s.append(draft) for s, draft in zip(running, drafts, strict=True)]
        for s, cycle in zip(running, cycles, strict=True):
            planner.learn(plan, s, cycle)
            took[s.kind] += ms / len(running)
        plan.choice_ms = choice_ms  # in the place of what the clock says
        planner.record_cycle(plan, drafts, cycles, None if has_prefill else [0.0, ms / 1e3])
        for s in [s for s in running if s.finish_reason]:
            planner.close(s)
            running.remove(s)
    return took


LOSS = 0.02  # of the time, beside what choosing takes
BAD = {
    "never right": {"is_right": False},
    "a step takes 200 ms": {"step_ms": 200.0, "is_right": False},
    "slow and always right": {"step_ms": 200.0, "is_right": True},
    "requests of three tokens": {"length": 3},
    "requests that end after two": {"length": 2, "is_right": False},
}


@pytest.mark.parametrize("clients", [1, 4, 16])
@pytest.mark.parametrize("name", BAD)
def test_nobody_pays_more_than_the_bound_for_a_bad_drafter(name, clients):
    """Many come in one moment, with all that choosing, probing, reading and drafting costs.

    In batches of each class (1, 2 to 3, …) it is believed what a step takes when four drafts, of up
    to two tokens, took so long.
    """
    auto, plain = (
        served(["chat"] * 24, clients, way, **BAD[name]).total() for way in (None, PLAIN)
    )
    drafts_ms = 4 * 2 * BAD[name].get("step_ms", 6.0) * (0.91 + 0.09 * clients)
    once_ms = 8 * MACHINES["pair"][clients] + clients.bit_length() * drafts_ms
    assert auto <= (1 + LOSS + CHOICE_BUDGET) * plain + once_ms


@pytest.mark.parametrize(("machine", "clients", "of_plain", "of_best"), [
    ("pair", 1, {"code": 1.5, "chat": 1.1, "edit": 1.8, "extraction": 0.98, "poem": 0.98}, 0.95),
    ("pair", 4, {"code": 1.1, "chat": 0.92, "edit": 1.5, "extraction": 0.92, "poem": 0.92}, 0.92),
    ("memory", 8, {"edit": 1.45}, 0.93),
    ("pair", 2, {"code": 1.22}, 0.93),  # one after the other is read: the first would not pay alone
    ("pair", 1, {"summary": 1.05, "answer": 1.05}, 0.85),  # before it is long, no text is worth it
], ids=["alone", "four", "edits of eight", "code of two", "of long prompts"])  # fmt: skip
def test_auto_gains_where_drafts_are_right_and_loses_little_elsewhere(
    machine, clients, of_plain, of_best
):
    """Each kind's speed in plain decoding's, and in that of the fixed way that is best for it.

    So a single client loses 5 % at most, and four at once, who share their passes, 8 %.
    """
    kinds = random.Random(0).sample([*of_plain] * 12, 12 * len(of_plain))
    ways = PLAIN, *product(["model"], [1, 2, 3, 5]), *product(["ngram"], [2, 5])
    auto, plain, *others = (served(kinds, clients, way, machine) for way in (None, *ways))
    speeds = {kind: plain[kind] / auto[kind] for kind in of_plain}
    assert all(speeds[kind] > of_plain[kind] for kind in of_plain), speeds
    speeds |= {kind: min(way[kind] for way in others) / auto[kind] for kind in of_plain}
    assert min(speeds.values()) > of_best, speeds


def test_where_drafts_gain_time_is_worth_more_so_drafts_are_shorter():
    """E(K) / T(K) is largest at K = 5. Half of the gain is counted on, and none in a new text."""
    controller = Controller(100, {"model": 25})
    controller.costs.start_from(Curve({1: 10.0, 2: 10.2, 32: 16.2}))

    def lived(alpha, count):
        asks = [Candidate({"model": settled(alpha)}, 15, inf)]
        return [controller.decide(asks, 1, True)[0].num_tokens for _ in range(count)]

    assert lived(0.85, 1) == [8] and lived(0.85, 60)[-1] == 6
    tokens, time = sum(0.85**i for i in range(7)), 1 + 6 * 0.27
    assert controller.worth[1] == pytest.approx((1 + tokens / time) / 2, rel=0.02)
    controller.join()
    assert lived(0.85, 1) == [8]
    lived(0.05, 60)
    assert controller.worth[1] == pytest.approx(1, rel=0.01)  # what plain decoding makes of it


def on_a_clock(engine, monkeypatch, choice_ms):
    """Let it measure: a cycle takes 3 ms of a made-up clock. Returns its choices: (of, batch)."""
    made, clock = [], [0.0]

    def now(ms=0.0):
        clock[0] += ms / 1e3
        return clock[0]

    def decided(asks, batch, _):
        made.append((len(asks), batch))
        now(choice_ms)

    del engine.planner.record_cycle
    monkeypatch.setattr(time, "perf_counter", now)
    engine.now = lambda: now(1.0)
    before(engine.controller, "decide", decided)
    return made


@pytest.mark.parametrize(
    ("size", "choices"),
    [(1, [(0, 1), (1, 1), (2, 2)]), (4, [(0, 4), (4, 4), (4, 4)])],
)
def test_a_choice_serves_on_when_one_ends_or_joins(steady, prompts, size, choices, monkeypatch):
    """It serves eight cycles that read no prompt, as it takes what eight cycles may pay.

    One of four ends in cycle 2, and in cycle 4 another's prompt is read: it waits for the next
    choice.
    """
    made = on_a_clock(steady, monkeypatch, 8 * 3 * CHOICE_BUDGET)
    requests = [Request(prompts["code_class"], n, "model", 2) for n in (40, 40, 40, 3)]
    batch = [steady.open(request) for request in requests[:size]]
    for cycle in range(11):
        if cycle == 4:
            batch.append(steady.open(requests[0]))
        steady.step([s for s in batch if s.finish_reason is None])
        assert batch[0].drafting.drafts or cycle not in range(1, 5)
    assert made == choices
    for s in batch:
        steady.close(s)
    alone = steady.open(requests[0])  # nobody is left for whom the choice could serve on
    for _ in range(2):
        steady.step([alone])
    assert made == [*choices, (0, 1), (1, 1)]
    steady.close(alone)


def test_a_fixed_k_drafts_in_every_cycle_whatever_serves_on(steady, prompts):
    """It joins while a choice serves on that knows nothing of it, and never has less than its K."""
    request, kinds = Request(prompts["code_class"], 40, "model", 4), set()
    first = steady.open(request)
    while not steady.planner._chosen:
        steady.step([first])
    steady.planner._owed_ms = inf
    before(steady, "accept", lambda *given: kinds.add(given[-1].kind))
    second = steady.open(replace(request, fixed_k=True))
    cycles = [steady.step([first, second])[second] for _ in range(8)]
    assert [len(cycle.draft.tokens) for cycle in cycles] == [0] + [4] * 7 and kinds == {REUSED}
    finish(steady, [first, second])


def test_passes_are_measured_without_choosing_or_prefills(demo_engine, prompts, monkeypatch):
    """With all rows; and each choice takes a minute here."""
    engine, passes = engine_of(demo_engine, {"ngram": 0}), []
    on_a_clock(engine, monkeypatch, 60_000)
    engine.controller.costs.observe_pass = lambda *measured: passes.append(measured[:3])
    _, events = run(engine, prompts["repetitive_colours"], max_tokens=20, drafter="ngram")
    rows = [len(event["proposals"]) + 1 for event in events[1:]]
    assert passes == [(1, count, pytest.approx(3)) for count in rows] and max(rows) > 2
    assert engine.planner._owed_ms > 60_000


def test_who_is_told_late_proposes_as_if_it_had_been_told_at_once(demo_engine, prompts, way):
    """Each has long pauses, in which nobody asks it; and what it would propose is asked, too."""
    loaded = {n: each for n, each in demo_engine.pool.drafters.items() if not each.needs}
    engine, names = core.Engine(demo_engine.target, loaded, "auto"), []
    propose, guess = engine.pool.propose, Planner(Controller(1, {}), engine.pool).guess

    def guessed(batch):
        (s,) = batch
        for name in ("ngram", "suffix") if s.num_steps else ():
            fresh = loaded[name].open(s.tokens, s.request.sampling, s.noise)
            assert guess(s.drafting, name, 3).tokens == loaded[name].guess(fresh, 3)

    def in_turn(texts, tasks):
        names.append(list(loaded)[len(names) // 3 % 4])
        return propose(texts, [Task(names[-1], tasks[0].limit)])

    before(engine.planner, "plan", guessed)
    engine.pool.propose = in_turn
    s, cycles = conftest.run_beside_fresh(engine, Request(prompts["code_class"], 40, "auto", **way))
    drafted = {name for name, cycle in zip(names, cycles, strict=True) if cycle.num_drafted}
    assert drafted == set(loaded) and s.warnings == []
    assert s.statistics.num_accepted_draft_tokens > 5


@pytest.mark.parametrize("name", ["draft_model", "mtp"])
def test_a_fault_in_a_batch_of_drafts_is_one_request_s(demo_engine, prompts, name, monkeypatch):
    """Neither their caches nor their random numbers keep anything of the draft that failed."""
    guilty = prompts["hard_story"]
    sampling = core.Sampling(temperature=0.9)
    healthy = Request(prompts["code_class"], 24, name, sampling=sampling, seed=2)
    *_, (alone, _) = demo_engine.generate(healthy)

    def fail(logits, text, *_):
        if text[: len(guilty)] == guilty:
            raise RuntimeError("cannot read this")

    monkeypatch.setattr(base, "sample", base.sample)
    before(base, "sample", fail)
    monkeypatch.setattr("runtime.kernels.can_chain", lambda *_: False)  # which asks nobody else
    others = [Request(text, 24, name, seed=1) for text in (guilty, prompts["easy_json"])]
    sequences = conftest.together(demo_engine, [healthy, *others])
    assert [bool(s.warnings) for s in sequences] == [False, True, False]
    assert sequences[0].output == alone.output
    assert sequences[0].statistics.drafted_at == alone.statistics.drafted_at


def seated(drafters):
    """A pool of these drafters, and a text that all of them read along."""
    text = DraftedText(Request([1, 2], drafter="auto"), core.Noise(0))
    pool = DrafterPool(drafters, 100)
    pool.open(text)
    return pool, text


@pytest.mark.parametrize(
    ("method", "chosen"),
    [(method, "good") for method in ("open", "guess", "observe", "close")] + [("observe", "bad")],
)
def test_of_several_drafters_only_the_one_that_fails_is_lost(method, chosen):
    """Also where it cannot hear of its own draft."""
    drafters = scripted(bad=script_of(1), good=script_of(1))
    setattr(drafters["bad"], method, Mock(side_effect=RuntimeError("no")))
    pool, text = seated(drafters)
    if method == "guess":
        assert Planner(Controller(1, {}), pool).guess(text, "bad", 3) == ([], 0)
    pool.propose([text], [Task(chosen, 3)])
    pool.observe(text, Verdict(3, 0, [5]), {})
    if method == "observe":  # the other one hears of it now
        pool.propose([text], [Task("bad" if chosen == "good" else "good", 3)])
    assert list(text.states) == (["bad", "good"] if method == "close" else ["good"])
    assert text.states["good"] == [1, 2, 5]
    pool.close(text)
    assert drafters["good"].num_open == 0 and pool.failures == {"bad": 1}
    (warning,) = text.warnings
    told = "bad failed to close (no)" if method == "close" else "bad failed (no): went on with good"
    assert warning == f"drafter {told}"


def test_who_was_passed_over_is_told_of_no_draft():
    drafters = scripted(idle=lambda tokens, n: [], chosen=lambda tokens, n: [])
    pool, text = seated(drafters)
    for verdict in (Verdict(3, 1, [5, 6]), Verdict(0, 0, [7])):
        pool.propose([text], [Task("chosen", 3)])
        pool.observe(text, verdict, {})
    assert drafters["chosen"].verdicts == [Verdict(3, 1, [5, 6]), Verdict(0, 0, [7])]
    assert drafters["idle"].verdicts == [] and text.states["chosen"] == [1, 2, 5, 6, 7]
    pool.propose([text], [Task("idle", 3)])  # it hears of all at once, and before it is asked
    assert drafters["idle"].verdicts == [Verdict(0, 2, [5, 6, 7])]
    assert text.states["idle"] == [1, 2, 5, 6, 7]


# ------------------------------------------------------------------------------------ starting


def test_each_model_makes_a_whole_draft_before_a_measurement_counts(demo_engine, monkeypatch):
    """And nothing of it is counted: neither tokens nor costs, nor a drafter's fault."""
    script = Mock(side_effect=lambda tokens, limit: tokens[-limit:])
    drafters = scripted(scripted=script, poisoned=Mock(side_effect=KeyError))
    controller = Controller(100, {"scripted": 20, "poisoned": 20})
    engine = core.Engine(demo_engine.target, drafters, controller=controller)
    warm_up(engine)
    assert [limit for (_, limit), _ in script.call_args_list] == [Request.num_speculative_tokens]
    totals = engine.totals
    assert totals.by_drafter["scripted"] == totals.by_drafter["none"] == Statistics()
    assert not (controller.costs.passes or engine.pool.failures or totals.recent)
    assert not engine.planner.decisions and not engine.target.cache.rows

    monkeypatch.setattr(engine.target, "forward", lambda *_, **__: 1 / 0)
    warm_up(engine)  # whoever uses it is told
    assert engine.totals.num_faults == 0


def test_a_measurement_silences_no_drafter_of_a_request(demo_engine, caplog):
    """Real requests may fail meanwhile, and their log is what tells why."""
    engine = conftest.scripted_engine(demo_engine, Mock(side_effect=KeyError("lost")))
    twin = uncounted(engine)
    for each in (twin, engine, twin):
        run(each, [5, 6, 7], max_tokens=3, drafter="scripted")
    assert [record.message for record in caplog.records] == [
        "drafter scripted failed: KeyError: 'lost'"
    ]
    assert engine.pool.failures == {"scripted": 1}


def test_an_engine_is_loaded_warm(demo_engine, monkeypatch):
    warmed, options = [], Options(model="embedded", kernels=False)
    monkeypatch.setattr(warming, "warm_up", warmed.append)
    monkeypatch.setattr(assembly, "assemble_engine", lambda *_: demo_engine)
    monkeypatch.setattr("runtime.kernels.report_of", lambda model: model.report, raising=False)
    assert [core.load_engine(options)] == warmed == [demo_engine]


# --------------------------------------------------- what must read a prompt before it drafts
def test_of_texts_that_end_soon_little_is_left_and_what_was_cut_might_have_gone_on():
    def text(num_read, length, finish_reason=None):
        output, left = [0] * length, 1000 - length
        told = {"output": output, "remaining": left, "finish_reason": finish_reason}
        return SimpleNamespace(tokens=[0] * num_read + output, **told)

    lengths = Lengths()
    for _ in range(40):
        lengths.observe(text(600, 10, "stop"))
        lengths.observe(text(90, 7, "length"))
    assert lengths.left(text(700, 9)) == 1 and lengths.left(text(700, 20)) == 980
    assert lengths.left(text(100, 0)) == lengths.left(text(300, 0)) == 1000  # of other prompts
    lengths.observe(text(300, 30, "stop"))
    lengths.observe(text(300, 20, "stop"))
    assert lengths.left(text(300, 5)) == 15 and lengths.left(text(300, 20)) == 10


def test_while_prompts_are_read_no_model_reads_another_text(steady, prompts):
    """The batch grows, and in a larger one the model may not be used."""
    steady.prefill_chunk, drafted = 4, []
    first = steady.open(Request(prompts["code_class"][:4], 30, "model", 2))
    steady.step([first])
    second = steady.open(Request(prompts["code_class"], 30, "model", 2))
    while not second.num_steps:
        steady.step([first, second])
        drafted.append(bool(first.drafting.drafts))
    assert len(drafted) > 2 and not any(drafted)
    finish(steady, [first, second])
    assert first.statistics.num_draft_tokens > 0
