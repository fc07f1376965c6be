"""How much to draft: the choice follows acceptance and costs, and the clock only where it may."""

import itertools
import json
import operator
import random
import re
import subprocess
import sys
import time

import pytest
import speculative_decoding as core
from conftest import ScriptedDrafter, run

import messages
from control.controller import PROBE_BUDGET, Acceptance, Ask, Controller
from control.costs import Costs, Line
from control.plans import NOTHING, Choice, Offer, Prices, best_plan, evaluate
from drafters.panel import Panel, Seat
from serving import faults
from serving.worker import warm_up

K = 8
WEIGHTS = 100, {"own": 20, "other": 20, "free": 0}


def settled(alpha):
    """A long record of a drafter each of whose tokens is accepted in a share `alpha` of cases."""
    return Acceptance([10.0] * K, [10.0 * alpha] * K, cycles=1000)


def measure(costs, batch=1, pass_ms=10.0, token_ms=0.2, **step_ms):
    """As if each of these had been measured often enough."""
    for tokens in (batch, 50 * batch) * 3:
        costs.observe_pass(batch, tokens, pass_ms + token_ms * tokens)
    for name, ms in step_ms.items():
        for _ in range(3):
            costs.observe_draft(name, [1], 0, ms)


def controller(c=0.2, token_share=0.02, batch=1):
    """With measured costs: a pass of 10 ms, a draft step of c passes."""
    result = Controller(*WEIGHTS)
    measure(result.costs, batch, token_ms=10.0 * token_share, own=c * 10.0)
    return result


def ask(own, records, batch=1, limit=K):
    """The decision for one of `batch` requests, all with such records."""
    seats = [Ask(records, limit, 1000) for _ in range(batch)]
    return own.plan(seats, batch)[0]


def choose(alpha, c=0.2, batch=1, token_share=0.02):
    return ask(controller(c, token_share, batch), {"own": settled(alpha)}, batch)


def test_the_record_estimates_each_position_by_itself():
    record = Acceptance()
    for _ in range(100):
        record.observe(3, 1)  # the first always, the second never
    first, second, third, fourth = record.alphas(4)
    assert first > 0.9 and second < 0.2
    assert abs(third - second) < 1e-9 and fourth == third  # never reached: like the one before


def test_recent_cycles_count_more():
    record = settled(1.0)
    for _ in range(15):
        record.observe(4, 0)
    assert record.alphas(1)[0] < 0.3


def test_a_record_ages_with_the_text_and_knows_how_often_there_was_nothing_to_propose():
    steady, paused = settled(1.0), settled(1.0)
    for _ in range(3):
        paused.observe(0, 0)  # nobody asked
    assert paused.coverage == 1.0
    for record in (steady, paused):
        record.observe(4, 0, 4)
    assert paused.alphas(1)[0] < steady.alphas(1)[0] - 0.02
    for _ in range(20):
        paused.observe(0, 0, 4)
    assert paused.coverage < 0.05 and steady.coverage == 1.0


def test_k_grows_with_acceptance_and_falls_with_cost():
    by_alpha = [choose(alpha).num_tokens for alpha in (0.05, 0.4, 0.6, 0.8, 0.95)]
    assert by_alpha == sorted(by_alpha) and by_alpha[0] == 0 and by_alpha[-1] >= 5
    by_cost = [choose(0.7, c).num_tokens for c in (0.0, 0.1, 0.3, 0.6, 1.5)]
    assert by_cost == sorted(by_cost, reverse=True) and by_cost[0] >= 5 and by_cost[-1] == 0


def test_k_falls_as_the_batch_fills_up():
    """Where each token costs a tenth of a pass, eight rows are bound by arithmetic."""
    by_batch = [choose(0.7, 0.05, batch, 0.1).num_tokens for batch in (1, 2, 4, 8, 16)]
    assert by_batch == sorted(by_batch, reverse=True)
    assert by_batch[0] >= 2 and by_batch[-1] < by_batch[0]


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("c", [0.0, 0.1, 0.3])
def test_the_choice_is_the_best_of_all_k_by_the_formula(alpha, c):
    """Against (1 − α^(K+1)) / (1 − α) over K · c + t_verify(K + 1), tried for every K."""
    own, record = controller(c), settled(alpha)
    reach, line = record.reach(K), own.costs.pass_line(1)

    def speedup(k):
        return (1 + sum(reach[:k])) * line.at(1) / (k * c * 10 + line.at(k + 1))

    best = max(range(K + 1), key=speedup)
    decision = ask(own, {"own": record})
    assert speedup(decision.num_tokens) > 0.99 * speedup(best) or decision.is_probe
    assert decision.expected_speedup == pytest.approx(speedup(decision.num_tokens), rel=0.01)


