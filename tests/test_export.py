"""An export holds what the server answers, is complete or leaves nothing, and so do recordings.

The recordings that come with the page are held to the same as one that is made here. That the page
opens them without a server is in test_story.py.
"""

import json
import re
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pytest

from drafters.auto.planner import Controller
from server import core
from server.page import FOLDER, INDEX, export, files

COMING_ALONG = sorted(path.stem for path in (FOLDER / "recordings").glob("*.json"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The export of the embedded model, as the command line makes it."""
    folder = tmp_path_factory.mktemp("of") / "the embedded model"
    assert core.main(["--export", str(folder), "--model", "embedded"]) == 0
    return folder


def read(folder, name):
    return json.loads((folder / "recordings" / f"{name}.json").read_text("utf-8"))


def cycles_of(run):
    return [event for event in run["events"] if "step" in event]


def entries_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_an_export_is_the_page_and_one_recording(exported):
    own = [name for name in files() if not name.startswith("recordings/")]
    found = {name for name in entries_under(exported) if (exported / name).is_file()}
    assert found == {*own, "recordings/embedded.json"}
    for name in own:
        assert name == INDEX or (exported / name).read_bytes() == (FOLDER / name).read_bytes()
    page, ours = ((folder / INDEX).read_text("utf-8") for folder in (exported, FOLDER))
    assert 'data-recording="recordings/embedded.json"' in page and "data-server" not in page
    assert re.sub("<html[^>]*>", "", page) == re.sub("<html[^>]*>", "", ours)


@pytest.mark.parametrize("name", ["", *COMING_ALONG])
def test_a_recording_has_all_that_the_page_asks_for(name, exported):
    """Of every drafter: its own text is plain decoding's, and each choice is in what is shown.

    Where a text repeats, looking up saves passes: it gives twice as many tokens a pass as in a
    story, at the least.
    """
    folder = FOLDER if name else exported
    told, per_pass = read(folder, name or "embedded"), {}
    size = (folder / "recordings" / f"{told['model']}.json").stat().st_size
    assert size <= 1.5e6 and date.fromisoformat(told["recorded_at"]) <= date.today()
    assert re.search(r"\S+, \d+ threads?$", told["machine"])
    assert told["health"]["status"] == "ok" and told["curve"]["status"] == "measured"
    assert {"1", "2", "8"} <= told["curve"]["pass_ms"].keys() and told["curve"]["break_even"]
    drafters = {*told["health"]["drafters"]} - {"auto", "tree", "prediction", "grammar"}
    if told["curve"]["pass_ms"]["1"] >= export._LEAST_MS:
        drafters.add("auto")
    greedy = [run for run in told["runs"] if not run["request"]["temperature"]]
    made = [(run["prompt"], run["request"]["drafter"]) for run in greedy]
    assert sorted(made) == sorted((p, d) for p in ("first", "copy", "new") for d in drafters)
    sampled = told["runs"][len(greedy) :]
    rules = [(run["prompt"], run["request"]["verification"]) for run in sampled]
    assert rules == [("new", "coupled"), ("new", "rejection")]
    for run in told["runs"]:
        request, cycles, answer = run["request"], cycles_of(run), run["events"][-1]
        figures = answer["metrics"]["speculative_decoding"]
        per_pass[run["prompt"], request["drafter"]] = figures["tokens_per_pass"]
        plain = [event["plain"] for event in run["events"] if "plain" in event]
        is_coupled = request["verification"] == "coupled"
        assert answer["compare"]["identical"] is (True if is_coupled else None)
        assert answer["text"] == "".join(cycle["text"] for cycle in cycles)
        text = "".join(each["text"] for each in plain)
        assert text == answer["compare"]["plain"]["text"]
        assert text == answer["text"] or not is_coupled
        assert [*plain[0]] == ["step", "tokens", "text", "ms"] and "trace" not in answer
        for cycle in cycles:
            for token, entries in zip(cycle["tokens"], cycle["distributions"], strict=True):
                assert token["id"] in {entry["id"] for entry in entries} and len(entries) <= 8
                assert {str(entry["id"]) for entry in entries} <= cycle["texts"].keys()
                assert all(entry["p"] == float(f"{entry['p']:.4g}") for entry in entries)
    assert per_pass["copy", "ngram"] >= 2 * per_pass["new", "ngram"]


def test_the_story_begins_with_words_a_whole_draft_accepted_and_then_a_cut():
    """In the recording on which the page opens."""
    runs = read(FOLDER, "smollm2")["runs"]
    by_name = {(run["prompt"], run["request"]["drafter"]): cycles_of(run) for run in runs}
    _, first, *later = by_name["first", "draft_model"]
    assert any(cycle["proposals"] for cycle in by_name["copy", "auto"])
    assert [token["kind"] for token in first["tokens"]] == ["accepted"] * 5 + ["bonus"]
    words = [first["texts"][str(token["id"])] for token in first["tokens"]]
    assert all(re.fullmatch(r" ?[A-Za-z]+[.,]?", word) for word in words)
    held, kept = next(cycle["cached"] for cycle in later[:5] if cycle["rejected"])
    assert held - kept >= 2


@pytest.mark.parametrize("is_strict", [True, False])
def test_what_fails_is_told_and_the_rest_is_exported(
    is_strict, failing_drafter, tiny_folder, tmp_path, capsys
):
    model, site = tiny_folder("llama"), tmp_path / "site"
    words = ["--model", str(model), *failing_drafter, *(["--strict"] if is_strict else [])]
    status = core.main(["--export", str(site), *words])
    out, err = capsys.readouterr()
    assert status == 0 and out.endswith(f"python -m http.server -d {site}\n")
    runs = read(site, re.sub("[^a-z0-9_.-]+", "-", model.name.lower()))["runs"]
    made = [run["request"] for run in runs if run["request"]["drafter"] == "fails"]
    assert bool(made) is not is_strict and not any(request["temperature"] for request in made)
    assert ("not recorded: fails on first" in err) is is_strict


def test_a_model_without_drafters_stands_beside_another(main, demo_engine, monkeypatch, tmp_path):
    monkeypatch.setitem(export._GREEDY, "max_tokens", 4)
    assert main("--export", str(tmp_path))[0] == 0
    monkeypatch.setattr(core, "load_engine", lambda options: core.Engine(demo_engine.target, {}))
    monkeypatch.setattr(export, "TEXT", {"new": "hard_prose"})
    monkeypatch.setenv("SPECULATIVE_API_KEY", "secret")
    assert core.main(["--export", str(tmp_path), "--model", "mixture"]) == 0
    told = read(tmp_path, "mixture")
    assert [run["request"]["drafter"] for run in told["runs"]] == ["none"] * 3
    assert all(map(cycles_of, told["runs"])) and read(tmp_path, "embedded")["runs"]
    assert "recordings/mixture.json" in (tmp_path / INDEX).read_text("utf-8")


def test_auto_s_runs_are_recorded_once_it_knows_the_texts(demo_engine, monkeypatch, tmp_path):
    """Where a pass is long enough for its clock."""
    target, loaded = demo_engine.target, demo_engine.pool.drafters
    engine = core.Engine(target, loaded, "auto", controller=Controller.of(target, loaded))
    monkeypatch.setattr(core, "load_engine", lambda options: engine)
    monkeypatch.setitem(export._GREEDY, "max_tokens", 4)
    for least_ms, count in (1e9, 0), (0.0, 3):
        monkeypatch.setattr(export, "_LEAST_MS", least_ms)
        assert core.main(["--export", str(tmp_path), "--model", "embedded"]) == 0
        runs = read(tmp_path, "embedded")["runs"]
        chosen = [run for run in runs if run["request"]["drafter"] == "auto"]
        assert [run["prompt"] for run in chosen] == ["first", "copy", "new"][:count]
        assert all(cycle["controller"] for run in chosen for cycle in cycles_of(run)[1:])
        assert not any(run["request"]["temperature"] for run in chosen)


NO_ROOM = OSError(28, "No space left on device")
FORBIDDEN = PermissionError(13, "Permission denied")
CANNOT = "error: cannot export into"


# Where to; what breaks, if the place can be had; the exit status, and what is said.
@pytest.mark.parametrize(("place", "broken", "status", "says"), [
    ("a file", None, 2, f"{CANNOT}.*Not a directory"),
    ("a file/site", None, 2, f"{CANNOT}.*Not a directory"),
    ("no/where", None, 2, f"{CANNOT}.*No such file"),
    ("full", None, 2, f"{CANNOT}.*it is neither empty nor an earlier export"),
    ("", None, 2, f"{CANNOT}.*neither"),
    ("site", (core, "load_engine", KeyboardInterrupt()), 130, ""),
    ("site", (Path, "write_bytes", NO_ROOM), 2, "No space left"),
    ("site", (export, "_run", ValueError("the context is too short")), 2, "too short"),
    ("site", (export, "TemporaryDirectory", FORBIDDEN), 2, f"{CANNOT}.*Permission denied"),
])  # fmt: skip
def test_an_export_that_cannot_be_made_says_so_and_leaves_all_as_it_was(
    place, broken, status, says, main, monkeypatch, tmp_path
):
    """A folder that cannot be had is one line, before anything is loaded."""
    monkeypatch.setitem(export._GREEDY, "max_tokens", 4)
    owner, name, error = broken or (core, "load_engine", AssertionError)
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    (tmp_path / "full").mkdir()
    for mine in ("a file", "full/index.html"):
        (tmp_path / mine).write_text("mine")
    before = entries_under(tmp_path)
    done, out, err = main("--export", place and str(tmp_path / place))
    assert (done, out) == (status, "") and re.search(says, err) and "Traceback" not in err
    assert broken or err.count("\n") == 1
    assert entries_under(tmp_path) == before and (tmp_path / "full" / INDEX).read_text() == "mine"
