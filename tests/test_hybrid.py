"""On the embedded hybrid, too, every drafter writes the text of plain decoding.

Six of its layers keep states and two attend, and it has an MTP head. test_recurrent.py tests other
families, and what a rollback leaves in one layer.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from conftest import ROOT, WAYS, run, together

from runtime import kernels
from runtime.statistics import Statistics
from runtime.values import Request
from server import answers, core
from server.options import Options
from server.worker import Worker

DRAFT = str(ROOT / "demo_models/draft")
OPTIONS = Options("hybrid", draft_model=DRAFT, fixed_k=True, suffix_cache=0)
DRAFTERS = ("mtp", "ngram", "suffix", "draft_model")


@pytest.fixture(scope="module")
def engine():
    return core.load_engine(OPTIONS)


@pytest.fixture(scope="module", params=WAYS)
def requests(request, prompts):
    """Requests of different lengths, so that rows are ragged, without a drafter."""
    return [Request(p, 90, None, 5, **WAYS[request.param]) for p in [*prompts.values()][:3]]


@pytest.fixture(scope="module")
def expected(engine, requests):
    target, ends = engine.target, engine.eos_ids
    return [core.plain_decode(target, r.prompt, 90, ends, r.sampling, r.seed) for r in requests]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_writes_the_text_of_plain_decoding(engine, requests, expected, drafter):
    """All requests run in one batch."""
    sequences = together(engine, [replace(r, drafter=drafter) for r in requests])
    assert [s.output for s in sequences] == expected
    total = sum((s.statistics for s in sequences), Statistics())
    assert 0 < total.num_accepted_draft_tokens < total.num_draft_tokens
    assert not any(s.warnings for s in sequences)


def test_it_is_found_by_name_and_health_says_what_it_is(engine):
    assert set(engine.pool.drafters) == {*DRAFTERS, *engine.pool.special}
    health = answers.health(engine, Worker(engine, OPTIONS), OPTIONS)
    assert health["model"] == "hybrid" and health["bitwise_lossless"] is True
    assert health["prefix_cache"] is None and len(engine.target.cache.recurrent) == 6
    assert engine.target.compiled.is_compiled and engine.pool.drafters["mtp"]._kernels


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_a_trace_tells_how_far_the_states_go_back(prompts, drafter, monkeypatch):
    """The rule in Python counts its steps: what is stepped again is what the trace says."""
    engine = core.load_engine(replace(OPTIONS, kernels=False))
    counted = Mock(wraps=kernels.step_in_python)
    monkeypatch.setattr(kernels, "step_in_python", counted)
    _, events = run(engine, next(iter(prompts.values())), max_tokens=60, drafter=drafter)
    steps = [len(logs) for call in counted.call_args_list for *_, logs, _ in call.args[1]]
    read, begin = 0, 0
    for event in events:
        verified, kept = event["cached"]
        again = kept - begin if event["step"] and kept < verified else 0
        expected = {"layers": 6, "from": verified, "to": kept, "stepped": again}
        assert event["recurrent"] == expected
        read, begin = read + verified - begin + again, kept
    assert sum(steps) == 6 * (read - again)  # what the last cycle refused is not needed
    assert any(event["recurrent"]["stepped"] for event in events)
