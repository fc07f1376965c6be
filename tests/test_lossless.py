"""Speculation changes nothing but the time: output equals plain decoding, greedy or sampled."""

import pytest
import speculative_decoding as core
import torch
from conftest import FAMILIES, TARGET, WAYS, run, scripted_engine

import demo
import drafters

DRAFTERS = ("ngram", "suffix", "draft_model", "mtp")
NAMES = tuple(demo.read_prompts())


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_equals_plain_decoding(demo_engine, prompts, plain, drafter, k, way):
    prompt = prompts[NAMES[3 * DRAFTERS.index(drafter) + k.bit_length() // 2]]
    given = {"max_tokens": 24, "drafter": drafter, "num_speculative_tokens": k}
    sequence, _ = run(demo_engine, prompt, **given, **way)
    assert sequence.output == plain(prompt, 24, **way) and sequence.seat.warnings == []


def greedy_text(model, prompt, max_tokens):
    """By transformers' generate."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["code_class", "hard_story", "repetitive_colours"])
def test_plain_decoding_equals_transformers_generate(demo_reference, prompts, plain, name):
    assert greedy_text(demo_reference, prompts[name], 24) == plain(prompts[name], 24)


FEW = ("gpt2", "gemma3_text")  # test_cache.py has the logits of all
REST = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in FEW]


@pytest.mark.parametrize("family", [*FEW, *REST])
def test_any_causal_model_is_lossless_with_every_fitting_drafter(family, tiny_folder, reference):
    folder, draft_model = tiny_folder(family), str(tiny_folder("llama:1"))
    given = {"model": str(folder), "draft_model": draft_model, "drafter": "ngram"}
    engine = core.load_engine(core.Options(**given, fixed_k=True))
    assert "mtp" not in engine.panel.drafters
    prompt, way = [5, 6, 7, 5, 6, 7, *range(20, 30), 5], WAYS["sampled"]
    expected = greedy_text(reference(folder), prompt, 20)
    sampled = core.plain_decode(engine.target, prompt, 20, engine.eos_ids, **way)
    for drafter in ("ngram", "draft_model"):
        assert run(engine, prompt, max_tokens=20, drafter=drafter)[0].output == expected
        assert run(engine, prompt, max_tokens=20, drafter=drafter, **way)[0].output == sampled


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_kv_cache_advances_by_what_was_emitted_not_by_what_was_proposed(
    demo_engine, prompts, drafter
):
    lengths = demo_engine.target.cache.lengths
    request = core.Request(prompts["easy_table"], 24, drafter, 4)
    cached, total = 0, len(request.prompt)
    for sequence, cycle in demo_engine.generate(request):
        total += cycle.num_kept
        assert lengths[sequence.row] == len(sequence.tokens) - 1 == total - 1
        if cycle.number:
            assert lengths[sequence.row] - cached == cycle.num_kept
        cached = lengths[sequence.row]


def test_a_perfect_drafter_is_accepted_entirely(demo_engine, prompts, way):
    """The target drafts for itself: every token of every draft is accepted."""
    itself = core.load_model(TARGET, core.Options())
    context = drafters.Context(demo_engine.target, core.sample, itself)
    loaded = {"draft_model": drafters.load("draft_model", context)}
    engine = core.Engine(demo_engine.target, loaded)
    sequence, _ = run(engine, prompts["hard_story"], max_tokens=31, drafter="draft_model", **way)
    statistics = sequence.statistics
    assert sequence.finish_reason == "length"
    assert statistics.target_passes == 5  # 1 token by prefill, then 6 a pass
    assert statistics.draft_acceptance_rate == 1.0 and statistics.num_recovered_tokens == 0


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 4, None])
def test_exactly_the_prefix_before_the_first_wrong_token_is_kept(
    demo_engine, prompts, plain, wrong_at, way
):
    """By a drafter that knows the right text; its drafts are wrong at `wrong_at`."""
    prompt = prompts["hard_story"]
    truth = plain(prompt, 20, **way)

    def script(tokens, limit):
        draft = truth[len(tokens) - len(prompt) :][:limit]
        if wrong_at is not None and len(draft) > wrong_at:
            draft[wrong_at] = (draft[wrong_at] + 1) % 4096
        return draft

    engine = scripted_engine(demo_engine, script)
    sequence, events = run(engine, prompt, max_tokens=20, drafter="scripted", **way)
    assert sequence.output == truth
    whole = [event for event in events if len(event["proposals"]) == 5]
    num_right, last = (5, "bonus") if wrong_at is None else (wrong_at, "recovered")
    for event in whole:
        assert event["accepted_count"] == num_right
        kinds = [token["kind"] for token in event["tokens"]]
        assert kinds == ["accepted"] * num_right + [last]
    assert len(whole) > 1


# Measured on the embedded models (K = 5, 64 tokens); the ranges leave room for another machine's
# rounding, not for a broken drafter.
EXPECTED_ACCEPTANCE = {
    ("ngram", "repetitive_colours"): (0.9, 1.0), ("ngram", "hard_story"): (0.0, 0.2),
    ("draft_model", "code_function"): (0.5, 0.85), ("mtp", "repetitive_letters"): (0.9, 1.0),
    ("mtp", "code_class"): (0.3, 0.7), ("mtp", "hard_story"): (0.55, 0.9),
}  # fmt: skip


@pytest.mark.parametrize(("drafter", "name"), EXPECTED_ACCEPTANCE)
def test_acceptance_is_in_the_expected_range(demo_engine, prompts, drafter, name):
    sequence, _ = run(demo_engine, prompts[name], max_tokens=64, drafter=drafter)
    low, high = EXPECTED_ACCEPTANCE[drafter, name]
    assert low <= sequence.statistics.draft_acceptance_rate <= high
