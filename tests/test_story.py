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
    """The stored one, which is told while a model is loaded, has all that a recorded one has."""
    planner, num_failures = engine.planner, engine.panel.num_failures
    told = story.record(engine, core.Options())
    assert json.dumps(told) and not told["stored"]
    names = {"draft_model", "mtp", "ngram"}
    assert set(told["costs"]) == set(told["gains"]) == names and told["drafter"] in names
    first, *cycles = told["cycles"]
    assert not first["proposals"] and any(len(cycle["proposals"]) == 5 for cycle in cycles)
    cost = told["costs"][told["drafter"]]
    assert told["plain_ms"] > 0 and cost["step_ms"] > 0 and cost["verify_ms"] > 0
    assert told["target"]["weight_bytes"] == 4 * engine.target.num_weights
    assert engine.planner is planner and engine.panel.num_failures == num_failures
    assert all(s.prefills == 0 for s in engine.totals.by_drafter.values())
    assert not engine.totals.recent and not any(engine.target.cache.lengths)
    stored = json.loads((ROOT / "page/stored_story.json").read_text("utf-8"))
    assert stored.keys() == told.keys() and stored["target"].keys() == told["target"].keys()
    assert stored["cycles"][1].keys() == cycles[0].keys() >= {"text", "texts", "ms", "cached"}
    assert stored["costs"][stored["drafter"]].keys() == told["costs"]["mtp"].keys()


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
    theirs = TimedDrafter(engine.panel.drafters["ngram"], 1.0)
    monkeypatch.setattr(engine.panel, "drafters", {"mine": theirs, "ngram": theirs})
    assert story.record(engine, core.Options()) is None


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
