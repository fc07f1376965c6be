"""Measurements, run as `python -m benchmarks.NAME`. This file holds what they share.

There is one helper each to load an engine, to run requests, to time one verify, to take turns, to
compare times and to report. The other files know little more of the core than these helpers.

Every benchmark prints tables and then one line of JSON. That line begins with the command, the
commit, the machine and the versions. Methods are run in turn, figures are medians, and the spread
is given as quartiles.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from textwrap import wrap
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

import demo
from control.statistics import Statistics
from kernels import library
from messages import Request
from models.prompts import ids_of
from serving.options import ROOT, Options, between

# A test run has imported the core already. A second copy would have classes of its own.
core: Any = sys.modules.get("speculative_decoding") or importlib.import_module(
    "08_speculative_decoding"
)

AUTO = "auto"  # the drafter that chooses among the others, which takes a controller


# ------------------------------------------------------------------------------------- engines


def load_engine(**options: Any) -> Any:
    """An engine that is ready to run. The options are those of the command line.

    It remembers no prompts, and no past outputs unless told otherwise: what is measured must not
    depend on what was measured before.
    """
    return core.load_engine(
        Options(**{"model": "embedded", "prefix_cache_mb": 0, "suffix_cache": 0} | options)
    )


def without_controller(engine: Any) -> Any:
    """The same models in an engine whose drafts are as long as the request asks for."""
    return core.Engine(engine.target, engine.panel.drafters)


def drafter_names(engine: Any) -> list[str]:
    """The drafters that really draft, which leaves out auto."""
    return list(engine.panel.drafters)


def demo_prompts(engine: Any) -> dict[str, dict[str, list[int]]]:
    """Token ids of the demo prompts by kind (easy, hard, …: how their names begin) and name."""
    found: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for name, ids in ids_of(demo.read_prompts(), engine, is_raw=True).items():
        found[name.partition("_")[0]][name] = ids
    return found


def flat(prompts: dict[str, dict[str, list[int]]]) -> dict[str, list[int]]:
    """The prompts of all kinds by name."""
    return {name: prompt for group in prompts.values() for name, prompt in group.items()}


def random_tokens(vocabulary: int, count: int) -> list[int]:
    """The same ones at every call."""
    chance = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (count,), generator=chance).tolist()


# ------------------------------------------------------------------------------ running requests


class Finished(NamedTuple):
    """What is left of a request."""

    output: list[int]
    statistics: Statistics


def _finished(sequence: Any) -> Finished:
    if sequence.seat.warnings or sequence.finish_reason == "error":
        raise RuntimeError(f"a request was not done as asked: {sequence.seat.warnings}")
    return Finished(sequence.output, sequence.statistics)


def run(engine: Any, request: Request) -> Finished:
    """One request to its end. Raises RuntimeError if it was not done as asked."""
    for sequence, _ in engine.generate(request):
        last = sequence
    return _finished(last)


def run_together(
    engine: Any,
    requests: list[Request],
    num_tokens: int | None = None,
    at_once: int | None = None,
) -> list[Finished]:
    """All requests, each to its end, or until it has `num_tokens`; at most `at_once` in a batch.

    The next one takes the place of one that ends, as it is where clients ask again and again.
    Raises RuntimeError if one was not done as asked.
    """
    sequences, running = list[Any](), list[Any]()
    while running or len(sequences) < len(requests):
        while len(sequences) < len(requests) and len(running) < (at_once or len(requests)):
            sequences.append(engine.open(requests[len(sequences)]))
            running.append(sequences[-1])
        engine.step(running)
        left = []
        for s in running:
            if s.finish_reason or (num_tokens and len(s.output) >= num_tokens):
                engine.close(s)
            else:
                left.append(s)
        running = left
    return list(map(_finished, sequences))


def outputs(finished: list[Finished]) -> list[list[int]]:
    return [one.output for one in finished]


def total(finished: list[Finished]) -> Statistics:
    """The sum of what was counted."""
    return sum((one.statistics for one in finished), Statistics())


def hold(model: Any, prompt: list[int], count: int = 1) -> list[int]:
    """Rows of a model's KV cache that hold the prompt."""
    rows = [model.cache.open_row() for _ in range(count)]
    for row in rows:
        model.forward([row], [prompt], [1])
    return rows


def verifying(model: Any, rows: list[int], tokens: list[int]) -> Callable[[], list[list[int]]]:
    """A function that verifies `tokens` behind what each row holds, and truncates the rows again.

    It returns the model's own choice behind each token, for each row.
    """
    lengths, count = [model.cache.lengths[row] for row in rows], len(tokens)

    @library.alone()
    def verify() -> list[list[int]]:
        found = model.forward(rows, [tokens] * len(rows), [count] * len(rows)).logits
        choices = [logits.argmax(-1).tolist() for logits in found]
        for row, length in zip(rows, lengths, strict=True):
            model.cache.truncate(row, length)
        return choices

    return verify


