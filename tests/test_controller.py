"""How much to draft: the choice follows acceptance and costs, and the clock only where it may."""

import itertools

import pytest
import speculative_decoding as core
from conftest import ScriptedDrafter, run

from drafters.auto import AutoDrafter
from serving.controller import Acceptance, Controller, Costs

K = 8


def settled(alpha):
    """A long record of a drafter each of whose tokens is accepted in a share `alpha` of cases."""
    return Acceptance([10.0] * K, [10.0 * alpha] * K, cycles=1000)


def controller(c=0.2, token_share=0.02):
    """With measured costs: a pass of 10 ms, a draft step of c passes."""
    result = Controller(100, {"own": 20})
    result.costs[1] = Costs(10.0, 10.0 * token_share, {"own": c * 10.0})
    return result


def choose(alpha, c=0.2, batch=1, token_share=0.02, is_greedy=True):
    return controller(c, token_share).choose({"own": settled(alpha)}, K, batch, is_greedy)


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
    own = controller(c)
    record = settled(alpha)
    alphas = record.alphas(K)
    plain = own.measured(1).verify(1)

    def speedup(k):
        expected = 1 + sum(
            product for product in itertools.accumulate(alphas[:k], lambda x, y: x * y)
        )
        return expected * plain / (k * c * 10 + own.measured(1).verify(k + 1))

    best = max(range(K + 1), key=speedup)
    decision = own.choose({"own": record}, K, 1, True)
    assert decision.num_tokens == best or speedup(best) < 1.01
    assert decision.expected_speedup == pytest.approx(max(speedup(k) for k in range(1, K + 1)))


def test_without_drafts_it_probes_now_and_then_and_comes_back():
    own, record = controller(), settled(0.0)
    asked = []
    for _ in range(300):
        decision = own.choose({"own": record}, K, 1, True)
        asked.append(decision.num_tokens)
        record.observe(decision.num_tokens, 0)
    assert max(asked) == 1
    # A probe costs so much of a pass; together they may cost a fiftieth of the time.
    assert 0.01 * 300 < sum(asked) * decision.break_even < 0.021 * 300
    for _ in range(100):  # now the text has become easy
        decision = own.choose({"own": record}, K, 1, True)
        record.observe(decision.num_tokens, decision.num_tokens)
    assert decision.num_tokens >= 5 and not decision.is_probe


def test_batches_of_other_sizes_have_costs_of_their_own():
    """Eight at once were found to cost more per token; one alone goes on as before."""
    own = controller(c=0.05)
    alone = own.choose({"own": settled(0.8)}, K, 1, True)
    eight = own.measured(8)
    eight.pass_ms, eight.token_ms, eight.draft_ms["own"] = 1.0, 5.0, 2.0
    assert own.choose({"own": settled(0.8)}, K, 9, True).num_tokens < alone.num_tokens
    assert own.choose({"own": settled(0.8)}, K, 2, True).num_tokens > 0
    assert own.choose({"own": settled(0.8)}, K, 1, True) == alone


def test_steps_that_are_taken_for_others_are_free():
    own = controller(c=0.6)
    record = {"own": settled(0.8)}
    alone = own.choose(record, K, 4, True)
    beside = own.choose(record, K, 4, True, num_paid_steps=K)
    assert 0 < alone.num_tokens < beside.num_tokens
    assert own.choose(record, K, 4, False, K) == own.choose(record, K, 4, False)


def test_it_says_why():
    assert str(choose(0.95)).startswith("own, K=")
    assert "expected" in str(choose(0.95)) and "α " in str(choose(0.95))
    poor = choose(0.05)
    assert "K=0 is faster here" in str(poor) and "< break-even" in str(poor)
    assert poor.alpha < poor.break_even == pytest.approx(0.2 + 0.2 / 10.2, abs=0.01)
    assert poor.as_dict()["says"] == str(poor)


def test_the_fit_finds_what_a_pass_and_a_token_cost():
    costs = Costs()
    for i in range(400):
        tokens = (1, 6, 8, 48)[i % 4]
        costs.observe_pass(tokens, 4.0 + 0.1 * tokens + (30 if i % 150 == 149 else 0))
    assert costs.pass_ms == pytest.approx(4.0, rel=0.1)
    assert costs.token_ms == pytest.approx(0.1, rel=0.3)


