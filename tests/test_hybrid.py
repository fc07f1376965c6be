"""The embedded hybrid: six layers keep states, two attend, and an MTP head drafts.

test_recurrent.py has the families, and what a rollback leaves in one layer.
"""

from dataclasses import replace

import pytest
import speculative_decoding as core
from conftest import ROOT, WAYS, run, together

import kernels
from control import Statistics
from messages import Request
from serving import answers
from serving.options import Options
from serving.worker import Worker

OPTIONS = Options(
    model="hybrid", draft_model=str(ROOT / "demo_models/draft"), fixed_k=True, suffix_cache=0,
)  # fmt: skip
DRAFTERS = ("mtp", "ngram", "suffix", "draft_model")


@pytest.fixture(scope="module")
def engine():
    return core.load_engine(OPTIONS)


@pytest.fixture(scope="module")
def alone(engine, prompts):
    """Plain decoding, by the way that tokens are chosen and by prompt."""

    def decode(prompt, way):
        return core.plain_decode(engine.target, prompt, 90, engine.eos_ids, **WAYS[way])

    return {way: [decode(p, way) for p in three(prompts)] for way in WAYS}


def three(prompts):
    """Of different lengths, so that what stands side by side is ragged."""
    return list(prompts.values())[:3]


def test_it_is_found_by_name_and_health_says_what_it_is(engine):
    assert set(engine.pool.drafters) == set(DRAFTERS)
    health = answers.health(engine, Worker(engine, OPTIONS), OPTIONS)
    assert health["model"] == "hybrid" and health["bitwise_lossless"] is True
    assert health["prefix_cache"] is None and len(engine.target.cache.recurrent) == 6
    assert engine.target.compiled.is_compiled and engine.pool.drafters["mtp"]._kernels


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_writes_the_text_of_plain_decoding(engine, prompts, alone, drafter, way):
    """Together, in one batch."""
    requests = [Request(p, 90, drafter, 5, **WAYS[way]) for p in three(prompts)]
    sequences = together(engine, requests)
    assert [s.output for s in sequences] == alone[way]
    total = sum((s.statistics for s in sequences), Statistics())
    assert 0 < total.num_accepted_draft_tokens < total.num_draft_tokens
    assert not any(s.warnings for s in sequences)


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_a_trace_tells_how_far_the_states_go_back(prompts, drafter, monkeypatch):
    """And what it says that is stepped again is: the rule in Python counts its steps."""
    engine = core.load_engine(replace(OPTIONS, kernels=False))
    steps, step = [], kernels.step_in_python

    def counted(rule, texts, states):
        steps.extend(len(logs) for *_, logs, _ in texts)
        return step(rule, texts, states)

    monkeypatch.setattr(kernels, "step_in_python", counted)
    _, events = run(engine, three(prompts)[0], max_tokens=60, drafter=drafter)
    read, begin = 0, 0
    for event in events:
        verified, kept = event["cached"]
        again = kept - begin if event["step"] and kept < verified else 0
        way = {"from": verified, "to": kept, "stepped": again}
        assert event["recurrent"] == {"layers": 6} | way
        read, begin = read + verified - begin + again, kept
    assert sum(steps) == 6 * (read - again)  # what the last cycle refused is not needed
    assert any(event["recurrent"]["stepped"] for event in events)
