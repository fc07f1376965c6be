"""The cost curve is measured while nobody waits, and nothing but the controller hears of it."""

import json
from contextlib import contextmanager
from dataclasses import replace
from math import inf

import pytest
from conftest import ScriptedDrafter, application, failing, load
from started import LIMIT_S, until

from runtime.values import Request
from server import curve, measurement, start
from server.curve import PARTS, ROWS, Curve
from server.measurement import Measurement
from server.options import Options

PROMPT = list(range(300, 320))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where curves are stored; no pass is too long."""
    monkeypatch.setattr(curve, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(measurement, "_LONGEST_PASS_MS", inf)
    return tmp_path


@contextmanager
def served(**options):
    chosen = Options(**{"model": "embedded"} | options)
    app = start.load_app(chosen)
    yield app.test_client()
    app.extensions["worker"].drain(LIMIT_S)


def measured(engine, fingerprint="a target"):
    """The measurement of an engine from its beginning to its end."""
    return ended(Measurement(engine, fingerprint))


def ended(measurement):
    while not measurement.is_done:
        measurement.measure()
    return measurement


@pytest.fixture(scope="module")
def whole(demo_engine):
    """The curve of the embedded models, measured once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measurement, "_LONGEST_PASS_MS", inf)
        return measured(demo_engine, None).curve


def rows_of(engine):
    """The rows that are open in the caches of an engine's models."""
    caches = [engine.target.cache, engine.draft_model.cache, *engine.pool.drafters["mtp"]._caches]
    return [cache.rows for cache in caches if cache.rows]


def known_of(engine, fingerprint="a target"):
    """What is stored of an engine."""
    return Measurement(engine, fingerprint).curve


def test_the_curve_is_measured_in_idle_time_and_used_at_the_next_start(monkeypatch, caplog):
    with served() as client:
        until(lambda: client.get("/curve").json["status"] == "measured")
        curve, health = client.get("/curve").json, client.get("/health").json
        counted = client.get("/metrics").text
        engine = client.application.extensions["worker"].measurement._engine
    times = [curve["pass_ms"][str(rows)] for rows in ROWS]
    assert curve["rows"] == [*ROWS] == [*map(int, curve["pass_ms"])]
    assert times == sorted(times) and 0 < times[0] < times[-1] < inf
    assert {*curve["drafters"]} == {"draft_model", "mtp"} and curve["context"] > 16
    assert {*curve["break_even"]} == {"free", *curve["drafters"]}
    for parts in curve["drafters"].values():
        assert [*parts] == [*PARTS] and min(parts.values()) >= 0 < sum(parts.values())
    # Nobody else hears of it: no counter, no cache, no drafter that learns from texts.
    assert health["controller"] == {"costs_by_batch": {}, "curve": curve["pass_ms"], "last": {}}
    assert health["num_requests_running"] == health["kv_cache_usage_perc"] == 0
    assert health["prefix_cache"]["num_blocks"] == 0 and health["warnings"] == []
    lines = [line.split() for line in counted.splitlines() if not line.startswith("#")]
    numbers = [float(value) for name, value in lines if "_total" in name]
    assert len(numbers) > 20 and {*numbers} == {0.0} and not rows_of(engine)
    monkeypatch.setattr("server.worker._QUIET_S", 3600)  # nothing is measured any more
    with served() as client:
        assert client.get("/curve").json == curve | {"status": "stored"}
        engine = client.application.extensions["worker"].measurement._engine
    rows, ms = engine.controller.costs.curve
    assert dict(zip(map(str, rows), ms, strict=True)) == curve["pass_ms"]
    assert not [record for record in caplog.records if "curve" in record.getMessage()]


