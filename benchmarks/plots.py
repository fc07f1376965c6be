"""Lines for the eye: what `--plot FILE.png` of a benchmark draws, if matplotlib is installed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Lines = dict[str, list[tuple[float | str, float]]]  # label: points (x, y)


def lines(
    rows: list[dict[str, Any]], label: Callable[[dict[str, Any]], str] | str, x: str, y: str
) -> Lines:
    """Points (row[x], row[y]) by label, a key or a function of the row; rows without y are skipped.

    Example: lines([{"k": 1, "ms": 5.0, "who": "a"}], "who", "k", "ms") -> {"a": [(1, 5.0)]}.
    """
    found: Lines = {}
    for row in rows:
        if row[y] is not None:
            name = row[label] if isinstance(label, str) else label(row)
            found.setdefault(name, []).append((row[x], row[y]))
    return found


def save(
    file: str,
    panels: dict[str, Lines],
    x_label: str,
    y_label: str,
    is_log: bool = False,
    level: float | None = None,
    are_joined: bool = True,
) -> None:
    """One panel of lines (or, not joined, points) beside the other. `level` draws a dashed line at
    that height. Without y_label each panel has a scale of its own.

    Says on stderr what became of it; without matplotlib nothing is drawn.
    """
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed, so there is the table but no plot", file=sys.stderr)
        return
    matplotlib.use("agg")  # files, no windows
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 4.5 * len(panels), 4), sharey=bool(y_label), squeeze=False
    )
    for axis, (title, drawn) in zip(axes[0], panels.items(), strict=True):
        for label, points in drawn.items():
            is_word = isinstance(points[0][0], str)  # nothing lies between words
            style = "-" if are_joined and not is_word else "none"
            axis.plot(*zip(*points, strict=True), linestyle=style, marker="o", label=label)
        if level is not None:
            axis.axhline(level, color="grey", linestyle="--", linewidth=1)
        if is_log:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
        axis.set(title=title, xlabel=x_label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel(y_label)
    figure.tight_layout()
    figure.savefig(Path(file), dpi=120)
    pyplot.close(figure)
    print(f"drew {file}", file=sys.stderr)
