"""Draws the five pictures that a lecture needs, as SVG files, from measurements of this machine.

    python -m tools.figures DIR [--minutes 3] [--tokens 96] [--model …] [--draft-model …] …
    python -m tools.figures DIR --from DIR/measurements.json

The first command measures as tools.audition does, whose options it takes, and writes the pictures
and measurements.json into DIR. The second one draws again. Ctrl-C ends the race early. What was not
measured is not drawn, and a picture that would be empty is left out.

    tokens.svg      tokens a pass by α and K: the formula, and this machine's drafters
    pass.svg        the time of a pass by its positions
    speedup.svg     each drafter's speed in that of plain decoding, by kind of text
    break_even.svg  what share of drafted tokens must be accepted by K, and what share was
    positions.svg   the share accepted by position in the draft

α is the chance that a drafted token is accepted once those before it are. A draft of K tokens of
which the share s is accepted saves s · K plain passes. It pays where that is more than what it
takes to draft it, and to verify it beyond a plain pass.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from io import StringIO
from itertools import cycle
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill
from typing import Any

import numpy as np

import tools as bench
from runtime.statistics import ratio
from runtime.values import PLAIN, Json, in_short, one_line
from server import demo
from server.comparison import costs_of
from server.curve import Curve
from server.options import Options
from tools import audition

ALL, MEASUREMENTS = "all", "measurements.json"
# Okabe and Ito's colours, which nearly everybody can tell apart. In grey marks and dashes tell.
_FAST, _SLOW, _GREY = "#0072b2", "#d55e00", "#666666"
_COLOURS = _FAST, _SLOW, "#009e73", "#cc79a7", "#b07800", "#3a9bd0", "#000000"
_LOOKS = list(zip(_COLOURS, "osD^vPX", ["-", "--", "-.", ":"] * 2, strict=False))
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "figures", "text.parse_math": False, "font.size": 22,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 22,
    "axes.axisbelow": True, "lines.linewidth": 4, "lines.markersize": 15, "hatch.linewidth": 2,
}  # fmt: skip
_KS = 1, 2, 3, 5, 8  # of the formula's lines
_GAP = 0.075  # between names, in the height of a picture
_LONGEST = 14  # letters of a drafter's name
_BESIDE = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
Words = tuple[str, str] | None  # a picture's title and small print; None: there is nothing to draw


# ------------------------------------------------------------------------------- measurements
def rows_of(raced: audition.Raced) -> Iterator[Json]:
    """The figures of each drafter, on all prompts and on those of each kind."""
    for kind, prompts in ({ALL: bench.flat(raced.kinds)} | raced.kinds).items():
        turns = [turn for turn in raced.turns if turn[PLAIN].prompt in prompts]
        for way, fields in raced.ways.items() if turns else ():
            if way in (PLAIN, audition.AGAIN):
                continue
            own, plain = (bench.total([t[one].finished for t in turns]) for one in (way, PLAIN))
            yield audition.row_of(turns, way) | {
                "prompts": kind, "drafter": one_line(fields["drafter"])[:_LONGEST],
                "k": fields["num_speculative_tokens"] if "fixed_k" in fields else None,
                "draft_length": ratio(own.num_draft_tokens, own.num_spec_steps),
                "alpha": costs_of(own, plain)["alpha"],
                "accepted_at": own.per_position()["acceptance_rate_per_position"],
            }  # fmt: skip


def measure(
    flags: argparse.Namespace, options: Options, texts: dict[str, str], arguments: list[str] | None
) -> Json:
    """Race, and return what measurements.json has."""
    tell = partial(print, file=sys.stderr, flush=True)
    tell(f"{options.title} is loaded, and its passes are measured. Then drafters race for")
    tell(f"{flags.minutes:g} minutes, {flags.tokens} tokens a text. Ctrl-C ends the race early.")
    raced = audition.hold(flags, options, texts, lambda turns: tell(f"turn {len(turns)} is over"))
    turns = raced.turns
    return bench.document(__spec__.name, arguments, flags) | {
        "title": options.title, "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_turns": len(turns), "noise": audition.noise_of(turns) if turns else None,
        "curve": asdict(raced.curve), "kinds": [*raced.kinds], "rows": list(rows_of(raced)),
    }  # fmt: skip


def drafters_of(told: Json, *fields: str) -> tuple[list[tuple[Json, tuple[str, str, Any]]], str]:
    """Who drafted with a fixed K, and how each is drawn; and who is missing, in a sentence.

    Those are missing of whom one of these fields is not known.
    """
    rows = [row for row in told["rows"] if row["prompts"] == ALL]
    unknown, names = (None, []), ("k", *fields)
    known = [row for row in rows if all(row[name] not in unknown for name in names)]
    others = [row["drafter"] for row in rows if row not in known] if rows else ["all drafters"]
    looks = [each for each in zip(rows, cycle(_LOOKS), strict=False) if each[0] in known]
    return looks, missing(others, "Not measured, or without a K of its own")


def missing(what: list[Any], why: str) -> str:
    """A sentence of small print, if there is anything."""
    return f" {why}: {', '.join(map(str, what))}." if what else ""


# ----------------------------------------------------------------------------------- formulas
def expected_tokens(alpha: float, k: int) -> float:
    """Tokens of a pass that verifies K drafted ones. Example: (.5, 2) -> 1 + .5 + .25."""
    return sum(alpha**i for i in range(k + 1))


def needed_of(curve: Curve, row: Json) -> dict[int, float]:
    """The share of drafted tokens that must be accepted, by K, where the pass was measured.

    A drafter that is not in the curve runs no model: a token takes what it took in the race.
    Example: passes of 10 ms, and 12 for three rows; a draft of two takes 4 -> {2: (2 + 4) / 20}.
    """
    plain = curve.pass_ms[1]
    cycles = audition.cycle_ms(curve, row["drafter"], row["to_draft"] * plain)
    return {k: (ms - plain) / (k * plain) for k, ms in cycles.items()}


# ----------------------------------------------------------------------------------- pictures
def tokens(figure: Any, told: Json, _: Curve) -> Words:
    """Lines of the formula; each drafter as measured, and where the formula has it."""
    axes, alphas = figure.subplots(), np.linspace(0, 1, 201)
    for k in _KS:
        axes.plot(alphas, [expected_tokens(alpha, k) for alpha in alphas], color=_GREY, lw=2.5)
        axes.annotate(f"K = {k}", (1, k + 1), (12, 0), **_BESIDE)
    known, unknown = drafters_of(told, "alpha", "tok_pass")
    for row, (colour, mark, _) in known:
        alpha, found, own = row["alpha"], row["tok_pass"], expected_tokens(row["alpha"], row["k"])
        axes.plot([alpha] * 2, [own, found], ":", color=colour, lw=2)
        axes.plot(alpha, own, mark, color=colour, mfc="white", mew=2.5, zorder=3)
        label = f"{row['drafter']}: α = {alpha:.2f}, K = {row['k']}, {found:.2f} tokens"
        axes.plot(alpha, found, mark, color=colour, label=label, zorder=4, clip_on=False)
        axes.legend(loc="upper left", frameon=False, handletextpad=0.1, borderpad=0)
    axes.set(xlabel="α, the chance that a drafted token is accepted if those before it are")
    axes.set(ylabel="tokens a pass", xlim=(0, 1), ylim=(0.8, max(_KS) + 1.5))
    return (
        "Better guesses bring more than longer drafts: at α = 0.5 no K brings 2 tokens a pass",
        "Lines: 1 + α + … + α^K. Filled marks: measured. Hollow ones: the formula for the same α "
        "and K, which is above where drafts were shorter than K, or not made in each pass."
        + unknown,
    )


def time_of_a_pass(figure: Any, told: Json, curve: Curve) -> Words:
    """The curve, and what it would be if positions were free, or came one by one."""
    rows, ms = [*curve.pass_ms], [*curve.pass_ms.values()]
    if rows[:1] != [1] or len(rows) < 2:
        return None
    axes, most, top = figure.subplots(), rows[-1], max(1.15 * max(ms), 3 * ms[0])
    end = min(most, top / ms[0])  # of what goes one by one
    lines = (rows, ms, "o-", _FAST), ([1, most], ms[:1] * 2, "--", _SLOW)
    for xs, ys, look, colour in (*lines, ([1, end], [ms[0], end * ms[0]], ":", _GREY)):
        axes.plot(xs, ys, look, color=colour, ms=11)
    above, below = _BESIDE | {"va": "bottom"}, _BESIDE | {"va": "top"}
    axes.annotate("measured", (most, ms[-1]), (14, -5), color=_FAST, **above)
    axes.annotate("if they\nwere free", (most, ms[0]), (14, 9), color=_SLOW, **below)
    axes.annotate("one by one", (end, end * ms[0]), (14, -16), color=_GREY, **_BESIDE)
    axes.set(xlabel="positions in a pass", ylabel="ms", xlim=(0, most + 0.5), ylim=(0, top))
    near = min(rows[1:], key=lambda each: abs(each - 6))
    return (
        f"{near} positions take {curve.pass_ms[near] / ms[0]:.1f} times as long as one, not {near}",
        f"Each point is the shortest of a few passes, behind about {curve.context} tokens."
        + missing([each for each in curve.rows if each not in rows], "Positions not measured"),
    )


def speed_up(figure: Any, told: Json, _: Curve) -> Words:
    """A panel for each kind of prompts, and there a bar for each drafter."""
    kinds = list(dict.fromkeys(row["prompts"] for row in told["rows"]))
    if not kinds:
        return None
    panels = panels_of(figure, len(kinds), 4, "times plain decoding")
    for axes, kind in zip(panels, kinds, strict=True):
        for row in (row for row in told["rows"] if row["prompts"] == kind):
            name, speed, ends = row["drafter"], row["of_plain"], row["quartiles"]
            look = {"color": _FAST} if speed > 1 else {"fc": "white", "ec": _SLOW, "hatch": "//"}
            axes.barh(name, speed, height=0.65, lw=2, **look)
            axes.plot(ends, [name] * 2, "|-", color="black", lw=3, ms=18, mew=3)
            axes.annotate(f"{speed:.2f}", (max(speed, *ends), name), (10, 0), **_BESIDE)
        axes.axvspan(1 - told["noise"], 1 + told["noise"], color=_GREY, alpha=0.3, lw=0)
        axes.axvline(1, color="black", lw=2)
        axes.set_title(f"{kind} texts", loc="left")
    right = max(max(row["of_plain"], *row["quartiles"]) for row in told["rows"])
    panels[0].set(xlim=(0, 1.35 * max(right, 1)), xticks=sorted({0, 1, round(right)}))
    panels[0].invert_yaxis()
    best = max((r for r in told["rows"] if r["prompts"] == ALL), key=lambda row: row["of_plain"])
    title = f"{best['drafter']} writes {best['of_plain']:.1f} times as fast as plain decoding"
    if best["of_plain"] <= 1 + told["noise"]:
        title = "No drafter gains more than the noise here"
    return (
        title,
        "Bars: all texts' time, with their prompts'. Black: quartiles of turns. Grey: noise, what "
        f"two plain decodings differ by ({told['noise']:.2f}). Drafts have a fixed K, but auto's."
        + missing([each for each in told["kinds"] if each not in kinds], "No turn was over of"),
    )


def break_even(figure: Any, told: Json, curve: Curve) -> Words:
    """A panel for each drafter: the line of what must be accepted, and the point of what was."""
    found, unknown = drafters_of(told, "accepted", "draft_length", "needed")
    if not found or not {1, 2} <= curve.pass_ms.keys():
        return None
    above = 0
    panels = panels_of(figure, len(found), 3, "tokens in a draft")
    for axes, (row, (colour, mark, _)) in zip(panels, found, strict=True):
        line, (k, share) = needed_of(curve, row), (row["draft_length"], row["accepted"])
        above += (is_above := share > np.interp(k, [*line], [*line.values()]))
        axes.plot([*line], [*line.values()], ".-", color="black", lw=3)
        axes.fill_between([*line], [*line.values()], 1.05, color=_FAST, alpha=0.15, lw=0)
        axes.plot(k, share, mark, color=colour, ms=20, clip_on=False)
        place = "above" if is_above else "below"
        axes.set_title(f"{row['drafter']}: {share:.2f}, {place}", loc="left")
    panels[0].set(xlim=(0.5, max(line)), ylim=(0, 1.05), xticks=[1, 4, 8, 12, 16])
    figure.supylabel("share accepted")
    return (
        f"A drafter pays above its line: {above} of {len(found)} are there",
        "Lines: what must be accepted, by the times of passes and drafts alone: prompts and the "
        f"rest of a cycle do not count. Points: what was, at the mean length of drafts.{unknown}",
    )


def by_position(figure: Any, told: Json, _: Curve) -> Words:
    """A line for each drafter, with its name at the end."""
    found, unknown = drafters_of(told, "accepted_at", "tok_pass")
    if not found:
        return None
    axes, most = figure.subplots(), max(len(row["accepted_at"]) for row, _ in found)
    found.sort(key=lambda each: each[0]["accepted_at"][-1])
    place = 0.0
    for i, (row, (colour, mark, dashes)) in enumerate(found, 1):
        shares = row["accepted_at"]
        # A label is above the one before, and leaves room for those to come.
        place = min(max(place + _GAP, shares[-1]), 1 - (len(found) - i) * _GAP)
        axes.plot(range(1, len(shares) + 1), shares, marker=mark, ls=dashes, color=colour)
        ends = [len(shares), 1.1 * most], [shares[-1], place]
        axes.plot(*ends, color=colour, lw=1.5, clip_on=False)
        axes.annotate(row["drafter"], (1.1 * most, place), (6, 0), color=colour, **_BESIDE)
    axes.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1.02))
    axes.set(xlim=(0.8, most + 0.05), xticks=range(1, most + 1))
    best = max(found, key=lambda each: each[0]["tok_pass"])[0]
    shares = best["accepted_at"]
    return (
        f"{best['drafter']}: the first token stays in {shares[0]:.0%}, number {len(shares)} in "
        f"{shares[-1]:.0%}",
        "Of the drafts that have such a position. A token is accepted where those before it are."
        + unknown,
    )


def panels_of(figure: Any, number: int, most: int, label: str) -> list[Any]:
    """So many axes alike, at most `most` in a row, with this label below each column."""
    columns = ceil(number / ceil(number / most))
    grid = figure.subplots(ceil(number / columns), columns, sharex=True, sharey=True, squeeze=False)
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < number)
        if i + columns >= number:  # nothing is below it
            axes.set_xlabel(label)
            axes.xaxis.set_tick_params(labelbottom=True)
    return list(grid.flat[:number])


PICTURES = {
    "tokens": tokens, "pass": time_of_a_pass, "speedup": speed_up, "break_even": break_even,
    "positions": by_position,
}  # fmt: skip


def source_of(told: Json) -> str:
    """Where, when and how it was measured."""
    machine, day = told["hardware"], datetime.fromisoformat(told["measured_at"]).date()
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    how = f"{told['num_turns']} turns of up to {told['tokens']} tokens"
    how += f" at temperature {told['temperature']:g}"
    return one_line(f"{where} · {told['title']} · {day} · {how}")


def figure_of(name: str, told: Json) -> Any:
    """A picture as matplotlib has it; None if there is nothing to draw."""
    from matplotlib.figure import Figure

    curve = Curve.of(told["curve"]) if told["curve"]["pass_ms"] else Curve()
    figure = Figure((16, 9), layout="constrained")
    if words := PICTURES[name](figure, told, curve):
        figure.suptitle(fill(words[0], 64), x=0.02, ha="left", fontsize=30, weight="bold")
        small = fill(f"{words[1]} {source_of(told)}", 165)
        figure.supxlabel(small, x=0.02, ha="left", fontsize=13, color="#444444")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15, hspace=0.04)
    return figure if words else None


def draw(told: Json) -> dict[str, str]:
    """The pictures' files by name: the same for the same measurements."""
    import matplotlib

    drawn = dict[str, str]()
    with matplotlib.rc_context():  # whatever a user has set
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        for name in PICTURES:
            if figure := figure_of(name, told):
                figure.savefig(file := StringIO(), format="svg", metadata={"Date": None})
                drawn[f"{name}.svg"] = file.getvalue()
    return drawn


