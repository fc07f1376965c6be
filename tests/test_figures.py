"""The pictures for lectures show what was measured and nothing else, the same bytes each time.

figures.json has what a run on the embedded model measured. The last test measures, in small.
"""

import json
from copy import deepcopy
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from conftest import ROOT

import tools as bench
from server.curve import Curve
from tools import audition, figures

FILE = ROOT / "tests" / "figures.json"
TOLD = json.loads(FILE.read_text("utf-8"))
CURVE, NAMES = Curve.of(TOLD["curve"]), [f"{name}.svg" for name in figures.PICTURES]
FIXED = [row for row in TOLD["rows"] if row["prompts"] == "all" and row["k"]]
NEVER = {"num_turns": 0, "noise": None, "rows": []}  # no turn was over


def panels(name, told=TOLD):
    """The axes of a picture by their titles, and the picture's own title."""
    figure = figures.figure_of(name, told)
    title = " ".join(figure.get_suptitle().split())
    return {axes.get_title("left"): axes for axes in figure.axes if axes.get_visible()}, title


def small_print(figure):
    return " ".join(figure.get_supxlabel().split())


def lines(axes):
    return [[list(map(float, data)) for data in line.get_data()] for line in axes.lines]


@pytest.fixture(scope="module")
def drawn():
    return figures.draw(TOLD)


def test_the_five_pictures_have_their_words_as_text_and_the_same_bytes_twice(drawn):
    assert [*drawn] == NAMES and figures.draw(deepcopy(TOLD)) == drawn
    source = "2 threads", "embedded", TOLD["measured_at"][:10], f"{TOLD['num_turns']} turns"
    for name, drawing in drawn.items():
        root = ElementTree.fromstring(drawing)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        said = " ".join(node.text or "" for node in root.iter() if "}text" in node.tag)
        drafters = [row["drafter"] for row in FIXED if name != "pass.svg"]
        assert [words for words in (*source, *drafters) if words not in said] == []


def test_tokens_a_pass_are_the_formula_s_and_points_are_measured():
    def formula(alpha, k):
        return pytest.approx(sum(alpha**i for i in range(k + 1)))

    (axes,) = panels("tokens")[0].values()
    drawn = lines(axes)
    for k, (alphas, tokens) in zip(figures._KS, drawn, strict=False):
        assert tokens == [formula(alpha, k) for alpha in alphas]
    points = iter(drawn[len(figures._KS) :])
    for row, (_, own, found) in zip(FIXED, zip(*[points] * 3, strict=True), strict=True):
        assert found == [[row["alpha"]], [row["tok_pass"]]]
        assert own == [[row["alpha"]], [formula(row["alpha"], row["k"])]]


def test_the_time_of_a_pass_is_the_curve():
    ((axes,), title) = panels("pass")[0].values(), panels("pass")[1]
    measured, free, alone = lines(axes)
    assert measured == [[*CURVE.pass_ms], [*CURVE.pass_ms.values()]]
    assert {*free[1]} == {CURVE.pass_ms[1]}
    assert alone[1] == pytest.approx([rows * CURVE.pass_ms[1] for rows in alone[0]])
    assert title.startswith(f"6 positions take {CURVE.pass_ms[6] / CURVE.pass_ms[1]:.1f} times")


def test_bars_are_speeds_by_kind_with_their_quartiles():
    found, title = panels("speedup")
    kinds = {row["prompts"] for row in TOLD["rows"]}
    assert {*found} == {f"{kind} texts" for kind in kinds} and len(kinds) > 2
    for kind in kinds:
        axes, rows = found[f"{kind} texts"], [r for r in TOLD["rows"] if r["prompts"] == kind]
        assert [bar.get_width() for bar in axes.patches[: len(rows)]] == [
            r["of_plain"] for r in rows
        ]
        *ends, one = [list(line.get_xdata()) for line in axes.lines]
        assert ends == [row["quartiles"] for row in rows] and {*one} == {1}
        assert [label.get_text() for label in axes.texts] == [f"{r['of_plain']:.2f}" for r in rows]
    best = max((r for r in TOLD["rows"] if r["prompts"] == "all"), key=lambda r: r["of_plain"])
    fast = f"{best['drafter']} writes {best['of_plain']:.1f} times as fast as plain decoding"
    assert title == fast
    slow = TOLD | {"noise": best["of_plain"] - 1}
    assert panels("speedup", slow)[1].startswith("No drafter gains more")


