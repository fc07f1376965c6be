"""Sampling is lossless: what is emitted is distributed as the target alone would have it.

The first test counts that exactly for all small p and q. Chi-squared tests fail when their p-value
is below 1e-6. Seeds are fixed, so a run that passed passes again; the odds that a correct change of
the code which draws other numbers makes one of the 50 or so tests fail are 1 in 20 000. mutants.txt
has faults that they notice.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import judge, needs_compiler
from transformers.generation import logits_process

from drafters.draft_model import DraftModelDrafter
from runtime.sampling import Noise, penalise, truncated_softmax
from runtime.values import Request
from server import core
from tools.lossless import PROMPT, SAMPLINGS, K, chi_squared, compare, first_tokens

ODDS = 1e-6
Sampling = core.Sampling

# ------------------------------------------- the rule of rejection, on distributions of our own


def emitted_by_enumeration(p, q):
    """The distribution of the first token that verify emits, and the chance that it is drafted.

    All probabilities are quarters, so every border that u is compared with lies between the twelve
    values that u goes through, and counting over them is exact.
    """
    us = [(i + 0.5) / 12 for i in range(12)]
    emitted, accepted = torch.zeros_like(p, dtype=torch.float64), 0.0

    def first(token, *numbers):
        draft = core.Draft([token], None if q[token] == 1 else q[None])
        return next(j for j in judge(draft, torch.stack([p, p]), numbers) if j.kind != "rejected")

    for token, chance in enumerate(q.tolist()):
        rest = [u for u in us if first(token, u, 0.5).kind != "accepted"] if chance else us
        emitted[token] += chance * (1 - len(rest) / 12)
        accepted += chance * (1 - len(rest) / 12)
        for last_u in us if chance and rest else ():
            emitted[first(token, rest[0], last_u).id] += chance * len(rest) / 144
    return emitted, accepted


def test_verify_emits_exactly_p_for_every_small_p_and_q():
    """All p and q in quarters, of at most 3 tokens. All is accepted that can be: Σ min(p, q)."""
    parts = itertools.product(range(5), repeat=3)
    grid = [torch.tensor(part) / 4 for part in parts if sum(part) == 4]
    for p, q in itertools.product(grid, repeat=2):
        emitted, accepted = emitted_by_enumeration(p, q)
        torch.testing.assert_close(emitted, p.double(), rtol=0, atol=1e-9, msg=f"p {p}, q {q}")
        assert accepted == pytest.approx(float(torch.minimum(p, q).sum()))


RISING, FIRST, EVEN = [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25] * 4
DRAFTED = {  # rows of p (the last one is the bonus's) and of q; all small ones are above
    "model q": ([RISING, FIRST, EVEN], [RISING[::-1], [0.3, 0.3, 0.2, 0.2]]),
    "one-hot q": ([RISING, FIRST, EVEN], [[0, 0, 1, 0], [1, 0, 0, 0]]),
}


@pytest.mark.parametrize("case", DRAFTED)
def test_verify_keeps_the_target_distribution(case):
    """Chi-squared of each of three positions' emitted tokens: odds of a false alarm 3e-6."""
    p, q = map(torch.tensor, DRAFTED[case])
    probs, counts = None if case == "one-hot q" else q, torch.zeros(3, 4)
    for seed in range(4000):
        noise = Noise(seed)
        tokens = [core.draw(row, noise.uniform(i, Noise.DRAW)) for i, row in enumerate(q)]
        judged = core.verify_by_rejection(core.Draft(tokens, probs), p, noise, 0)
        for i, j in enumerate(j for j in judged if j.kind != "rejected"):
            counts[i, j.id] += 1
    for seen, row in zip(counts, p, strict=True):
        assert not seen[row == 0].any()
        if seen.sum():
            expected = (row[row > 0] * seen.sum()).tolist()
            assert chi_squared(seen[row > 0].tolist(), expected).p_value > ODDS


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
    for number in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            core.draw(torch.tensor([number, 0.0]), 0.5)