def test_without_drafts_it_probes_now_and_then_and_comes_back():
    own, record = controller(), settled(0.0)
    asked = []
    for _ in range(1000):
        decision = ask(own, {"own": record})
        asked.append(decision.num_tokens)
        record.observe(decision.num_tokens, 0)
    assert max(asked) == 1
    # A probe costs so much of a pass, less what it may win; together a hundredth of the time.
    spent = sum(asked) * (decision.break_even - decision.alpha)
    assert 0.5 < spent / (PROBE_BUDGET * 1000) <= 1.01
    for _ in range(200):  # now the text has become easy
        decision = ask(own, {"own": record})
        record.observe(decision.num_tokens, decision.num_tokens)
    assert decision.num_tokens >= 5 and not decision.is_probe


def test_batches_of_other_sizes_have_costs_of_their_own():
    """Eight at once were found to cost more per token; one alone goes on as before."""
    own, records = controller(c=0.05), {"own": settled(0.8)}
    alone = ask(own, records)
    measure(own.costs, 8, pass_ms=1.0, token_ms=5.0)
    assert ask(own, records, 9).num_tokens < alone.num_tokens
    assert ask(own, records, 2).num_tokens > 0
    assert ask(own, records) == alone


def test_a_request_that_drafts_nothing_beside_others_that_do_comes_back():
    """Its text was hard and has become easy; the step is taken for its neighbours anyway."""
    own = controller(c=0.1, batch=4)
    records = [settled(0.9), settled(0.9), settled(0.9), settled(0.0)]
    last = []
    for cycle in range(200):
        decisions = own.plan([Ask({"own": record}, 4, 1000) for record in records], 4)
        counts = [decision.num_tokens for decision in decisions]
        assert all(counts[:3])
        for record, count in zip(records, counts, strict=True):
            record.observe(count, count if cycle > 20 or record is not records[3] else 0, count)
        last.append(counts[3])
    assert last[0] == 0 and last[-1] == 4


def test_it_says_why():
    assert str(choose(0.95)).startswith("own, K=")
    assert "expected" in str(choose(0.95)) and "α " in str(choose(0.95))
    poor = choose(0.05)
    assert "K=0 is faster here" in str(poor) and "< break-even" in str(poor)
    assert poor.alpha < poor.break_even == pytest.approx(0.2 + 0.2 / 10.2, abs=0.01)
    assert poor.as_dict()["says"] == str(poor)


def test_what_not_even_a_perfect_draft_would_pay_for_cannot_pay():
    decision = choose(0.85, c=34.54)
    assert decision.break_even > 1 and decision.num_tokens == 0
    assert re.fullmatch(r"K=0 is faster here: own cannot pay \(c 3\d\.\d\d\)", str(decision))


def test_the_line_finds_what_a_pass_and_a_token_cost():
    line = Line(0.02)
    for i in range(400):
        tokens = (1, 6, 8, 48)[i % 4]
        line.observe(tokens, 4.0 + 0.1 * tokens + (30 if i % 150 == 149 else 0))
    assert line.fixed == pytest.approx(4.0, rel=0.05)
    assert line.slope == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("ms", [1.0, 8.0])
def test_a_pass_that_has_become_slower_or_faster_for_good_is_noticed(ms):
    line = Line(0.02)
    for _ in range(50):
        line.observe(1, 3.0)
    for _ in range(20):
        line.observe(1, ms)
    assert line.at(1) == pytest.approx(ms)


def test_passes_of_one_size_leave_a_sane_slope():
    line = Line(0.02)
    for _ in range(50):
        line.observe(1, 5.0)
    assert line.at(1) == pytest.approx(5.0) and 0 <= line.slope < 0.5


def test_a_drafter_that_becomes_slower_is_noticed():
    costs = Costs(*WEIGHTS)
    measure(costs, own=1.0)
    before = sum(costs.step("own", 1, 10.0))
    costs.observe_draft("own", [5], 0, 500.0)
    assert sum(costs.step("own", 1, 10.0)) < 2 * before  # once is an accident
    for _ in range(40):
        costs.observe_draft("own", [5], 0, 500.0)
    assert sum(costs.step("own", 1, 10.0)) > 50