def test_break_even_is_that_of_the_curve_and_a_drafter_pays_above_its_line():
    found, title = panels("break_even")
    plain, pays = CURVE.pass_ms[1], 0
    for row, (name, axes) in zip(FIXED, found.items(), strict=True):
        (ks, needed), point = lines(axes)
        cost, shares = CURVE.drafters.get(row["drafter"]), dict(zip(ks, needed, strict=True))
        assert [*shares] == [rows - 1 for rows in CURVE.pass_ms if 1 < rows <= 17]
        draft_ms = cost["call_ms"] + 5 * cost["step_ms"] if cost else 5 * row["to_draft"] * plain
        assert shares[5] == pytest.approx((CURVE.pass_ms[6] - plain + draft_ms) / 5 / plain)
        if cost:
            assert shares[1] == pytest.approx(CURVE.break_even[row["drafter"]], abs=1e-4)
        assert point == [[row["draft_length"]], [row["accepted"]]]
        pays += name == f"{row['drafter']}: {row['accepted']:.2f}, above"
    assert title == f"A drafter pays above its line: {pays} of {len(FIXED)} are there"
    bad = [row | {"accepted": 0.01} for row in TOLD["rows"]]
    found, title = panels("break_even", TOLD | {"rows": bad})
    assert f"0 of {len(FIXED)} are" in title and all(name.endswith("below") for name in found)


def test_acceptance_by_position_is_the_measured_one():
    (axes,) = panels("positions")[0].values()
    drawn = [line for line in lines(axes) if line[0][0] == 1]
    expected = sorted((row["accepted_at"] for row in FIXED), key=lambda shares: shares[-1])
    assert [ys for _, ys in drawn] == expected


@pytest.mark.parametrize(("change", "left"), [
    (NEVER, ["tokens.svg", "pass.svg"]),
    ({"curve": TOLD["curve"] | {"pass_ms": {}}}, ["tokens.svg", "speedup.svg", "positions.svg"]),
    ({"rows": [row | {"accepted_at": []} for row in TOLD["rows"]]}, NAMES[:-1]),
    ({"rows": [row | {"needed": None} for row in TOLD["rows"]]}, NAMES[:3] + NAMES[4:]),
])  # fmt: skip
def test_what_was_not_measured_is_not_drawn(change, left):
    drawn = [name for name in figures.PICTURES if figures.figure_of(name, TOLD | change)]
    assert [f"{name}.svg" for name in drawn] == left


def test_small_print_says_who_and_what_is_left_out():
    """Who has an α of zero is not."""
    for alpha, num_drawn, who in ((None, len(FIXED) - 1, "mtp, auto"), (0.0, len(FIXED), "auto")):
        rows = [r | {"alpha": alpha} if r["drafter"] == "mtp" else r for r in TOLD["rows"]]
        figure = figures.figure_of("tokens", TOLD | {"rows": rows})
        assert len(figure.axes[0].lines) == len(figures._KS) + 3 * num_drawn
        assert f"or without a K of its own: {who}. " in small_print(figure)
    few = {rows: ms for rows, ms in TOLD["curve"]["pass_ms"].items() if int(rows) < 48}
    for name, change, says in (
        ("speedup", {"kinds": [*TOLD["kinds"], "rare"]}, "No turn was over of: rare. "),
        ("pass", {"curve": TOLD["curve"] | {"pass_ms": few}}, "Positions not measured: 48, 64. "),
        ("tokens", NEVER, "own: all drafters. "),
    ):
        assert says in small_print(figures.figure_of(name, TOLD | change))


# -------------------------------------------------------------------------------- the command