@pytest.mark.parametrize("number", [math.nan, math.inf, None])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.7), Sampling(1.0, 1.0, 3, 0.9)])
def test_broken_logits_are_an_error_where_their_row_is_judged_and_only_there(sampling, number):
    """A NaN, an infinity or -inf everywhere; whatever is cut, by both rules.

    Where -inf stands everywhere behind an accepted token, that one may end the text.
    """
    scores, noise = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), Noise(0)
    choices = [core.choose(scores, sampling, noise, row, row) for row in range(4)]
    for at, num_right in itertools.product(range(4), repeat=2):
        broken = scores.clone()
        broken[at, slice(None) if number is None else 7] = number or -math.inf
        p = truncated_softmax(broken, 1.0, 0, 1.0, 0.0)
        draft = core.Draft([(choices[i] + (i >= num_right)) % 50 for i in range(3)])
        us = [0.0] * num_right + [0.999] * (4 - num_right)

        def coupled(draft=draft, scores=broken):
            return core.verify(draft, core.choices(draft, scores, sampling, noise, 0))[0]

        for rule in (coupled, partial(judge, draft, p, us)):
            if at > num_right or (at and number is None):
                judged = [j.kind for j in rule()]
                assert judged.count("accepted") == min(at, num_right)
                assert (judged[-1] == "accepted") == (at <= num_right)
            else:
                with pytest.raises(ValueError, match="no probabilities to draw from"):
                    rule()


# ------------------------------------------------------------------ transforms, as transformers'


def probabilities(logits, sampling, text=(), draft=()):
    """p [n + 1, V] by our transforms."""
    scores = penalise(logits, sampling, [*text], core.Draft([*draft]))
    return truncated_softmax(scores, *sampling.transforms)


def reference(logits, sampling, text, draft):
    """p [n + 1, V] in float64 by transformers' processors, in generate()'s order, row by row."""
    processors = logits_process.LogitsProcessorList([
        logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        logits_process.TemperatureLogitsWarper(sampling.temperature),
        logits_process.TopKLogitsWarper(sampling.top_k or logits.shape[-1]),
        logits_process.TopPLogitsWarper(sampling.top_p),
        logits_process.MinPLogitsWarper(sampling.min_p),
    ])  # fmt: skip
    texts = [torch.tensor([text + draft[:i]]) for i in range(len(draft) + 1)]
    return torch.cat([*map(processors, texts, logits[:, None].double())]).softmax(-1)


def assert_same_probabilities(ours, theirs):
    """Which of equal logits stays at the border of top-p is arbitrary: compare what has weight."""
    ours, theirs = (x.sort(-1, descending=True).values for x in (ours.double(), theirs))
    seen = 1e-35  # below, float32 has no numbers
    assert torch.equal((ours > seen).sum(-1), (theirs > seen).sum(-1))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # bf16 has equal logits
def test_transforms_alone_and_together_are_those_of_transformers(dtype):
    """Each cut with each other one; temperatures, penalties and spreads take turns."""
    torch.manual_seed(0)
    text, draft = [3, 5, 8, 3], [5, 9, 9, 11, 3]
    turns = itertools.cycle(itertools.product((0.3, 1.0, 1.7), (1.0, 1.3), (0.2, 2.0, 9.0)))
    cuts = itertools.product((0, 1, 5, 40), (1.0, 0.95, 0.4), (0.0, 0.1), (13, 1000), range(2))
    for k, p, m, vocab, _ in cuts:
        temperature, penalty, spread = next(turns)
        logits = (torch.randn(6, vocab) * spread).to(dtype).float()
        sampling = Sampling(penalty, temperature, k, p, m)
        ours = probabilities(logits, sampling, text, draft)
        assert_same_probabilities(ours, reference(logits, sampling, text, draft))


def test_a_low_temperature_is_no_greedy_choice_and_a_tiny_one_does_not_overflow():
    p = probabilities(torch.tensor([[1.0, 1.01]]), Sampling(temperature=0.04))
    assert p[0, 0] == pytest.approx(1 / (1 + math.exp(0.25)), abs=1e-5)
    scores = torch.tensor([[1.0, 4.0, 3.999]]) * 1e4
    assert probabilities(scores, Sampling(temperature=1e-5)).tolist() == [[0.0, 1.0, 0.0]]
    for temperature in (0.0, 1e-300, 1e-7, 1e-5):
        sampling = Sampling(temperature=temperature)
        assert core.choose(scores, sampling, Noise(0), 0) == 1