def test_a_first_measurement_far_above_does_not_end_drafting():
    """The first call may have to set things up; who never drafts again is never measured again."""
    costs = Costs(*WEIGHTS)
    measure(costs)
    for name, most in (("own", 3 * 0.2), ("unknown", 3 * 0.1)):
        costs.observe_draft(name, [1], 0, 500.0)
        assert sum(costs.step(name, 1, 10.0)) == pytest.approx(most * 10)


def test_what_was_measured_cold_is_forgotten_once_it_is_contradicted():
    costs = Costs(*WEIGHTS)
    for ms in (400.0, 5.0):
        costs.observe_pass(1, 6, ms)
    assert costs.pass_line(1).at(6) == pytest.approx(5.0)
    for ms in (200.0, 1.0):
        costs.observe_draft("own", [1], 0, ms)
    assert sum(costs.step("own", 1, 5.0)) == pytest.approx(1.0)


def test_text_that_a_model_has_to_read_first_is_a_cost_of_its_own():
    costs = Costs(*WEIGHTS)
    measure(costs, own=1.0)
    for _ in range(3):
        costs.observe_draft("own", [2], 100, 2.0 + 6.0)
    assert sum(costs.step("own", 1, 10.0)) == pytest.approx(1.0)
    assert costs.read("own", 10.0) == pytest.approx(0.06)


def test_a_cycle_that_was_slow_as_a_whole_says_nothing_of_the_drafter():
    costs = Costs(*WEIGHTS)
    measure(costs, own=1.0)
    for _ in range(40):
        costs.observe_draft("own", [1], 0, 50.0)
        costs.observe_pass(1, 2, 50 * 10.4)
        costs.observe_pass(1, 2, 10.4)
    assert sum(costs.step("own", 1, 10.0)) == pytest.approx(1.0, rel=0.05)


def live(own, record, num_cycles, pass_ms, step_ms, tokens=100):
    """Cycles of one request on a clock that is made up; who drafted how much.

    Three quarters of the drafted tokens are accepted.
    """
    drafted = []
    for cycle in range(num_cycles):
        decision = own.plan([Ask({"own": record}, 5, tokens)], 1)[0]
        count = decision.num_tokens
        if count:
            own.costs.observe_draft("own", [count], record.unread, step_ms(cycle) * count)
        own.costs.observe_pass(1, 1 + count, pass_ms(cycle))
        accepted = min(count, (0, 5, 3, 4)[len(drafted) % 4])
        record.observe(count, accepted, count)
        record.unread = 0 if count else record.unread + 1
        drafted.append(count)
    return drafted


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_after_a_cold_pass_and_a_cold_draft_drafting_resumes_within_20_cycles(rows):
    own = Controller(*WEIGHTS)
    own.costs.observe_draft("own", [1], 0, 200.0)
    own.costs.observe_pass(1, rows, 400.0)
    drafted = live(own, own.record("own", 1, True), 20, lambda _: 5.0, lambda _: 1.0)
    assert min(drafted[-5:]) >= 2


@pytest.mark.parametrize("order", range(10))
def test_no_order_of_cold_measurements_shuts_a_drafter_off_that_pays(order):
    """Ten starts, each with a dozen slow calls: it comes back within 400 cycles."""
    chance = random.Random(order)
    cold = [1 + 99 * chance.random() ** 3 for _ in range(12)]

    def slow(own_ms):
        return lambda cycle: own_ms * (cold[cycle] if cycle < len(cold) else 1.0)

    own = Controller(*WEIGHTS)
    live(own, own.record("own", 40, True), 40, slow(5.0), slow(1.0))
    for _ in range(20):
        drafted = live(own, own.record("own", 40, True), 20, lambda _: 5.0, lambda _: 1.0)
    assert sum(map(bool, drafted)) >= 18


def test_a_drafter_that_a_busy_machine_has_shut_off_is_measured_again_across_requests():
    """Each request is too short to pay for a probe; together they do."""
    own = Controller(*WEIGHTS)
    measure(own.costs, pass_ms=5.0, own=40.0)
    assert sum(own.costs.step("own", 1, 5.0)) > 20  # far more than a pass: believed by now
    spent = []
    for _ in range(100):
        drafted = live(own, own.record("own", 1, True), 12, lambda _: 5.0, lambda _: 40.0)
        spent.append(sum(drafted))
    assert 0 < sum(spent) * 40 < 0.02 * 100 * 12 * 5 and max(spent) <= 1
    for _ in range(100):
        drafted = live(own, own.record("own", 1, True), 12, lambda _: 5.0, lambda _: 1.0)
    assert sum(map(bool, drafted)) >= 10


