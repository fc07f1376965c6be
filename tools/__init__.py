"""Measurements, run as `python -m tools.NAME`. This file holds what they share.

Every benchmark prints tables and then one line of JSON (audition only with --json, and figures
writes files). That line begins with the command, the commit, the machine and the versions. Methods
are run in turn, figures are medians, and the spread is given as quartiles.
"""

import runtime.models.startup  # isort: skip  # noqa: F401  (Ctrl-C while torch is imported)
import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from textwrap import wrap
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from drafters import check_name
from runtime.models.chat import chat_ids
from runtime.models.prompts import kind_of, prompt_ids, read_prompts
from runtime.statistics import Statistics
from runtime.values import Engine, Model, Request, RequestError, in_short
from server import core
from server.curve import cpu_name
from server.options import ROOT, Options, between

SPECIAL = "grammar", "prediction"  # drafters for requests that bring one
AUTO = "auto"  # the drafter that chooses among the others, which takes a controller
FORGETFUL = {"prefix_cache_mb": 0, "suffix_cache": 0}  # runs are alike, whatever came before
Kinds = dict[str, dict[str, list[int]]]  # token ids by kind and name of a prompt


# ------------------------------------------------------------------------------------- engines
def names_of(engine: Engine) -> list[str]:
    """The drafters that draft for any text."""
    return [name for name in engine.pool.drafters if name not in SPECIAL]


def load_engine(**options: Any) -> Engine:
    """An engine that is ready to run. The options are those of the command line.

    It remembers no prompts, and no past outputs unless told otherwise: what is measured must not
    depend on what was measured before.
    """
    return core.load_engine(Options(**{"model": "embedded"} | FORGETFUL | options))


def as_words(options: dict[str, Any]) -> list[str]:
    """Options as a command line has them. Example: fixed_k=True, k=4, m=None -> --fixed-k --k 4."""
    found = list[str]()
    for name, value in options.items():
        if value is not None:
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


