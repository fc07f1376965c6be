"""Sampling is lossless: what is emitted is distributed as the target alone would have it.

Chi-squared tests here fail when their p-value is below 1e-6. Seeds are fixed, so a run that passed
passes again; the odds that a correct change of the code which draws other numbers makes one of the
100 or so tests fail are 1 in 10 000. The tests at the end break the code on purpose and must fail.
"""

import inspect
import itertools
import math
import textwrap
from dataclasses import replace

import pytest
import speculative_decoding as core
import torch
from conftest import judge, run

from benchmarks.lossless import (
    BATCH,
    PROMPT,
    SAMPLINGS,
    K,
    chi_squared,
    compare,
    first_tokens,
)
from benchmarks.sampling import processors
from drafters.noise import DRAW, Noise
from drafters.small_model import SmallModelDrafter
from fastpath.sampling import largest, truncated_softmax

ODDS = 1e-6
Sampling = core.Sampling

# ------------------------------------------------------------------ transforms, as transformers'


def reference(logits, sampling, text, draft):
    """transformers' processors, position by position: [n + 1, V] probabilities in float64."""
    rows = [
        processors(sampling)(torch.tensor([text + draft[:i]]), logits[i : i + 1].double())
        for i in range(len(draft) + 1)
    ]
    return torch.cat(rows).softmax(-1)


def assert_same_probabilities(ours, theirs):
    """Which of equal logits stays at the border of top-p is arbitrary: compare what has weight."""
    ours, theirs = (x.sort(-1, descending=True).values for x in (ours.double(), theirs))
    seen = 1e-35  # below, float32 has no numbers
    assert torch.equal((ours > seen).sum(-1), (theirs > seen).sum(-1))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # bf16 has equal logits
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_transforms_alone_and_together_are_those_of_transformers(temperature, penalty, dtype):
    torch.manual_seed(0)
    text, draft = [3, 5, 8, 3], [5, 9, 9, 11, 3]
    for vocab, spread in itertools.product((13, 1000), (0.2, 2.0, 9.0)):
        logits = (torch.randn(6, vocab) * spread).to(dtype).float()
        for k, p, m in itertools.product((0, 1, 5, 40), (1.0, 0.95, 0.4), (0.0, 0.1)):
            sampling = Sampling(penalty, temperature, k, p, m)
            ours = core.probabilities(core.penalise(logits, penalty, text, draft), sampling)
            assert_same_probabilities(ours, reference(logits, sampling, text, draft))


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("cuts", [(50, 1, 0), (50, 0.9, 0), (0, 0.9, 0), (0, 0.9, 0.02)], ids=str)
def test_a_large_vocabulary_is_cut_as_transformers_cuts_it(cuts, spread):
    """Flat distributions leave the fast path: their nucleus has up to 140 000 tokens."""
    torch.manual_seed(1)
    logits = torch.randn(2, 151_936) * spread
    theirs = reference(logits, Sampling(1.0, 1.0, *cuts), [1], [2])
    ours = truncated_softmax(logits, 1.0, *cuts)
    differing = ((ours > 0) != (theirs > 0)).sum(-1)
    assert differing.max() <= 1  # one token at the border of a sum of 140 000 float32 values
    torch.testing.assert_close(ours.double().sum(-1), torch.ones(2).double(), rtol=1e-5, atol=0)
    assert (ours - theirs).abs().max() < 1e-5


def test_the_largest_are_found_in_chunks():
    torch.manual_seed(2)
    for vocab, count in [(4096, 10), (4096, 64), (100, 7), (64 * 500, 100)]:
        values = torch.randn(vocab).bfloat16().float()  # with ties
        found, ids = largest(values, count)
        assert torch.equal(found, values.topk(count).values)
        assert torch.equal(values[ids], found)
        assert len(set(ids.tolist())) == count


def test_a_low_temperature_is_no_greedy_choice():
    p = core.probabilities(torch.tensor([[1.0, 1.01]]), Sampling(temperature=0.04))
    assert p[0, 0] == pytest.approx(1 / (1 + math.exp(0.25)), abs=1e-5)


