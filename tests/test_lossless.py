"""Speculation changes nothing but the time: output equals plain decoding, greedy or sampled."""

import pytest
import torch
from conftest import TARGET, assert_lossless, run, scripted_engine

import drafters
from server import core
from server.options import Options

DRAFTERS = ("ngram", "suffix", "draft_model", "mtp")


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_equals_plain_decoding(demo_engine, prompts, plain, drafter, k, way):
    prompt = list(prompts.values())[3 * DRAFTERS.index(drafter) + k.bit_length() // 2]
    fields = {"max_tokens": 24, "drafter": drafter, "num_speculative_tokens": k}
    sequence, _ = run(demo_engine, prompt, **fields, **way)
    assert sequence.output == plain(prompt, 24, **way) and sequence.warnings == []


@pytest.mark.parametrize("name", ["code_class", "hard_story", "repetitive_colours"])
def test_plain_decoding_equals_transformers_generate(demo_reference, prompts, plain, name):
    ids = torch.tensor([prompts[name]])
    mask = torch.ones_like(ids)
    texts = demo_reference.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert texts[0, ids.shape[1] :].tolist() == plain(prompts[name], 24)


def test_a_perfect_drafter_is_accepted_entirely(demo_engine, prompts, way):
    """The target drafts for itself: every token of every draft is accepted."""
    itself = core.load_model(TARGET, Options())
    context = drafters.Context(demo_engine.target, itself)
    engine = core.Engine(demo_engine.target, {"itself": drafters.load("draft_model", context)})
    sequence = assert_lossless(engine, prompts["hard_story"], 31, "itself", **way)
    statistics = sequence.statistics
    assert statistics.target_passes == 5  # 1 token by prefill, then 6 a pass
    assert statistics.draft_acceptance_rate == 1.0 and statistics.num_recovered_tokens == 0


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 4, None])
def test_exactly_the_prefix_before_an_error_is_kept(demo_engine, prompts, plain, wrong_at, way):
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
