"""The story that a server records when it starts, and the distributions that a trace shows."""

import json
import math

import pytest
import speculative_decoding as core
from conftest import ROOT, run

from control.statistics import Totals
from drafters.timed import TimedDrafter
from messages import Request, Sampling
from serving import story
from serving.worker import Worker

SAMPLED = {
    "coupled": Sampling(temperature=0.8, top_p=0.95),
    "rejection": Sampling(temperature=0.8, verification="rejection"),
}
PROMPT = [277, 480, 291, 12, 300]


@pytest.fixture
def engine(demo_engine, monkeypatch):
    monkeypatch.setattr(demo_engine, "totals", Totals(demo_engine.panel.choices))
    monkeypatch.setattr(demo_engine, "planner", demo_engine.planner)
    return demo_engine


def test_a_story_is_recorded_and_leaves_no_trace_in_the_figures(engine):
    planner, num_failures = engine.planner, engine.panel.num_failures
    told = story.record(engine, core.Options())
    assert json.dumps(told) and not told["stored"]
    names = {"draft_model", "mtp", "ngram"}
    assert set(told["costs"]) == set(told["gains"]) == names and told["drafter"] in names
    first, *cycles = told["cycles"]
    assert not first["proposals"] and any(len(cycle["proposals"]) == 5 for cycle in cycles)
    assert {"text", "texts", "ms", "cached"} <= cycles[0].keys()
    cost = told["costs"][told["drafter"]]
    assert told["plain_ms"] > 0 and cost["step_ms"] > 0 and cost["verify_ms"] > 0
    assert told["target"]["weight_bytes"] == 4 * engine.target.num_weights
    assert engine.planner is planner and engine.panel.num_failures == num_failures
    assert all(s.prefills == 0 for s in engine.totals.by_drafter.values())
    assert not engine.totals.recent and not any(engine.target.cache.lengths)


def test_a_fault_costs_the_story_and_not_the_start(engine, monkeypatch):
    planner = engine.planner

    def fail(*_):
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(engine.panel.drafters["draft_model"], "open", fail)
    told = story.record(engine, core.Options())
    assert told["drafter"] != "draft_model" and told["costs"]["draft_model"]["step_ms"] is None
    monkeypatch.setattr(engine, "generate", fail)
    assert story.record(engine, core.Options()) is None
    assert engine.planner is planner


def test_whoever_comes_interrupts_the_story_which_is_told_later(engine):
    """It gives back what it holds; a worker tells it once nobody waits."""
    asked = iter([False, False])
    with pytest.raises(story.Interrupted):
        story.record(engine, core.Options(), lambda: next(asked, True))
    assert not any(engine.target.cache.lengths)
    worker = Worker(None, core.Options(), lambda _: (engine, None))
    totals, (job,) = engine.totals, worker.submit(Request(PROMPT, 8, "ngram"))
    job.wait()
    assert worker.story(60)["drafter"] in engine.panel.drafters
    assert engine.totals is totals and totals.by_drafter["ngram"].prefills == 1
    assert worker.drain(60) == 0


def test_somebody_elses_drafter_tells_no_story(engine, monkeypatch):
    """It may hang, and the start would wait for it."""
    theirs = {"mine": TimedDrafter(engine.panel.drafters["ngram"], 1.0)}
    theirs["ngram"] = theirs["mine"]  # whatever its name
    monkeypatch.setattr(engine.panel, "drafters", theirs)
    assert story.record(engine, core.Options()) is None


def test_the_stored_story_has_what_a_recorded_one_has(engine):
    stored = json.loads((ROOT / "page/stored_story.json").read_text("utf-8"))
    told = story.record(engine, core.Options())
    assert stored.keys() == told.keys() and stored["target"].keys() == told["target"].keys()
    assert stored["cycles"][1].keys() == told["cycles"][1].keys()
    assert stored["costs"][stored["drafter"]].keys() == told["costs"]["mtp"].keys()


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("drafter", ["draft_model", "mtp", "ngram"])
def test_a_trace_shows_the_distributions_that_decided(demo_engine, drafter, rule):
    """Under the coupled rule the noise on log p finds the choice, that on log q the draft."""
    fields = {"drafter": drafter, "sampling": SAMPLED[rule], "max_tokens": 40, "seed": 3}
    _, events = run(demo_engine, PROMPT * 3, trace=True, **fields)
    num_checked = 0
    for event in events:
        assert len(event["distributions"]) == event["emitted_count"]
        for i, entries in enumerate(event["distributions"]):
            assert len(entries) <= 14 and sum(entry["p"] for entry in entries) < 1 + 1e-4
            by_id = {entry["id"]: entry for entry in entries}
            assert entries == sorted(entries, key=lambda entry: -entry["p"])
            assert {str(i) for i in by_id} <= {str(i) for i in event["texts"]}
            chosen, drafted = event["tokens"][i], event["proposals"][i : i + 1]
            has_q = bool(drafted) and drafter != "ngram"
            assert all(("q" in entry) is has_q for entry in entries)
            if rule == "coupled":
                assert top(entries, "p") == chosen["id"]
                assert not has_q or top(entries, "q") == drafted[0]
                num_checked += has_q
            else:
                assert by_id[chosen["id"]]["p"] == pytest.approx(chosen["p"], rel=1e-5)
                assert not any("noise" in entry for entry in entries)
    assert num_checked > 5 or drafter == "ngram" or rule == "rejection"


def top(entries, name):
    able = [entry for entry in entries if entry[name] > 0]
    return max(able, key=lambda entry: math.log(entry[name]) + entry["noise"])["id"]


def test_an_untraced_coupled_request_computes_no_q(demo_engine):
    """Only a trace asks for it. (Where a draft is one call in C, nobody is asked here.)"""
    seen = []
    sample = demo_engine.panel.drafters["draft_model"]._sample

    def watched(*arguments):
        seen.append(sample(*arguments)[1])
        return sample(*arguments)

    demo_engine.panel.drafters["draft_model"]._sample = watched
    try:
        fields = {"drafter": "draft_model", "sampling": SAMPLED["coupled"], "max_tokens": 8}
        untraced = run(demo_engine, PROMPT, **fields)[0].output
        assert all(q is None for q in seen)
        seen.clear()
        assert run(demo_engine, PROMPT, trace=True, **fields)[0].output == untraced
    finally:
        demo_engine.panel.drafters["draft_model"]._sample = sample
    assert seen and all(q is not None for q in seen)