def test_a_pass_that_has_become_slower_for_good_is_noticed():
    costs = Costs()
    for _ in range(50):
        costs.observe_pass(1, 1.0)
    for _ in range(300):
        costs.observe_pass(1, 8.0)
    assert costs.verify(1) > 7


def test_passes_of_one_size_leave_a_sane_slope():
    costs = Costs()
    for _ in range(50):
        costs.observe_pass(1, 5.0)
    assert costs.verify(1) == pytest.approx(5.0) and 0 <= costs.token_ms < 0.5


def test_a_drafter_that_becomes_slower_is_noticed():
    costs = Costs(10.0, 0.1, {"own": 1.0})
    costs.observe_draft("own", 5, 500.0)
    assert costs.draft_ms["own"] < 2  # once is an accident
    for _ in range(100):
        costs.observe_draft("own", 5, 500.0)
    assert costs.draft_ms["own"] > 50


def test_sampled_requests_are_decided_without_the_clock(demo_engine):
    """Whatever was measured, and whoever runs beside it."""
    slow, fast = controller(c=5.0), controller(c=0.0)
    for alpha in (0.2, 0.5, 0.8):
        choices = {
            own.choose({"own": settled(alpha)}, K, batch, False).num_tokens
            for own in (slow, fast)
            for batch in (1, 8)
        }
        assert len(choices) == 1
    assert slow.choose({"own": settled(0.8)}, K, 1, True).num_tokens == 0


@pytest.fixture(scope="module")
def adaptive():
    """The embedded models with the controller on."""
    return core.load_engine(core.Options())


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "mtp", "auto"])
@pytest.mark.parametrize("name", ["code_class", "hard_story", "repetitive_letters"])
def test_whatever_it_chooses_greedy_output_is_plain_decoding(
    adaptive, prompts, plain, name, drafter
):
    sequence, events = run(adaptive, prompts[name], max_tokens=48, drafter=drafter, trace=True)
    assert sequence.output == plain(prompts[name], 48)
    assert sequence.warnings == [] and sequence.decision is not None
    assert all(len(event["proposals"]) <= 5 for event in events)
    assert "controller" in events[1]


def test_the_same_seed_gives_the_same_output_whatever_costs_were_measured(adaptive, prompts):
    sampling = core.Sampling(temperature=1.0, top_p=0.95)
    outputs = []
    for costs in (Costs(10.0, 0.1, {"mtp": 0.0}), Costs(1.0, 0.9, {"mtp": 50.0})):
        adaptive.controller.costs = {1: costs}
        for drafter in ("mtp", "auto", "draft_model"):
            sequence, _ = run(
                adaptive, prompts["hard_docs"], max_tokens=40, drafter=drafter,
                sampling=sampling, seed=3,
            )  # fmt: skip
            outputs.append((drafter, sequence.output, sequence.statistics.drafted_at))
    assert outputs[:3] == outputs[3:]


def test_a_sampled_request_drafts_as_much_in_a_batch_as_alone(demo_engine, prompts):
    """Where drafts do not pay and are probed: a batch must not change when that is."""
    drafter = ScriptedDrafter(lambda tokens, n: [0] * n)
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, "scripted")
    engine.controller = Controller(100, {"scripted": 30})
    prompt, sampling = prompts["repetitive_letters"], core.Sampling(temperature=1.0)
    wanted = core.Request(prompt, 90, "scripted", sampling=sampling, seed=5)
    *_, (alone, _) = engine.generate(wanted)
    assert 3 < alone.statistics.num_spec_steps < 30
    others = [core.Request(p, 60, "scripted") for p in list(prompts.values())[:7]]
    sequences = [engine.open(request) for request in (wanted, *others)]
    while running := [s for s in sequences if not s.finish_reason]:
        engine.step(running)
    for sequence in sequences:
        engine.close(sequence)
    assert sequences[0].output == alone.output
    assert sequences[0].statistics.drafted_at == alone.statistics.drafted_at


def test_a_drafter_that_is_never_right_is_soon_left_alone(demo_engine, prompts):
    """The cost of finding out: a few drafts, then probes."""
    drafter = ScriptedDrafter(lambda tokens, n: [0] * n)
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, "scripted")
    engine.controller = Controller(100, {"scripted": 30})
    sequence, _ = run(
        engine, prompts["hard_docs"], max_tokens=100, drafter="scripted",
        sampling=core.Sampling(temperature=1.0),
    )  # fmt: skip
    statistics = sequence.statistics
    assert statistics.target_passes > 80 and statistics.num_spec_steps < 15
    assert "K=0 is faster here: scripted" in str(sequence.decision)
    assert engine.decisions["scripted"] is sequence.decision


