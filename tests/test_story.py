"""The story that a server records when it starts."""

import json

import pytest
import speculative_decoding as core
from conftest import ROOT

from control.statistics import Totals
from drafters.timed import TimedDrafter
from messages import Request
from serving import story
from serving.worker import Worker

PROMPT = [277, 480, 291, 12, 300]


@pytest.fixture
def engine(demo_engine, monkeypatch):
    monkeypatch.setattr(demo_engine, "totals", Totals(demo_engine.panel.choices))
    monkeypatch.setattr(demo_engine, "planner", demo_engine.planner)
    return demo_engine


def test_a_story_is_recorded_and_leaves_no_trace_in_the_figures(engine):
    """The stored one, which is told while a model is loaded, has all that a recorded one has."""
    planner, num_failures = engine.planner, engine.panel.failures.total()
    told = story.record(engine, core.Options())
    assert json.dumps(told) and not told["stored"]
    names = {"draft_model", "mtp", "ngram"}
    assert set(told["costs"]) == set(told["gains"]) == names and told["drafter"] in names
    first, *cycles = told["cycles"]
    assert not first["proposals"] and any(len(cycle["proposals"]) == 5 for cycle in cycles)
    cost = told["costs"][told["drafter"]]
    assert told["plain_ms"] > 0 and cost["step_ms"] > 0 and cost["verify_ms"] > 0
    assert told["target"]["weight_bytes"] == 4 * engine.target.num_weights
    assert engine.planner is planner and engine.panel.failures.total() == num_failures
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