# --------------------------------------------------------------------------------------- files
def act(arguments: list[str] | None) -> int:
    """Measure or read, draw, and write. Returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", metavar="DIR", type=Path, help="where the pictures go")
    text = "an earlier measurements.json: nothing is measured"
    options.add_argument("--from", dest="stored", metavar="FILE", type=Path, help=text)
    audition.add_options(options)
    flags = options.parse_args(arguments)
    if not find_spec("matplotlib"):
        raise ValueError("matplotlib draws: .venv/bin/pip install -r requirements-dev.txt")
    checked, folder = () if flags.stored else audition.check(flags), flags.folder
    try:
        folder.mkdir(exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write into {folder}: {error.strerror}") from error
    if flags.stored:
        text = flags.stored.read_text("utf-8")
    else:
        text = json.dumps(measure(flags, *checked, arguments), indent=1, default=str)
        bench.write_text(folder / MEASUREMENTS, text)  # whatever comes of the pictures
    try:
        drawn = draw(json.loads(text))
    except Exception as error:  # anything may stand in a file
        why = in_short(error, has_kind=True)
        raise ValueError(f"{flags.stored or MEASUREMENTS} cannot be drawn: {why}") from error
    for name, content in ({MEASUREMENTS: text} | drawn).items():
        bench.write_text(folder / name, content)
    left_out = [name for name in PICTURES if f"{name}.svg" not in drawn]
    for name in left_out:  # no other measurements' picture stays
        (folder / f"{name}.svg").unlink(missing_ok=True)
    print(f"{', '.join(drawn)} in {folder}")
    if left_out:
        print(f"not drawn, as nothing was measured for it: {', '.join(left_out)}")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line as the demo's is run: a mistake is one line."""
    sys.exit(demo.exit_status(partial(act, arguments)))


if __name__ == "__main__":
    main()