def test_a_request_gets_the_only_row_amid_a_measurement_that_then_goes_on(monkeypatch, plain):
    """Its text and what is counted are those without one."""
    measure, workers, jobs, states = Measurement.measure, [], [], []

    def ask(self):
        measure(self)
        if workers and any(self._reads.values()) and not jobs:  # drafters have read the text
            states.append((self.status, bool(rows_of(self._engine)), self.curve.pass_ms))
            jobs.append(workers[0].submit(Request(PROMPT, 24, "draft_model")))

    monkeypatch.setattr(Measurement, "measure", ask)
    with served(max_running=1, fixed_k=True) as client:
        workers.append(client.application.extensions["worker"])
        until(lambda: jobs)
        jobs[0].wait()
        until(lambda: client.get("/curve").json["status"] == "measured")
        assert [*client.get("/curve").json["pass_ms"]] == [*map(str, ROWS)]
        health, engine = client.get("/health").json, workers[0].measurement._engine
    ((status, has_rows, known),), s = states, jobs[0].runs[0].sequence
    assert status == "measuring" and has_rows and known and not rows_of(engine)
    assert s.output == plain(PROMPT, 24)
    assert health["controller"] is None and health["warnings"] == []
    counted = health["speculative_decoding"]
    assert counted["num_spec_steps"] == s.statistics.num_spec_steps
    assert counted["num_draft_tokens"] == s.statistics.num_draft_tokens


def test_the_curve_of_the_same_models_and_machine_is_found_again(demo_engine, folder, caplog):
    """Also a part of it, where a request came amid the measurement, which goes on later."""
    whole = Measurement(demo_engine, "a target")
    while len(whole.curve.pass_ms) < 5:
        whole.measure()
    whole.pause()
    part = whole.curve.pass_ms.keys()
    assert known_of(demo_engine).pass_ms.keys() == part != {*ROWS}
    known = ended(whole).as_dict() | {"status": "stored"}
    assert Measurement(demo_engine, "a target").as_dict() == known
    assert [*whole.curve.pass_ms] == [*ROWS] and {*whole.curve.drafters} == {"draft_model", "mtp"}
    for other in ("another", None):
        assert Measurement(demo_engine, other).status == "measuring"
    assert len([*folder.iterdir()]) == 1 and not caplog.records


@pytest.mark.parametrize("times", [1e-3, 1e3])
def test_it_is_measured_anew_and_the_shorter_times_count(demo_engine, whole, times):
    """Where the machine was busy at one of two starts."""
    passes = {rows: ms * times for rows, ms in whole.pass_ms.items()}
    stored = replace(whole, pass_ms=passes, measured_at="2020-01-01")
    Measurement(demo_engine, "a target")._store.write(stored)
    curve = measured(demo_engine).curve
    assert (curve.pass_ms == passes) is (times < 1)
    assert curve.measured_at > "2026" and curve.pass_ms.keys() == {*ROWS}
    assert known_of(demo_engine) == curve


def test_of_two_curves_the_shorter_passes_count_and_the_shorter_draft_as_a_whole():
    one = dict(zip(PARTS, (9.0, 0.0, 1.0), strict=True))
    other = dict(zip(PARTS, (1.0, 1.5, 2.0), strict=True))
    curve = Curve({1: 10.0, 2: 40.0, 8: 41.0}, {"mtp": one, "eagle3": one})
    least = curve.least(Curve({1: 20.0, 2: 11.0, 4: 60.0}, {"mtp": other, "dflash": one}))
    assert least.pass_ms == {1: 10.0, 2: 11.0, 4: 41.0, 8: 41.0}
    assert least.drafters == {"mtp": other, "eagle3": one}