def by_kind(prompts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What stands under each name, by kind (easy, hard, …: how names begin) and name."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, prompt in prompts.items():
        found[kind_of(name)][name] = prompt
    return found


def prompts_of(path: str | Path) -> dict[str, str]:
    """The prompts of a file by name.

    A .jsonl file has a JSON object per line: {"name": …, "prompt": …}, where the name may be left
    out. Any other file has a prompt per line; empty lines do not count. Raises ValueError.
    """
    lines = [line for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
    read = json.loads if Path(path).suffix == ".jsonl" else lambda line: {"prompt": line}
    entries, prompts = [read(line) for line in lines], dict[str, str]()
    for i, entry in enumerate(entries, 1):
        text = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            raise ValueError(f"{path}: prompt {i} is not an object with the field prompt, a text")
        prompts[str(entry.get("name", i))] = text
    if not prompts or len(prompts) < len(entries):
        raise ValueError(f"{path}: {'a name stands twice' if prompts else 'there are no prompts'}")
    return prompts


def ids_of(texts: dict[str, str], target: Model, is_raw: bool = False) -> dict[str, list[int]]:
    """Token ids of these prompts, in the model's chat template if it has one and `is_raw` is false.

    Raises RequestError for a prompt that does not fit.
    """
    tokenizer, length = target.tokenizer, target.max_length
    read = chat_ids if tokenizer.chat_template and not is_raw else prompt_ids
    return {name: read(text, tokenizer, length) for name, text in texts.items()}


# Talk, summaries of texts, code: none of it in any training data of ours.
CHATS = by_kind(prompts_of(ROOT / "tools" / "chat.jsonl"))


def chats(engine: Engine, each: int) -> Kinds:
    """Token ids of CHATS, or of the demo prompts if there is no chat template; `each` of a kind."""
    kinds = CHATS if engine.target.tokenizer.chat_template else by_kind(read_prompts())
    few = {kind: dict(islice(texts.items(), each)) for kind, texts in kinds.items()}
    return {kind: ids_of(texts, engine.target) for kind, texts in few.items()}


def flat(prompts: Kinds) -> dict[str, list[int]]:
    """The prompts of all kinds by name."""
    return {name: prompt for group in prompts.values() for name, prompt in group.items()}


# ------------------------------------------------------------------------------ running requests
class Finished(NamedTuple):
    """What is left of a request."""

    output: list[int]
    statistics: Statistics


def run_together(
    engine: Engine, requests: list[Request], num_tokens: float = math.inf,
    at_once: int | None = None, at_end: Callable[[], Any] = lambda: None,
) -> list[Finished]:  # fmt: skip
    """All requests, each to its end, or until it has `num_tokens`; at most `at_once` in a batch.

    The next one takes the place of one that ends, as it is where clients ask again and again;
    `at_end` is called for each. Raises RequestError if one was not done as asked.
    """
    waiting, running, done = list(enumerate(requests)), dict[Any, int](), dict[int, Finished]()
    while waiting or running:
        while waiting and len(running) < (at_once or len(requests)):
            i, request = waiting.pop(0)
            running[engine.open(request)] = i
        engine.step(list(running))
        for s in [s for s in running if s.finish_reason or len(s.output) >= num_tokens]:
            engine.close(s)
            if s.warnings or s.finish_reason == "error":
                why = "; ".join(s.warnings)
                raise RequestError(f"a request was not done as asked: {why}") from s.failure
            done[running.pop(s)] = Finished(s.output, s.statistics)
            at_end()
    return [done[i] for i in range(len(requests))]


def total(finished: Iterable[Finished]) -> Statistics:
    """The sum of what was counted."""
    return sum((one.statistics for one in finished), Statistics())


@contextmanager
def kept_at_the_end(has_some: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C within it ends the measuring, and so does a failed request if something is there."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    except (RequestError, RuntimeError, OSError) as error:
        if not has_some():
            raise
        print(f"ended early: {in_short(error)}", file=sys.stderr)


def write_whole(file: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file in one piece, or none of it: it gets its name at the end."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    try:
        with open(part, "wb") as opened:
            write(opened)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text in one piece, or none of it."""
    write_whole(file, lambda part: part.write(text.encode()))


# --------------------------------------------------------------------------------------- clocks
class Calls(NamedTuple):
    """All calls of a method: how long each took, and what it returned."""

    ms: list[float]
    results: list[Any]


def interleave(methods: dict[Any, Callable[[], Any]], runs: int, title: str) -> dict[Any, Calls]:
    """Call the methods in turn, `runs` times, and once before to warm up.

    They take turns because a machine that is busy for a while should not count against one of them.
    """
    timed = {name: Calls([], []) for name in methods}
    for i, name in enumerate(tqdm([*methods] * (runs + 1), desc=title)):
        began = time.perf_counter()
        result = methods[name]()
        ms = (time.perf_counter() - began) * 1e3
        if i >= len(methods):
            timed[name].ms.append(ms)
            timed[name].results.append(result)
    return timed


def by_run(timed: dict[Any, Calls], *begins: Any) -> list[tuple]:
    """What came of each run, of the methods whose names begin so."""
    chosen = [each.results for key, each in timed.items() if key[: len(begins)] == begins]
    return list(zip(*chosen, strict=True))


class Spread(NamedTuple):
    """A figure of several runs."""

    median: float
    quartiles: list[float]


def spread(figures: Sequence[float]) -> Spread:
    """The median and the quartiles of the figures of all runs."""
    low, middle, high = np.quantile(figures, (0.25, 0.5, 0.75)).round(3).tolist()
    return Spread(middle, [low, high])


def speedup(before: Sequence[float], after: Sequence[float]) -> Spread:
    """How many times as fast `after` is as `before`: the times of one run in each other's.

    Example: speedup([10, 30, 20], [5, 10, 20]) is Spread(2.0, [1.5, 2.5]).
    """
    return spread(np.divide(before, after))


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


def add_count(options: Any, name: str, low: int, high: int, default: int, text: str) -> None:
    """An option that is an integer from low to high."""
    text += " (default: %(default)s)"
    options.add_argument(name, type=between(low, high), default=default, help=text)


def drafter(text: str) -> str:
    """An argparse type: what a request may name. A file's class is loaded, and not kept."""
    try:
        check_name(text)
        if ":" in text:
            from drafters.from_file import class_from_file

            class_from_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def report(
    module: str, arguments: Any, flags: Any, results: dict[str, Any], readable: Callable = dict
) -> None:
    """Print all tables among the results, then as one line of JSON the document.

    `readable` makes a table's row of a result's.
    """
    if not flags.json:
        print(tables(results, readable), end="")
    print(json.dumps(document(module, arguments, flags) | results, default=str))


def document(module: str, arguments: list[str] | None, flags: Any) -> dict[str, Any]:
    """Where and how something was measured, then all options."""
    options = {name: value for name, value in vars(flags).items() if name != "json"}
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join(["python -m", module, *words]),
        "commit": _commit(),
        "hardware": {
            "cpu": cpu_name(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
    } | options


def _commit() -> str | None:
    """The repository's short hash, with a plus if files differ from it. None outside of git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+"]
    with suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() or None


def tables(results: dict[str, Any], readable: Callable = dict) -> str:
    """The lists of rows among the results as tables, with an empty line behind each."""
    lists = (rows for rows in results.values() if rows and isinstance(rows[0], dict))
    return "".join(f"{table(list(map(readable, rows)))}\n\n" for rows in lists)


def table(rows: list[dict[str, Any]]) -> str:
    """Keys are headings. Words go to the left, numbers to the right, None is a dash."""
    columns = []
    for key in rows[0]:
        values = [row[key] for row in rows]
        decimals = [len(f"{value}".partition(".")[2]) for value in values if type(value) is float]
        texts = [_text(value, max(decimals, default=0)) for value in values]
        heading = wrap(key.replace("_", " "), max(8, *map(len, texts)), break_long_words=False)
        width = max(map(len, heading + texts))
        align = str.ljust if str in map(type, values) else str.rjust
        columns.append([t.ljust(width) for t in [*heading, *(align(t, width) for t in texts)]])
    height = max(map(len, columns))
    padded = [[" " * len(column[0])] * (height - len(column)) + column for column in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _text(value: Any, decimals: int) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)