# ------------------------------------------------------------------------- one choice for all


def offers_at_random(chance, names):
    """What three requests may choose from; text to read is a model's affair."""
    return [
        {
            name: Offer(
                list(itertools.accumulate((chance.random() for _ in range(4)), operator.mul)),
                chance.uniform(0, 0.6),
                0.0 if name == "free" else chance.choice([0.0, chance.random()]),
            )
            for name in names
            if chance.random() < 0.85
        }
        for _ in range(3)
    ]


@pytest.mark.parametrize("names", [("own", "free"), ("own", "other")], ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_the_joint_choice_is_the_best_of_all_choices(names, seed):
    """Three requests, two drafters, up to four tokens, hypothetical costs: 9³ choices each."""
    chance = random.Random(seed)
    seats = offers_at_random(chance, names)
    steps = {name: chance.random() for name in names if name != "free"}
    width_ms = chance.choice([0.0, chance.uniform(0, 0.5)])
    prices = Prices(3.0, chance.uniform(1, 5), steps, width_ms)
    best = 0.0
    every = [[NOTHING, *(Choice(n, k) for n in seat for k in range(1, 5))] for seat in seats]
    for choices in itertools.product(*every):
        free_to_choose = {
            choice.drafter
            for choice, seat in zip(choices, seats, strict=True)
            if choice.drafter in steps and len(seat.keys() & steps) > 1
        }
        if len(free_to_choose) < 2:  # two models would run one after the other
            best = max(best, evaluate(list(choices), seats, prices).rate)
    found = best_plan(seats, prices)
    assert 0.998 * best <= found.rate <= best * (1 + 1e-9)
    assert found.rate >= evaluate([NOTHING] * 3, seats, prices).rate
    assert found == evaluate(found.choices, seats, prices)


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_may_choose_share_one_model_in_a_cycle(seed):
    """Probes included, whatever was measured; who asked for the other one still gets it."""
    chance = random.Random(seed)
    own = Controller(*WEIGHTS)
    measure(own.costs, 4, own=chance.uniform(0.2, 3), other=chance.uniform(0.2, 3))
    records = [
        {name: settled(chance.random()) for name in ("own", "other", "free")} for _ in range(4)
    ]
    seen = set()
    for _ in range(300):
        decisions = own.plan([Ask(each, 5, 1000) for each in records], 4)
        drafting = {d.drafter for d in decisions if d.num_tokens} - {"free"}
        assert len(drafting) <= 1
        seen |= drafting
    assert seen == {"own", "other"}  # one of them in probes
    only = [{"own": settled(0.9)}, {"other": settled(0.9)}]
    decisions = own.plan([Ask(each, 5, 1000) for each in only], 4)
    assert [d.drafter for d in decisions] == ["own", "other"]


def test_a_new_request_is_thought_to_be_like_those_of_its_kind_before_it():
    own = Controller(*WEIGHTS)
    for _ in range(50):
        own.record("own", 1, "greedy").observe(4, 1, 4)
    first, second, *_ = own.record("own", 1, "greedy").alphas(4)
    assert first > 0.95 and second < 0.1
    assert own.record("own", 1, "coupled").alphas(2) == Acceptance().alphas(2)


class Unmeasured(Costs):
    """No clock: by the sizes of the weights."""

    def __init__(self, costs):
        vars(self).update(vars(costs))

    def observe_pass(self, *_):
        pass

    observe_draft = observe_pass


@pytest.fixture(scope="module")
def adaptive():
    """The embedded models with the controller on."""
    return core.load_engine(core.Options())


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "mtp", "auto"])
@pytest.mark.parametrize("name", ["code_class", "hard_story", "repetitive_letters"])
def test_whatever_it_chooses_the_output_is_plain_decoding(
    adaptive, prompts, plain, name, drafter, way
):
    given = {"max_tokens": 48, "drafter": drafter, "trace": True}
    sequence, events = run(adaptive, prompts[name], **given, **way)
    assert sequence.output == plain(prompts[name], 48, **way)
    assert sequence.seat.warnings == [] and sequence.seat.decision is not None
    assert all(len(event["proposals"]) <= 5 for event in events)
    assert "controller" in events[1]