@pytest.fixture
def run(capsys):
    """Run the command line: (exit status, stdout, stderr)."""

    def call(*words):
        status = 0
        try:
            figures.main([*map(str, words)])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return call


def test_pictures_are_drawn_again_and_those_of_other_measurements_go(run, tmp_path):
    folder, other = tmp_path / "new", tmp_path / "other.json"
    assert run(folder, "--from", FILE) == (0, f"{', '.join(NAMES)} in {folder}\n", "")
    assert {path.name for path in folder.iterdir()} == {*NAMES, "measurements.json"}
    other.write_text(json.dumps(TOLD | NEVER))
    status, out, _ = run(folder, "--from", other)
    assert status == 0 and out.splitlines()[1].endswith(": speedup, break_even, positions")
    left = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
    assert left == figures.draw(TOLD | NEVER) | {"measurements.json": other.read_text()}


def test_nothing_stays_of_a_picture_that_could_not_be_written(run, tmp_path, monkeypatch, drawn):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(figures.Path, "replace", full)
    monkeypatch.setattr(figures, "draw", lambda told: drawn)
    assert run(tmp_path, "--from", FILE)[::2] == (2, "error: [Errno 28] No space left on device\n")
    assert [*tmp_path.iterdir()] == []


BAD = {  # by what is said
    "cannot write into file: File exists": "file",
    "cannot write into no/dir: No such file or directory": "no/dir",
    "nothing.json": "dir --from nothing.json",
    "line 1 column 1": "dir --from file",
    "list.json cannot be drawn: TypeError": "dir --from list.json",
    "part.json cannot be drawn: KeyError": "dir --from part.json",
    "odd.json cannot be drawn: ValueError": "dir --from odd.json",
    "embedded has no eagle3: add --eagle3": "dir --model embedded --drafters eagle3",
    "matplotlib draws: .venv/bin/pip install -r requirements-dev.txt": "dir",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_gets_one_line_before_anything_is_loaded(message, run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.core, "load_engine", Mock(side_effect=AssertionError))
    monkeypatch.chdir(tmp_path)
    if "matplotlib draws" in message:
        monkeypatch.setattr(figures, "find_spec", lambda name: None)
    odd = json.dumps(TOLD | {"curve": TOLD["curve"] | {"pass_ms": {"1": -1}}})
    contents = {"file": "text", "list.json": "[]", "part.json": "{}", "odd.json": odd}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    status, out, err = run(*BAD[message].split())
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert message in err and [*tmp_path.rglob("*.svg")] == []


@pytest.mark.parametrize("turns", [0, 1])
def test_a_run_measures_what_is_stored_for_tests_until_ctrl_c(
    turns, run, tmp_path, monkeypatch, demo_engine
):
    """Without a whole turn those pictures are drawn that need none."""

    def race(*given):
        yield from [whole for whole, _ in zip(real(*given), range(turns), strict=False)]
        raise KeyboardInterrupt

    real, folder, prompts = audition.race, tmp_path / "dir", tmp_path / "own.txt"
    monkeypatch.setattr(audition, "race", race)
    monkeypatch.setattr(bench.core, "load_engine", lambda options: demo_engine)
    prompts.write_text("1, 2, 1, 2,\n\ndef main():\n")
    few = "--tokens 8 --minutes 0.0001 --drafters ngram draft_model mtp auto"
    given = folder, "--model", "embedded", "--prompts", prompts, *few.split()
    status, out, err = run(*given)
    left = NAMES if turns else NAMES[:2]
    assert status == 0 and out.startswith(f"{', '.join(left)} in {folder}\n")
    assert err.startswith("embedded is loaded") and "Traceback" not in err
    told = json.loads((folder / "measurements.json").read_text("utf-8"))
    assert {*told} == {*TOLD} and told["num_turns"] == turns
    assert {path.name for path in folder.glob("*.svg")} == {*left}
    for row in told["rows"]:
        assert row.keys() == TOLD["rows"][0].keys()
    drafters = ({row["drafter"] for row in each["rows"]} for each in (told, TOLD))
    assert not turns or next(drafters) == next(drafters)