# ----------------------------------------------------------------- end to end, on the demo models

NUM_SAMPLES = 256
COUNTED = WARM, ALL = "temperature 0.7", "all of them"  # samplings whose tokens are counted


@pytest.fixture(scope="module")
def prompt(many):
    return many.target.tokenizer(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def plain_samples(many, prompt):
    """First tokens by plain decoding, by sampling."""
    requests = {n: Request(prompt, 12, None, sampling=SAMPLINGS[n], seed=7) for n in COUNTED}
    return {name: first_tokens(many, requests[name], 2 * NUM_SAMPLES) for name in COUNTED}


@pytest.mark.parametrize(("name", "drafter"), [
    (WARM, "draft_model"), (ALL, "mtp"), pytest.param(WARM, "ngram", marks=pytest.mark.slow),
    pytest.param(WARM, "mtp", marks=pytest.mark.slow),
    pytest.param(WARM, "self_int8", marks=[pytest.mark.slow, needs_compiler]),
])  # fmt: skip
def test_speculation_keeps_the_distribution_of_tokens(many, prompt, plain_samples, name, drafter):
    """Three views (2nd, 3rd, all three tokens): odds of a false alarm 3e-6."""
    sampling = replace(SAMPLINGS[name], verification="rejection")
    request = Request(prompt, 12, drafter, K, sampling=sampling, seed=7 * 10**6)
    tests = compare(first_tokens(many, request, NUM_SAMPLES), plain_samples[name])
    assert min(test.p_value for test in tests.values()) > ODDS


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_prediction_is_not_judged_by_the_noise_that_may_have_written_it(many, prompt, rule):
    """Under the rule of rejection: the numbers that chose its tokens would favour them again."""
    sampling = Sampling(temperature=1.0, verification=rule)
    request = Request(prompt, 3, "prediction", sampling=sampling, seed=7)
    sequences = [many.open(replace(request, prediction=words)) for words in ((), (5,), (5, 6))]
    for s in sequences:
        many.close(s)
    assert len({s.noise.seed for s in sequences}) == (3 if rule == "rejection" else 1)


def test_plain_sampling_is_that_of_transformers_generate(demo_reference, prompt, plain_samples):
    """An oracle that shares no code with ours; odds of a false alarm 3e-6."""
    ids = torch.tensor([prompt])
    known = "repetition_penalty", "temperature", "top_k", "top_p", "min_p"  # to transformers, too
    cuts = {field: getattr(SAMPLINGS[ALL], field) for field in known}
    torch.manual_seed(11)
    output = demo_reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True,
        num_return_sequences=NUM_SAMPLES, **cuts,
    )  # fmt: skip
    theirs = [tuple(row) for row in output[:, len(prompt) :].tolist()]
    assert min(test.p_value for test in compare(plain_samples[ALL], theirs).values()) > ODDS


def test_exercise_4_a_greedy_draft_costs_acceptance(many, prompt):
    """q is one-hot: d is accepted with p(d), not Σ min(p, q). (Such a q is lossless: see above.)"""

    class GreedyDraft(DraftModelDrafter):
        def open(self, prompt, sampling, noise):
            return super().open(prompt, Sampling(), noise)

    drawing, greedy = many.pool.drafters["draft_model"], GreedyDraft.__new__(GreedyDraft)
    vars(greedy).update(vars(drawing))
    sampling, rates = replace(SAMPLINGS[WARM], verification="rejection"), []
    for drafter in (drawing, greedy):
        engine = core.Engine(many.target, {"draft_model": drafter})
        request = Request(prompt, 12, "draft_model", K, sampling=sampling)
        first_tokens(engine, request, NUM_SAMPLES // 2)
        rates.append(engine.totals.by_drafter["draft_model"].draft_acceptance_rate)
    assert rates[1] < rates[0] - 0.02