def test_a_batch_that_chooses_its_drafts_together_writes_what_each_would_alone(
    adaptive, prompts, plain, way
):
    """Drafters of all kinds and limits, one choice for all; greedy and sampled in turns."""
    texts, ways = list(prompts.values())[:8], [way, {}]
    drafters = ["auto", "auto", "mtp", "auto", "ngram", "draft_model", "auto", None]
    running = [
        adaptive.open(core.Request(text, 32, name, 1 + 2 * i, **ways[i % 2]))
        for i, (text, name) in enumerate(zip(texts, drafters, strict=True))
    ]
    sequences = list(running)
    while running:
        faults.step(adaptive, running)
        running = [s for s in running if s.finish_reason is None]
    for i, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
        adaptive.close(sequence)
        assert sequence.output == plain(text, 32, **ways[i % 2])


def test_the_same_seed_gives_the_same_output_whatever_costs_were_measured(adaptive, prompts):
    sampling = core.Sampling(temperature=1.0, top_p=0.95)
    outputs = []
    for step_ms in (0.01, 50.0):
        measure(adaptive.controller.costs, mtp=step_ms, draft_model=step_ms)
        for drafter in ("mtp", "auto", "draft_model"):
            sequence, _ = run(
                adaptive, prompts["hard_docs"], max_tokens=40, drafter=drafter,
                sampling=sampling, seed=3,
            )  # fmt: skip
            outputs.append(sequence.output)
    assert all(output == outputs[0] for output in outputs)


def test_a_drafter_that_is_never_right_is_soon_left_alone(demo_engine, prompts):
    """The cost of finding out: a few drafts, then probes. Each takes as long as some passes."""

    def script(tokens, n):
        time.sleep(0.01 * n)
        return [0] * n

    drafter = ScriptedDrafter(script)
    engine = core.Engine(
        demo_engine.target,
        {"scripted": drafter},
        "scripted",
        controller=Controller(100, {"scripted": 30}),
    )
    sequence, _ = run(
        engine, prompts["hard_docs"], max_tokens=100, drafter="scripted",
        sampling=core.Sampling(temperature=1.0), seed=3,
    )  # fmt: skip
    statistics = sequence.statistics
    assert statistics.target_passes > 80 and statistics.num_spec_steps < 15
    assert "K=0 is faster here: scripted" in str(sequence.seat.decision)
    assert engine.planner.decisions["scripted"] is sequence.seat.decision


def test_among_several_one_that_often_has_nothing_to_propose_is_passed_over():
    own = Controller(100, {"silent": 0, "steady": 20})
    records = {"silent": Acceptance(), "steady": settled(0.8)}
    assert ask(own, records).drafter == "silent"
    for _ in range(20):
        records["silent"].observe(0, 0, asked=K)
    assert ask(own, records).drafter == "steady"
    only = {"silent": records["silent"]}  # alone it is asked on: an empty draft costs nothing
    assert ask(own, only).num_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_costs_nothing_is_judged_by_what_came(demo_engine, prompts, temperature):
    """Each cycle's own tokens against the guess; a silent model always drafts."""

    class Silent(ScriptedDrafter):
        name = "silent"

    ngram = demo_engine.panel.drafters["ngram"]
    auto = {"silent": Silent(lambda tokens, n: []), "ngram": ngram}
    engine = core.Engine(
        demo_engine.target, auto, "auto", controller=Controller(100, {"silent": 0, "ngram": 0})
    )
    plan = engine.controller.plan

    def silent_first(seats, batch):
        return plan([Ask({"silent": s.records["silent"]}, s.limit, 1) for s in seats], batch)

    engine.controller.plan = silent_first
    prompt = prompts["repetitive_sentence"]
    sampling = core.Sampling(temperature=temperature)
    sequence, _ = run(engine, prompt, max_tokens=30, drafter="auto", sampling=sampling, seed=1)
    expected, tokens = Acceptance(), list(prompt)
    for token in sequence.output:
        index = ngram.open(tokens, sampling, None)
        guess = index.continuation(1)
        expected.observe(len(guess), int(guess == [token]), 1)
        tokens.append(token)
    found = sequence.seat.records["ngram"]
    assert (found.reached, found.accepted) == (expected.reached, expected.accepted)
    assert found.cycles == expected.cycles > 20 and found.coverage == expected.coverage
    assert sequence.seat.records["silent"].cycles == 0
    assert found.unread == len(sequence.tokens)
    assert sequence.seat.records["silent"].unread == 1  # for the last token nobody is asked