WRONG = {  # what a stored curve says
    "nothing": None, "no rows": {"rows": [1, 2]}, "no time": {"pass_ms": {"1": 0.0}},
    "tiny and huge": {"pass_ms": {"1": 1e-300, "2": 1e300}},
    "NaN": {"pass_ms": {"1": 1.0, "2": float("nan")}},
    "parts": {"drafters": {"mtp": {"call_ms": 1}}},
    "a huge call": {"drafters": {"mtp": {"call_ms": 1e300, "step_ms": 0, "read_ms": 0}}},
    "no context": {"context": None}, "a negative context": {"context": -(10**30)},
    "a huge context": {"context": 10**30}, "a date": {"measured_at": "soon"},
    "another machine": {"of": "another machine"}, "no machine": {"of": None},
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_stored_curve_that_cannot_be_used_is_ignored_with_one_line(
    demo_engine, folder, caplog, what
):
    curve = Curve({1: 10.0, 2: 11.0}, {}, "2026-01-02T00:00:00", 32)
    Measurement(demo_engine, "a target")._store.write(curve)
    (file,) = folder.iterdir()
    assert known_of(demo_engine) == curve
    stored, wrong = json.loads(file.read_text()), WRONG[what]
    file.write_text(json.dumps(stored | wrong) if wrong else '{"rows":')
    assert known_of(demo_engine) == Curve()
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()


def test_what_is_known_of_a_drafter_stays_where_a_server_is_without_it(
    demo_engine, whole, monkeypatch
):
    """And its target's passes are known there, too; of another draft model nothing is."""
    Measurement(demo_engine, "a target")._store.write(whole)
    with monkeypatch.context() as patch:
        patch.delitem(demo_engine.pool.drafters, "draft_model")
        less = Measurement(demo_engine, "a target")
        assert less.curve.pass_ms == whole.pass_ms and [*less.curve.drafters] == ["mtp"]
        less._store.write(less.curve)
    assert known_of(demo_engine) == whole and "draft_model" in whole.drafters
    monkeypatch.setattr(demo_engine.draft_model, "fingerprint", "of another file")
    assert "draft_model" not in known_of(demo_engine).drafters


def test_without_a_folder_nothing_is_stored_and_nothing_fails(demo_engine, monkeypatch, caplog):
    def refuse():
        raise PermissionError("it belongs to others")

    monkeypatch.setattr(curve, "own_folder", refuse)
    assert measured(demo_engine).status == "measured"
    assert caplog.messages == ["the cost curve cannot be stored: it belongs to others"]


def test_what_fails_is_not_measured_and_leaves_nothing_open(demo_engine, monkeypatch, caplog):
    """Others are measured if a drafter fails. A drafter from a file is never asked."""
    drafters, failures = demo_engine.pool.drafters, demo_engine.pool.failures.copy()
    monkeypatch.setitem(drafters, "scripted", ScriptedDrafter(lambda *_: 1 / 0))
    drafters["scripted"].num_step_weights = 10
    curve = measured(demo_engine).curve
    assert {*curve.drafters} == {"draft_model", "mtp"} and [*curve.pass_ms] == [*ROWS]
    assert drafters["scripted"].num_open == 0 and demo_engine.pool.failures == failures
    failing(demo_engine, monkeypatch, lambda call, num_logits: num_logits == [24])
    broken = measured(demo_engine, None)
    assert broken.status == "measuring" and not rows_of(demo_engine)
    assert 16 in broken.curve.pass_ms and 24 not in broken.curve.pass_ms
    (record,) = caplog.records
    assert "not measured any further: out of memory" in record.getMessage()


def test_large_passes_are_left_out_where_time_or_context_ends(demo_engine, monkeypatch, caplog):
    monkeypatch.setattr(demo_engine.target, "max_length", 48)
    assert [*measured(demo_engine).curve.pass_ms] == [*ROWS[:-2]]
    hybrid = load("hybrid")  # its states cannot go back over more than 32 tokens
    assert [*measured(hybrid, "a hybrid").curve.pass_ms] == [*ROWS[:-3]] and not caplog.records
    monkeypatch.setattr(measurement, "_LONGEST_PASS_MS", 0.0)
    one = Measurement(demo_engine, "another")
    one._names.clear()  # whose drafts are verified, too
    assert [*ended(one).curve.pass_ms] == [1] and one.status == "measured"


def test_break_even_is_what_a_draft_of_one_token_costs_in_passes():
    parts = {"call_ms": 3.0, "step_ms": 1.0, "read_ms": 9.0}
    curve = Curve({1: 10.0, 2: 11.0, 4: 90.0}, {"mtp": parts, "dear": parts | {"call_ms": 10.0}})
    assert curve.break_even == {"free": 0.1, "mtp": 0.5, "dear": 1.2}
    assert Curve({1: 10.0}).break_even == {}


def test_where_nothing_is_measured_there_is_no_curve(demo_engine):
    with application(demo_engine, Options()) as client:
        answer = client.get("/curve")
        assert answer.status_code == 404 and "no cost curve" in answer.json["error"]["message"]