def test_logits_that_are_no_numbers_are_an_error_and_no_token():
    broken = torch.full((2, 300), math.nan)
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)):
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            core.verify(core.Draft([3]), core.own_choices(broken, sampling, Noise(0), 0))
        if not sampling.is_greedy:
            p = core.probabilities(broken, sampling)
            with pytest.raises(ValueError, match="no probabilities to draw from"):
                core.verify_by_rejection(core.Draft([3]), p, Noise(0), 0)


def test_greedy_is_one_hot_and_a_tiny_temperature_does_not_overflow():
    scores = torch.tensor([[1.0, 4.0, 3.999]])
    one_hot = [[0.0, 1.0, 0.0]]
    for temperature in (0.0, 1e-300, 1e-7, 1e-5):
        assert (
            core.probabilities(scores * 1e4, Sampling(temperature=temperature)).tolist() == one_hot
        )


# ------------------------------------------- the rule of rejection, on distributions of our own


def grid(vocab, step=4):
    """Every distribution over `vocab` tokens in quarters."""
    for parts in itertools.product(range(step + 1), repeat=vocab):
        if sum(parts) == step:
            yield torch.tensor(parts) / step


def emitted_by_enumeration(p, q):
    """The distribution of the first token that verify emits, with no chance in it.

    All probabilities are quarters, so every border that u is compared with lies between the twelve
    values that u goes through, and counting over them is exact.
    """
    us = [(i + 0.5) / 12 for i in range(12)]
    emitted = torch.zeros_like(p, dtype=torch.float64)
    rows = torch.stack([p, p])
    for token, chance in enumerate(q.tolist()):
        if not chance:
            continue  # never drafted
        draft = core.Draft([token], None if chance == 1 else q[None])
        for u in us:
            for last_u in us:
                judged = judge(draft, rows, [u, last_u])
                first = next(j for j in judged if j.kind != "rejected")
                if first.kind == "accepted":  # whatever last_u
                    emitted[first.id] += chance / 12
                    break
                emitted[first.id] += chance / 144
    return emitted


def check_every_small_distribution(vocab=3):
    for p, q in itertools.product(grid(vocab), repeat=2):
        emitted = emitted_by_enumeration(p, q)
        torch.testing.assert_close(emitted, p.double(), rtol=0, atol=1e-9, msg=f"p {p}, q {q}")


def test_verify_emits_exactly_p_for_every_small_p_and_q():
    check_every_small_distribution(2)
    check_every_small_distribution(3)


DRAFTED = {  # rows of p (the last one is the bonus's) and of q
    "model q": ([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4],
                [[0.4, 0.3, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2]]),
    "one-hot q": ([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4],
                  [[0, 0, 1, 0], [1, 0, 0, 0]]),
    "q = p": ([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4],
              [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]),
    "disjoint": ([[0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7], [0.25] * 4],
                 [[0, 0, 0.5, 0.5], [0.6, 0.4, 0, 0]]),
    "q with zeros": ([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4],
                     [[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]]),
}  # fmt: skip


def check_verify_by_chance(case, num_samples=4000):
    """Chi-squared of each position's emitted tokens against p; returns the smallest p-value."""
    p, q = (torch.tensor(rows) for rows in DRAFTED[case])
    counts = torch.zeros(3, 4)
    one_hot = case == "one-hot q"
    for seed in range(num_samples):
        noise = Noise(seed)
        tokens = [core.draw(row, noise.uniform(i, DRAW)) for i, row in enumerate(q)]
        draft = core.Draft(tokens, None if one_hot else q)
        judged = core.verify_by_rejection(draft, p, noise, 0)
        for i, j in enumerate(j for j in judged if j.kind != "rejected"):
            counts[i, j.id] += 1
    results = []
    for seen, expected in zip(counts, p, strict=True):
        possible = expected > 0
        if seen[~possible].sum():
            return 0.0  # a token was emitted that p excludes
        if seen.sum():
            expected = expected[possible] * seen.sum()
            results.append(chi_squared(seen[possible].tolist(), expected.tolist()).p_value)
    return min(results)


@pytest.mark.parametrize("case", DRAFTED)
def test_verify_keeps_the_target_distribution(case):
    """Three positions each: odds of a false alarm 3e-6."""
    assert check_verify_by_chance(case) > ODDS