def test_passes_are_measured_with_all_their_rows_and_prefills_not_at_all(demo_engine, prompts):
    engine = core.Engine(
        demo_engine.target,
        {"ngram": demo_engine.panel.drafters["ngram"]},
        controller=Controller(100, {"ngram": 0}),
    )
    measured: list[tuple] = []
    engine.controller.costs.observe_pass = lambda *given: measured.append(given)
    _, events = run(engine, prompts["repetitive_colours"], max_tokens=30, drafter="ngram")
    rows = [len(event["proposals"]) + 1 for event in events[1:]]
    assert [(batch, fed, width) for batch, fed, _, _, width in measured] == [
        (1, count, count) for count in rows
    ]
    assert max(rows) > 2 and all(ms > 0 for _, _, *each, _ in measured for ms in each)


def test_a_guess_that_fails_costs_the_drafter_and_not_the_answer(demo_engine, prompts, plain):
    class Broken(ScriptedDrafter):
        def guess(self, state, max_tokens):
            raise RuntimeError("no idea")

    drafter = Broken(lambda tokens, n: [0] * n)
    engine = core.Engine(
        demo_engine.target,
        {"scripted": drafter},
        "scripted",
        controller=Controller(100, {"scripted": 900}),
    )
    sequence, _ = run(engine, prompts["hard_docs"], max_tokens=20, drafter="scripted")
    assert sequence.output == plain(prompts["hard_docs"], 20)
    assert "no idea" in sequence.seat.warnings[0] and drafter.num_open == 0


def test_among_several_the_better_one_drafts(demo_engine, prompts, plain):
    prompt = prompts["hard_docs"]
    expected = plain(prompt, 60)

    class Right(ScriptedDrafter):
        name = "right"

    class Wrong(ScriptedDrafter):
        name = "wrong"

    def right(tokens, n):
        at = len(tokens) - len(prompt)
        return expected[at : at + n]

    good, bad = Right(right), Wrong(lambda tokens, n: [0] * n)
    engine = core.Engine(
        demo_engine.target,
        {"wrong": bad, "right": good},
        "auto",
        controller=Controller(100, {"right": 1, "wrong": 1}),
    )
    sequence, _ = run(engine, prompt, max_tokens=60, drafter="auto")
    assert sequence.output == expected
    assert sequence.seat.decision.drafter == "right"
    assert sequence.statistics.tokens_per_pass > 3
    assert (good.num_open, bad.num_open) == (0, 0)


@pytest.mark.parametrize("first", ["ngram", "draft_model", "mtp"])
def test_who_was_passed_over_proposes_as_if_it_had_been_there(demo_engine, prompts, first):
    """Each of several drafters proposes in turn; each does what one that saw all of it does."""
    loaded = {n: demo_engine.panel.drafters[n] for n in ("ngram", "draft_model", "mtp")}
    chosen = itertools.cycle(["draft_model", first, "ngram", "mtp"])
    engine = core.Engine(demo_engine.target, loaded, "auto")
    propose = engine.panel.propose

    def in_turn(seats, plan):
        (seat,), ((_, limit),) = seats, plan
        name = next(chosen)
        drafts = propose(seats, [(name, limit)])
        if limit and name != "mtp":  # whose hidden states a fresh state would have to be given
            text = list(seat.states["draft_model"].tokens)
            fresh = loaded[name].open(text, core.Sampling(), core.Noise(0))
            assert loaded[name].propose(fresh, limit).tokens == drafts[0].tokens
            loaded[name].close(fresh)
        return drafts

    engine.panel.propose = in_turn
    sequence, events = run(engine, prompts["code_class"], max_tokens=50, drafter="auto")
    assert sequence.seat.warnings == [] and len(events) > 8
    assert sequence.statistics.num_accepted_draft_tokens > 10


def test_a_batch_with_one_faulty_state_keeps_the_speculation_of_the_others(demo_engine, prompts):
    class Touchy(ScriptedDrafter):
        def propose_batch(self, states, limits):
            if any(state[0] == prompts["hard_story"][0] for state in states):
                raise RuntimeError("cannot read this")
            return super().propose_batch(states, limits)

    drafter = Touchy(lambda tokens, n: tokens[-n:])
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, "scripted")
    names = ("code_class", "hard_story", "easy_json")
    sequences = [engine.open(core.Request(prompts[n], 20, "scripted")) for n in names]
    while running := [s for s in sequences if not s.finish_reason]:
        faults.step(engine, running)
    for sequence in sequences:
        engine.close(sequence)
    assert [bool(s.seat.warnings) for s in sequences] == [False, True, False]
    assert sequences[0].statistics.num_draft_tokens > 20
    assert engine.panel.num_failures == 1