# --------------------------------------------------------------------------------------- clocks


class Timed(NamedTuple):
    """One call of a method."""

    ms: float
    result: Any


def interleave(
    methods: dict[Any, Callable[[], Any]], runs: int, title: str
) -> dict[Any, list[Timed]]:
    """Call the methods in turn, `runs` times, and once before to warm up.

    They take turns because a machine that is busy for a while should not count against one of them.
    """
    timed: dict[Any, list[Timed]] = {name: [] for name in methods}
    with tqdm(total=(runs + 1) * len(methods), desc=title) as progress:
        for run_index in range(-1, runs):
            for name, method in methods.items():
                began = time.perf_counter()
                result = method()
                ms = (time.perf_counter() - began) * 1e3
                if run_index >= 0:
                    timed[name].append(Timed(ms, result))
                progress.update()
    return timed


def times(calls: list[Timed]) -> list[float]:
    return [call.ms for call in calls]


def median_ms(calls: list[Timed]) -> float:
    return median(times(calls))


class Spread(NamedTuple):
    """A figure of several runs."""

    median: float
    quartiles: list[float]


def speedup(before: list[float], after: list[float]) -> Spread:
    """How many times as fast `after` is as `before`: the times of one run in each other's.

    Example: speedup([10, 30, 20], [5, 10, 20]) is Spread(2.0, [1.5, 2.5]).
    """
    shares = [old / new for old, new in zip(before, after, strict=True)]
    low, middle, high = quantiles(shares, method="inclusive") if len(shares) > 1 else shares * 3
    return Spread(round(middle, 3), [round(low, 3), round(high, 3)])


def places(value: float | None, count: int = 3) -> float | None:
    """A number rounded for the eye. None stays None."""
    return None if value is None else round(value, count)


# -------------------------------------------------------------------------------------- reports


def parser(doc: str, runs: int | None = 5) -> argparse.ArgumentParser:
    """What every benchmark's command line has; --runs only if there is a default for it."""
    result = argparse.ArgumentParser(description=doc.splitlines()[0])
    if runs:
        add_count(result, "--runs", 1, 999, runs, "of each method")
    result.add_argument("--json", action="store_true", help="only the JSON line")
    return result


def add_count(
    options: argparse.ArgumentParser, name: str, low: int, high: int, default: int, text: str
) -> None:
    """An option that is an integer from low to high."""
    text += " (default: %(default)s)"
    options.add_argument(name, type=between(low, high), default=default, help=text)


def report(
    module: str,
    arguments: list[str] | None,
    given: argparse.Namespace,
    results: dict[str, Any],
    tables: list[str],
    readable: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Print the results' `tables`, then as one line of JSON the document, which is returned.

    The document says where and how it was measured, then all options, then the results. `readable`
    makes a table's row of a result's.
    """
    options = {name: value for name, value in vars(given).items() if name != "json"}
    document = _environment(module, arguments) | options | results
    for key in tables:
        if document[key] and not given.json:
            print_table(list(map(readable, document[key])))
            print()
    print(json.dumps(document, default=str))
    return document


def _environment(module: str, arguments: list[str] | None) -> dict[str, Any]:
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join(["python -m", module, *given]),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu("model name"),
            "flags": sorted(_FLAGS & set(_cpu("flags").split())),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


_FLAGS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}


def _cpu(what: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(what)]
    return found[0] if found else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The repository's short hash, with a plus if files differ from it. None outside of git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None


def print_table(rows: list[dict[str, Any]]) -> None:
    """Keys are headings. Words go to the left, numbers to the right, None is a dash."""
    columns = []
    for key in rows[0]:
        values = [row[key] for row in rows]
        decimals = [len(f"{value}".partition(".")[2]) for value in values if type(value) is float]
        texts = [_text(value, max(decimals, default=0)) for value in values]
        heading = wrap(key.replace("_", " "), max(8, *map(len, texts)), break_long_words=False)
        width = max(map(len, heading + texts))
        is_left = str in map(type, values)
        columns.append([heading, [t.ljust(width) if is_left else t.rjust(width) for t in texts]])
    height = max(len(heading) for heading, _ in columns)
    for heading, texts in columns:
        texts[:0] = [line.ljust(len(texts[0])) for line in [""] * (height - len(heading)) + heading]
    for line in zip(*(texts for _, texts in columns), strict=True):
        print("  ".join(line).rstrip())


def _text(value: Any, decimals: int) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)