def test_q_equal_to_p_is_always_accepted_and_disjoint_q_never():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2)
    for token in range(4):
        draft = core.Draft([token], p[:1].clone())
        kinds = [j.kind for j in core.verify_by_rejection(draft, p, Noise(token), 0)]
        assert kinds == ["accepted", "bonus"]
    p = torch.tensor([[0.5, 0.5, 0, 0]] * 2)
    q = torch.tensor([[0, 0, 0.5, 0.5]])
    for token in (2, 3):
        draft = core.Draft([token], q)
        rejected, recovered = core.verify_by_rejection(draft, p, Noise(token), 0)
        assert rejected.kind == "rejected" and recovered.kind == "recovered"
        assert recovered.id in (0, 1) and (recovered.p, recovered.q) == (0.5, 0.0)


def test_a_residual_of_nothing_falls_back_to_p():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(core.residual(p, p), p)
    assert torch.equal(core.residual(p, p + 1e-9), p)


def test_a_token_without_weight_is_never_drawn():
    weights = torch.tensor([0.0, 0.3, 0.0, 0.1, 0.0])
    for u in (0.0, 0.7499, 0.7501, 1 - 2**-53):
        assert core.draw(weights, u) == (1 if u < 0.75 else 3)
    big = torch.rand(151_936)
    big[-1000:] = 0
    assert core.draw(big, 1 - 2**-53) < len(big) - 1000


def test_judgements_tell_what_decided():
    p = torch.tensor([[0.1, 0.9], [0.6, 0.4], [0.5, 0.5]])
    q = torch.tensor([[0.2, 0.8], [0.1, 0.9]])
    for seed in range(50):
        for j in core.verify_by_rejection(core.Draft([0, 1], q), p, Noise(seed), 0):
            assert 0 <= j.u < 1
            if j.kind == "accepted":
                assert j.u < j.p / j.q
            elif j.kind == "rejected":
                assert j.u >= j.p / j.q
            elif j.kind == "bonus":
                assert j.q is None and j.p == 0.5
            else:
                assert j.p > j.q


# ----------------------------------------------------------------- end to end, on the demo models

NUM_SAMPLES = 256
DRAFTERS = ("ngram", "draft_model", "mtp")


@pytest.fixture(scope="module")
def many():
    """The embedded models with a short cache of many rows: samples come in batches."""
    return core.load_engine(core.Options(max_running=BATCH, max_model_len=32, fixed_k=True))


@pytest.fixture(scope="module")
def prompt(many):
    return many.target.tokenizer(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def plain_samples(many, prompt):
    """First tokens by plain decoding, remembered by sampling."""
    known = {}

    def samples(name):
        if name not in known:
            request = core.Request(prompt, 12, None, sampling=SAMPLINGS[name], seed=10**6)
            known[name] = first_tokens(many, request, 3 * NUM_SAMPLES)
        return known[name]

    return samples


def smallest_p_value(engine, prompt, drafter, name, theirs, num_samples=NUM_SAMPLES):
    sampling = replace(SAMPLINGS[name], verification="rejection")
    request = core.Request(prompt, 12, drafter, K, sampling=sampling, seed=7 * 10**6)
    ours = first_tokens(engine, request, num_samples)
    return min(test.p_value for test in compare(ours, theirs).values())


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_speculation_keeps_the_distribution_of_the_first_tokens(
    many, prompt, plain_samples, name, drafter
):
    """Three views (2nd, 3rd, all three tokens): odds of a false alarm 3e-6."""
    assert smallest_p_value(many, prompt, drafter, name, plain_samples(name)) > ODDS


def test_plain_sampling_is_that_of_transformers_generate(demo_reference, prompt, plain_samples):
    """An oracle that shares no code with ours; odds of a false alarm 3e-6."""
    sampling = SAMPLINGS["all of them"]
    torch.manual_seed(11)
    ids = torch.tensor([prompt])
    output = demo_reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=3,
        do_sample=True,
        num_return_sequences=3 * NUM_SAMPLES,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
    )
    theirs = [tuple(row) for row in output[:, len(prompt) :].tolist()]
    tests = compare(plain_samples("all of them"), theirs)
    assert min(test.p_value for test in tests.values()) > ODDS