@pytest.mark.parametrize("name", ["draft_model", "mtp"])
def test_a_fault_in_a_batch_of_model_drafts_leaves_the_others_as_if_alone(prompts, name):
    """Neither their caches nor their random numbers keep anything of the draft that failed."""
    engine = core.load_engine(core.Options(fixed_k=True))
    drafter, guilty = engine.panel.drafters[name], prompts["hard_story"]
    sampling = core.Sampling(temperature=0.9)
    healthy = core.Request(prompts["code_class"], 24, name, sampling=sampling, seed=2)
    *_, (alone, _) = engine.generate(healthy)
    sample = drafter._sample

    def faulty(logits, text, *given):
        if text[: len(guilty)] == guilty:
            raise RuntimeError("cannot read this")
        return sample(logits, text, *given)

    drafter._sample = faulty
    sequences = [engine.open(r) for r in (healthy, core.Request(guilty, 24, name, seed=1))]
    while running := [s for s in sequences if not s.finish_reason]:
        faults.step(engine, running)
    for sequence in sequences:
        engine.close(sequence)
    assert [bool(s.seat.warnings) for s in sequences] == [False, True]
    assert sequences[0].output == alone.output
    assert sequences[0].statistics.drafted_at == alone.statistics.drafted_at


class _Unable(ScriptedDrafter):
    """Fails in the method that it is named after."""

    def __init__(self, method):
        super().__init__(lambda tokens, n: [])
        self.method = method

    def open(self, *given):
        if self.method == "open":
            raise RuntimeError("no")
        return super().open(*given)

    def observe(self, *given):
        if self.method == "observe":
            raise RuntimeError("no")
        super().observe(*given)

    def close(self, *given):
        if self.method == "close":
            raise RuntimeError("no")
        super().close(*given)


def seated(drafters):
    """A panel of these drafters, and a seat at which all of them read along."""
    panel, seat = Panel(drafters, 100), Seat(2, core.Sampling())
    panel.open(seat, "auto", [1, 2], core.Noise(0))
    return panel, seat


@pytest.mark.parametrize("method", ["open", "observe", "close"])
def test_of_several_drafters_only_the_one_that_fails_is_lost(method):
    good, bad = ScriptedDrafter(lambda tokens, n: []), _Unable(method)
    panel, seat = seated({"bad": bad, "good": good})
    panel.propose([seat], [("good", 3)])
    panel.observe(seat, messages.Verdict(0, 0, [5]), {})
    assert list(seat.states) == (["bad", "good"] if method == "close" else ["good"])
    assert seat.states["good"] == [1, 2, 5]
    panel.close(seat)
    assert good.num_open == 0 and panel.num_failures == int(method != "close")
    (warning,) = seat.warnings
    told = "bad failed to close: no" if method == "close" else "bad failed (no): went on with good"
    assert warning == f"drafter {told}"


def test_who_was_passed_over_is_told_of_no_draft():
    drafters = {name: ScriptedDrafter(lambda tokens, n: []) for name in ("idle", "chosen")}
    panel, seat = seated(drafters)
    panel.propose([seat], [("chosen", 3)])
    panel.observe(seat, messages.Verdict(3, 1, [5, 6]), {})
    assert drafters["chosen"].verdicts == [messages.Verdict(3, 1, [5, 6])]
    assert drafters["idle"].verdicts == [messages.Verdict(0, 1, [5, 6])]
    assert seat.states == {"idle": [1, 2, 5, 6], "chosen": [1, 2, 5, 6]}


def test_in_a_batch_one_model_drafts_for_all_who_may_choose(demo_engine, prompts, plain):
    """Whatever each of them would rather have; n-gram, which takes no steps, may go along."""
    engine = core.load_engine(core.Options(max_running=6))
    engine.controller.costs = Unmeasured(engine.controller.costs)
    assert engine.default_drafter == "auto"
    names = list(prompts)[:6]
    sampled = core.Sampling(temperature=1.0)
    requests = [core.Request(prompts[name], 40, "auto") for name in names[:5]]
    requests.append(core.Request(prompts[names[5]], 40, "auto", sampling=sampled, seed=3))
    *_, (alone, _) = engine.generate(requests[5])
    sequences = [engine.open(request) for request in requests]
    seen = set()
    while running := [s for s in sequences if s.finish_reason is None]:
        drafting = [s for s in sequences[:5] if s in running and s.num_steps and s.remaining > 1]
        faults.step(engine, running)
        chosen = {s.seat.decision.drafter for s in drafting}
        assert len(chosen & {"mtp", "draft_model"}) <= 1
        seen |= chosen
    assert len(seen) > 1
    for s, name in zip(sequences[:5], names, strict=False):
        assert s.output == plain(prompts[name], 40)
    assert sequences[5].output == alone.output
    for s in sequences:
        engine.close(s)