def test_among_several_one_that_often_has_nothing_to_propose_is_passed_over():
    own = Controller(100, {"silent": 0, "steady": 20})
    records = {"silent": Acceptance(), "steady": settled(0.8)}
    assert own.choose(records, K, 1, False).drafter == "silent"
    for _ in range(20):
        records["silent"].observe(0, 0, asked=K)
    assert own.choose(records, K, 1, False).drafter == "steady"
    only = {"silent": records["silent"]}  # alone it is asked on: an empty draft costs nothing
    assert own.choose(only, K, 1, False).num_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_costs_nothing_is_judged_by_what_came(demo_engine, prompts, temperature):
    """Each cycle's own tokens against the guess; a silent model always drafts."""

    class Silent(ScriptedDrafter):
        name = "silent"

    ngram = demo_engine.drafters["ngram"]
    auto = AutoDrafter({"silent": Silent(lambda tokens, n: []), "ngram": ngram})
    engine = core.Engine(demo_engine.target, {"auto": auto}, "auto")
    engine.controller = Controller(100, {"silent": 0, "ngram": 0})
    choose = engine.controller.choose

    def silent_first(records, *others):
        return choose({"silent": records["silent"]}, *others)

    engine.controller.choose = silent_first
    prompt = prompts["repetitive_sentence"]
    sampling = core.Sampling(temperature=temperature)
    sequence, _ = run(engine, prompt, max_tokens=30, drafter="auto", sampling=sampling, seed=1)
    expected, tokens = Acceptance(), list(prompt)
    for token in sequence.output:
        index = ngram.open(tokens, sampling, None)
        guess = index.continuation(1)
        expected.observe(len(guess), int(guess == [token]), 1)
        tokens.append(token)
    assert sequence.records["ngram"] == expected and expected.cycles > 20
    assert sequence.records["silent"].cycles == 0
    assert auto.guess(auto.open(prompt, sampling, sequence.rng), "silent", 3) is None


def test_a_guess_that_fails_costs_the_drafter_and_not_the_answer(demo_engine, prompts, plain):
    class Broken(ScriptedDrafter):
        def guess(self, state, name, max_tokens):
            raise RuntimeError("no idea")

    drafter = Broken(lambda tokens, n: [0] * n)
    engine = core.Engine(demo_engine.target, {"scripted": drafter}, "scripted")
    engine.controller = Controller(100, {"scripted": 900})
    sequence, _ = run(engine, prompts["hard_docs"], max_tokens=20, drafter="scripted")
    assert sequence.output == plain(prompts["hard_docs"], 20)
    assert "no idea" in sequence.warnings[0] and drafter.num_open == 0


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
        demo_engine.target, {"auto": AutoDrafter({"wrong": bad, "right": good})}, "auto"
    )
    engine.controller = Controller(100, {"right": 1, "wrong": 1})
    sequence, _ = run(engine, prompt, max_tokens=60, drafter="auto")
    assert sequence.output == expected
    assert sequence.decision.drafter == "right"
    assert sequence.statistics.tokens_per_pass > 3
    assert (good.num_open, bad.num_open) == (0, 0)


@pytest.mark.parametrize("first", ["ngram", "draft_model", "mtp"])
def test_who_was_passed_over_proposes_as_if_it_had_been_there(demo_engine, prompts, first):
    """Each of several drafters proposes in turn; each does what one that saw all of it does."""
    loaded = {n: demo_engine.drafters[n] for n in ("ngram", "draft_model", "mtp")}
    auto, chosen = AutoDrafter(loaded), itertools.cycle(["draft_model", first, "ngram", "mtp"])
    engine = core.Engine(demo_engine.target, {"auto": auto}, "auto")
    propose = auto.propose_batch

    def in_turn(states, limits):
        for state in states:
            auto.select(state, next(chosen))
        drafts = propose(states, limits)
        (state,), (draft,) = states, drafts
        drafter = loaded[state.chosen]
        if state.chosen != "mtp":  # whose hidden states a fresh state would have to be given
            text = list(state.states["draft_model"].tokens)
            fresh = drafter.open(text, core.Sampling(), core.generator(0))
            assert drafter.propose(fresh, limits[0]).tokens == draft.tokens
            drafter.close(fresh)
        return drafts

    auto.propose_batch = in_turn
    sequence, events = run(engine, prompts["code_class"], max_tokens=50, drafter="auto")
    assert sequence.warnings == [] and len(events) > 8
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
        engine.step(running)
    for sequence in sequences:
        engine.close(sequence)
    assert [bool(s.warnings) for s in sequences] == [False, True, False]
    assert sequences[0].statistics.num_draft_tokens > 20
    assert engine.num_drafter_failures == 1