def likely_texts(model, prompt, sampling, length, least):
    """Texts of `length` tokens that have a chance of at least `least`, and this chance, exactly."""
    texts = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([[*prompt, *text] for text in texts])
        with torch.inference_mode():
            logits = model(ids).logits[:, -1].double()
        rows = processors(sampling)(ids, logits).softmax(-1)
        texts = {
            (*text, token): before * float(p[token])
            for (text, before), p in zip(texts.items(), rows, strict=True)
            for token in (before * p >= least).nonzero()[:, 0].tolist()
        }
    return texts


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_sampling_follows_the_exact_distribution(demo_reference, prompt, plain_samples, name):
    """One, two and three tokens jointly, against transformers' model and processors."""
    samples, num_cells = plain_samples(name), 0
    for length in (1, 2, 3):
        beginnings = [text[:length] for text in samples]
        least = 5 / len(samples)
        expected = likely_texts(demo_reference, prompt, SAMPLINGS[name], length, least)
        counts = [beginnings.count(text) for text in expected]
        chances = list(expected.values())
        counts.append(len(samples) - sum(counts))
        chances.append(max(1 - sum(chances), 1e-9))
        assert chi_squared(counts, [len(samples) * p for p in chances]).p_value > ODDS
        num_cells += len(expected)
    assert num_cells > 10


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_same_seeds_give_plain_decoding_s_texts(many, prompt, plain_samples, name, drafter):
    request = core.Request(prompt, 12, drafter, K, sampling=SAMPLINGS[name], seed=10**6)
    ours = first_tokens(many, request, NUM_SAMPLES)
    theirs = first_tokens(many, replace(request, drafter=None), NUM_SAMPLES)
    assert ours == theirs


def deviation_from_overlap(engine, prompts, drafter, seeds=1):
    """Accepted tokens less those that Σ min(p, q) predicts, in standard deviations.

    p and q are teacher-forced along each output, by forwards of the whole text without cache,
    drafter or verify; only the head's q are those that it handed over, as they come of its own
    recursion. Step by step the difference has mean 0 whatever was accepted before, so its variance
    is the sum of the steps'.
    """
    handed = []
    propose = engine.panel.drafters["mtp"].propose_batch
    engine.panel.drafters["mtp"].propose_batch = lambda *given: (
        handed.append(propose(*given)) or handed[-1]
    )
    sampling = Sampling(temperature=1.0, top_p=0.95, verification="rejection")
    target, small = engine.target.model, engine.panel.drafters["draft_model"]._draft.model
    expected = variance = accepted = 0.0
    for seed, prompt in enumerate([*prompts.values()] * seeds):
        sequence, events = run(
            engine, prompt, max_tokens=48, drafter=drafter, num_speculative_tokens=3,
            sampling=sampling, seed=seed,
        )  # fmt: skip
        with torch.inference_mode():
            ids = torch.tensor([sequence.tokens])
            p, q = (core.probabilities(m(ids).logits[0].float(), sampling) for m in (target, small))
        position = len(prompt) - 1  # whose logits choose the next token
        for event in events:
            if drafter == "mtp" and event["proposals"]:
                (draft,) = handed.pop(0)
                q = torch.cat([torch.zeros(position, q.shape[-1]), draft.probs])
            judged = event["tokens"][: event["accepted_count"]]
            judged += [event["rejected"]] if event["rejected"] else []
            for at, token in enumerate(judged, position):
                if drafter == "ngram":
                    overlap = float(p[at, token["id"]])
                else:
                    overlap = float(torch.minimum(p[at], q[at]).sum())
                expected += overlap
                variance += overlap * (1 - overlap)
            accepted += event["accepted_count"]
            position += event["emitted_count"]
    assert accepted > 100 and variance > 5 and not handed
    engine.panel.drafters["mtp"].propose_batch = propose
    return (accepted - expected) / variance**0.5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_overlap_of_p_and_q_predicts_the_acceptance_rate(demo_engine, prompts, drafter):
    """Beyond 4.9 standard deviations it would be a false alarm in 1 of 1e6 runs."""
    assert abs(deviation_from_overlap(demo_engine, prompts, drafter)) < 4.9