def test_who_has_nothing_to_propose_is_not_chosen(demo_engine, prompts):
    """n-gram looked better by its record, but finds no match: the model drafts at once."""

    class Steady(ScriptedDrafter):
        name = "steady"

    ngram = demo_engine.panel.drafters["ngram"]
    auto = {"ngram": ngram, "steady": Steady(lambda tokens, n: [5] * n)}
    engine = core.Engine(
        demo_engine.target, auto, "auto", controller=Controller(100, {"ngram": 0, "steady": 20})
    )
    engine.controller.costs = Unmeasured(engine.controller.costs)
    for prompt, expected in (([1, 2, 3, 4], "steady"), ([1, 2, 1, 2, 1, 2], "ngram")):
        s = engine.open(core.Request(prompt, 8, "auto"))
        engine.step([s])
        s.seat.states["ngram"] = ngram.open(prompt, core.Sampling(), s.noise)
        s.seat.records = {
            "ngram": Acceptance(),
            "steady": Acceptance(),
        }  # and text to read is forgotten
        engine.step([s])
        assert s.seat.decision.drafter == expected
        engine.close(s)


def test_who_is_passed_over_is_tried_again_now_and_then():
    own = Controller(100, {"free": 0, "model": 30})
    records = {"free": settled(0.4), "model": settled(0.0)}
    asked = []
    for _ in range(400):
        decision = ask(own, records)
        asked.append(decision.drafter)
        for name, record in records.items():
            drafted = decision.num_tokens if name == decision.drafter else 0
            record.observe(drafted, int(name == "free" and drafted > 0))
    assert 2 <= asked.count("model") <= 12


# ------------------------------------------------------------------------------------ starting


def test_all_is_run_at_one_and_k_plus_1_rows_before_a_measurement_counts(demo_engine, monkeypatch):
    """And nothing of it is counted: neither tokens nor costs, nor a drafter's fault."""
    asked, rows = [], []

    def script(tokens, limit):
        asked.append(limit)
        return tokens[-limit:]

    def poisoned(tokens, limit):
        raise RuntimeError("poisoned")

    class Poisoned(ScriptedDrafter):
        name = "poisoned"

    engine = core.Engine(
        demo_engine.target,
        {"scripted": ScriptedDrafter(script), "poisoned": Poisoned(poisoned)},
        controller=Controller(100, {"scripted": 20, "poisoned": 20}),
    )
    forward = engine.target.forward

    def counted(*given, **named):
        rows.append(len(given[1] if given else named["tokens"][0]))
        return forward(*given, **named)

    monkeypatch.setattr(engine.target, "forward", counted)
    warm_up(engine)
    assert asked.count(core.Options.num_speculative_tokens) >= 2
    assert rows.count(1) >= 2 and rows.count(core.Options.num_speculative_tokens + 1) >= 2
    assert engine.controller and not engine.controller.costs.passes
    assert (
        engine.totals.by_drafter["scripted"]
        == engine.totals.by_drafter["none"]
        == core.Statistics()
    )
    assert (
        engine.panel.num_failures == 0 and not engine.totals.recent and not engine.planner.decisions
    )
    assert engine.target.cache.lengths == [0] * engine.target.cache.num_rows

    monkeypatch.setattr(engine.target, "forward", lambda *_, **__: 1 / 0)
    warm_up(engine)  # whoever uses it is told
    assert engine.totals.num_faults == 0


def test_an_engine_is_loaded_warm(monkeypatch):
    warmed = []
    monkeypatch.setattr(core, "warm_up", warmed.append)
    engine = core.load_engine(core.Options())
    assert warmed == [engine]


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4))
def test_a_demo_that_has_just_been_started_shows_no_drafter_off_that_pays(start):
    """A process of its own each time. Off would be one token a pass; warm they have about two."""
    command = [sys.executable, "08_speculative_decoding.py", "--demo", "--json"]
    result = subprocess.run(
        [*command, "--max-tokens", "32"], cwd=core.ROOT, capture_output=True, check=True
    )
    totals = json.loads(result.stdout)["totals"]
    for name in ("draft_model", "mtp", "auto"):
        assert totals[name]["tokens_per_pass"] > 1.5, (name, totals[name])