@pytest.mark.parametrize("name", ["draft_model", "mtp"])
def test_a_fault_in_a_batch_of_model_drafts_leaves_the_others_as_if_alone(prompts, name):
    """Neither their caches nor their random numbers keep anything of the draft that failed."""
    engine = core.load_engine(core.Options(fixed_k=True))
    drafter, guilty = engine.drafters[name], prompts["hard_story"]
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
        engine.step(running)
    for sequence in sequences:
        engine.close(sequence)
    assert [bool(s.warnings) for s in sequences] == [False, True]
    assert sequences[0].output == alone.output
    assert sequences[0].statistics.drafted_at == alone.statistics.drafted_at


def test_all_of_several_drafters_are_closed_also_where_one_raises():
    class Bad(ScriptedDrafter):
        name = "bad"

        def close(self, state):
            raise RuntimeError("no")

    good = ScriptedDrafter(lambda tokens, n: [])
    auto = AutoDrafter({"good": good, "bad": Bad(lambda tokens, n: [])})
    state = auto.open([1, 2], core.Sampling(), core.generator(0))
    assert good.num_open == 1
    with pytest.raises(RuntimeError, match="no"):
        auto.close(state)
    assert good.num_open == 0


def test_a_probe_stays_a_probe_beside_others_that_draft():
    own, record = controller(), Acceptance()
    for _ in range(12):
        record.observe(5, 0)
    for _ in range(20):
        record.observe(0, 0)
    assert own.choose({"own": record}, K, 4, True).is_probe


def test_in_a_batch_one_model_drafts_for_all_who_may_choose(demo_engine, prompts, plain):
    """Whatever each of them would rather have; n-gram, which takes no steps, may go along."""
    engine = core.load_engine(core.Options(max_running=6))
    engine.controller.measured = lambda batch: Costs()  # no clock: by the sizes of the weights
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
        engine.step(running)
        chosen = {s.decision.drafter for s in drafting}
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

    auto = AutoDrafter(
        {"ngram": demo_engine.drafters["ngram"], "steady": Steady(lambda tokens, n: [5] * n)}
    )
    engine = core.Engine(demo_engine.target, {"auto": auto}, "auto")
    engine.controller = Controller(100, {"ngram": 0, "steady": 20})
    engine.controller.measured = lambda batch: Costs()
    for prompt, expected in (([1, 2, 3, 4], "steady"), ([1, 2, 1, 2, 1, 2], "ngram")):
        s = engine.open(core.Request(prompt, 8, "auto"))
        engine.step([s])
        s.state.states["ngram"] = (
            engine.drafters["auto"]._drafters["ngram"].open(prompt, core.Sampling(), s.rng)
        )
        s.records = {"ngram": Acceptance(), "steady": Acceptance()}
        engine.step([s])
        assert s.decision.drafter == expected
        engine.close(s)


def test_a_first_measurement_far_above_does_not_end_drafting():
    """The first call may have to set things up; who never drafts again is never measured again."""
    costs = Costs(10.0, 0.2)
    costs.observe_draft("own", 1, 500.0, share=0.2)
    assert costs.draft_ms["own"] == pytest.approx(3 * 0.2 * 10.2)
    costs.observe_draft("unknown", 1, 500.0)
    assert costs.draft_ms["unknown"] == 500.0


def test_who_is_passed_over_is_tried_again_now_and_then():
    own = Controller(100, {"free": 0, "model": 30})
    records = {"free": settled(0.4), "model": settled(0.0)}
    asked = []
    for _ in range(200):
        decision = own.choose(records, K, 1, False)
        asked.append(decision.drafter)
        for name, record in records.items():
            drafted = decision.num_tokens if name == decision.drafter else 0
            record.observe(drafted, int(name == "free" and drafted > 0))
    assert 2 <= asked.count("model") <= 12