# ----------------------------------------------------------- tests of the tests: broken on purpose


def broken(name, old, new):
    """The core's function `name` with one piece of its source replaced."""
    source = textwrap.dedent(inspect.getsource(getattr(core, name)))
    assert source.count(old) == 1, f"{old!r} is not in {name} once"
    found = {}
    exec(source.replace(old, new), vars(core), found)  # noqa: S102
    return name, found[name]


FAULTS = {
    "accepts always": ("verify_by_rejection", "not u * q_here < p_here", "False"),
    "residual not renormalised": ("draw", "u * total", "u"),
    "recovers from p": ("residual", "(p - q)", "p.clone()"),
    "q at another temperature": (
        "sample",
        "draw(q, noise.uniform(len(text), DRAW)), q",
        "draw(q, noise.uniform(len(text), DRAW)), probabilities(scores * 0.25, sampling)[0]",
    ),
}


@pytest.fixture
def break_core(monkeypatch):
    return lambda fault: monkeypatch.setattr(core, *broken(*FAULTS[fault]))


@pytest.mark.parametrize("fault", [f for f in FAULTS if FAULTS[f][0] != "sample"])
def test_the_tests_of_verify_notice(break_core, fault):
    break_core(fault)
    assert min(map(check_verify_by_chance, ["model q", "disjoint", "q with zeros"])) < ODDS
    with pytest.raises(AssertionError):
        check_every_small_distribution(3)


def test_the_test_of_verify_notices_a_q_of_another_temperature(monkeypatch):
    """Drafts are drawn from q, and verify is told that they were drawn from √q, renormalised."""
    p, q = DRAFTED["model q"]
    told = torch.tensor(q).sqrt()
    verify = core.verify_by_rejection
    monkeypatch.setattr(
        core,
        "verify_by_rejection",
        lambda draft, *given: verify(
            core.Draft(draft.tokens, told / told.sum(-1, keepdim=True)), *given
        ),
    )
    assert check_verify_by_chance("model q") < ODDS


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_test_from_end_to_end_notices(break_core, prompt, plain_samples, fault, drafter):
    if drafter == "ngram" and fault == "q at another temperature":
        pytest.skip("n-gram's q is one-hot at every temperature")
    theirs = plain_samples("temperature 0.7")
    break_core(fault)
    engine = core.load_engine(core.Options(max_running=BATCH, max_model_len=32, fixed_k=True))
    p_value = smallest_p_value(
        engine, prompt, drafter, "temperature 0.7", theirs, num_samples=3 * NUM_SAMPLES
    )
    assert p_value < ODDS


@pytest.mark.parametrize("fault", ["accepts always", "q at another temperature"])
def test_the_test_of_the_overlap_notices(break_core, prompts, fault):
    break_core(fault)
    engine = core.load_engine(core.Options(fixed_k=True))
    assert abs(deviation_from_overlap(engine, prompts, "draft_model", seeds=3)) > 4.9


def test_exercise_4_a_greedy_draft_of_sampled_text_is_lossless_and_costs_acceptance(
    many, prompt, plain_samples
):
    """Nothing was drawn, so q is one-hot: accepted with p(d) in place of Σ min(p, q).

    Odds of a false alarm: 6e-6.
    """

    class GreedyDraft(SmallModelDrafter):
        def open(self, prompt, sampling, noise):
            return super().open(prompt, Sampling(), noise)

    drawing, greedy = many.drafters["draft_model"], GreedyDraft.__new__(GreedyDraft)
    vars(greedy).update(vars(drawing))
    rates = []
    for drafter in (drawing, greedy):
        engine = core.Engine(many.target, {"draft_model": drafter})
        name = "temperature 0.7"
        p_value = smallest_p_value(engine, prompt, "draft_model", name, plain_samples(name))
        assert p_value > ODDS
        rates.append(engine.totals.by_drafter["draft_model"].draft_acceptance_rate)
    assert rates[1] < rates[0] - 0.02
