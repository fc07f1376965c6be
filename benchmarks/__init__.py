"""Measurements, run as `python -m benchmarks.NAME`; here is what they share.

The core under one name, engines whose K stays fixed, models with random weights, clocks, tables.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

from serving.options import ROOT, between
from serving.parsing import RequestError, check_fields

# A test run has imported it already; a second copy would have classes of its own.
core: Any = sys.modules.get("speculative_decoding") or importlib.import_module(
    "08_speculative_decoding"
)

_QWEN3 = {"head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40_960}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": _QWEN3
    | {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}

# -------------------------------------------------------------------------- engines and prompts


def fixed_engine(**options: Any) -> Any:
    """An engine that drafts as many tokens as it is asked for, whether that pays or not."""
    engine = core.load_engine(core.Options(fixed_k=True, **options))
    del engine.drafters["auto"]  # it chooses among the others, which needs a controller
    return engine


@contextmanager
def model_folder(shape: str, dtype: str) -> Iterator[str]:
    """A model to load: "demo" is the embedded target, the others of SHAPES have random weights."""
    if shape == "demo":
        yield core.Options.model
        return
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **SHAPES[shape])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Its ids are the first few thousand; the others have no text.
        transformers.AutoTokenizer.from_pretrained(core.Options.model).save_pretrained(folder)
        del model
        yield folder


Prompts = dict[str, dict[str, list[int]]]  # token ids by kind and name


def demo_prompts(tokenizer: Any, kinds: list[str] | None = None) -> Prompts:
    """The demo prompts of these kinds (easy, hard, …: how their names begin), or all of them.

    Exits with one line on stderr if there is no such kind.
    """
    found: Prompts = defaultdict(dict)
    for name, text in core.read_prompts().items():
        found[name.partition("_")[0]][name] = tokenizer(text)["input_ids"]
    if unknown := [kind for kind in kinds or () if kind not in found]:
        print(f"error: no {unknown[0]} prompts: choose from {', '.join(found)}", file=sys.stderr)
        raise SystemExit(2)
    return {kind: found[kind] for kind in kinds or found}


def flat(prompts: Prompts) -> dict[str, list[int]]:
    """All of them by name."""
    return {name: prompt for group in prompts.values() for name, prompt in group.items()}


class Run(NamedTuple):
    """What several requests gave."""

    outputs: list[list[int]]
    statistics: Any  # their sum


def generate_all(
    engine: Any,
    prompts: list[list[int]],
    num_tokens: int,
    drafter: str | None = None,
    k: int = 0,
    temperature: float = 0.0,
) -> Run:
    """One request after another, each with its place in the list as seed.

    Raises RuntimeError if one of them was not done as asked.
    """
    outputs, total, sampling = [], core.Statistics(), core.Sampling(temperature=temperature)
    for seed, prompt in enumerate(prompts):
        request = core.Request(prompt, num_tokens, drafter, k, sampling=sampling, seed=seed)
        *_, (sequence, _) = engine.generate(request)
        if sequence.warnings:
            raise RuntimeError(sequence.warnings[0])
        outputs.append(sequence.output)
        total += sequence.statistics
    return Run(outputs, total)


# --------------------------------------------------------------------------------------- clocks


class Timed(NamedTuple):
    """One call of a method."""

    ms: float
    result: Any


def interleave(
    methods: dict[Any, Callable[[], Any]], runs: int, title: str
) -> dict[Any, list[Timed]]:
    """Call the methods in turn, `runs` times and once before to warm up.

    In turn, because a machine that is busy for a while should not count against one of them.
    """
    timed: dict[Any, list[Timed]] = {name: [] for name in methods}
    with tqdm(total=(runs + 1) * len(methods), desc=title) as progress:
        for run in range(-1, runs):
            for name, method in methods.items():
                began = time.perf_counter()
                result = method()
                ms = (time.perf_counter() - began) * 1e3
                if run >= 0:
                    timed[name].append(Timed(ms, result))
                progress.update()
    return timed


def places(value: float | None, count: int = 3) -> float | None:
    """A number rounded for the eye; None stays."""
    return None if value is None else round(value, count)


def median_ms(timed: list[Timed]) -> float:
    return median(call.ms for call in timed)


# -------------------------------------------------------------------------------------- reports


def parser(doc: str, runs: int = 5) -> argparse.ArgumentParser:
    """What every benchmark's command line has."""
    result = argparse.ArgumentParser(description=doc.splitlines()[0])
    result.add_argument(
        "--runs", type=between(1, 999), default=runs, help="of each method (default: %(default)s)"
    )
    result.add_argument("--json", action="store_true", help="only the JSON line")
    result.add_argument("--plot", metavar="FILE.png", help="draw the results, too (matplotlib)")
    return result


def check_temperatures(options: argparse.ArgumentParser, values: list[float]) -> None:
    """Exits with one line on stderr if one of them is out of range."""
    try:
        for value in values:
            check_fields({"temperature": value})
    except RequestError as error:
        options.error(str(error))


def describe(module: str, arguments: list[str] | None) -> dict[str, Any]:
    """Where and how a measurement was made: the beginning of its document."""
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
    """The repository's short hash, with a plus if files differ from it; None outside of git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None


def print_table(rows: list[dict[str, Any]]) -> None:
    """Keys as headings; words to the left, numbers to the right, a dash for None."""
    columns = []
    for key in rows[0]:
        values = [row[key] for row in rows]
        decimals = [len(f"{value}".partition(".")[2]) for value in values if type(value) is float]
        texts = [_text(value, max(decimals, default=0)) for value in values]
        heading = wrap(key.replace("_", " "), max(8, *map(len, texts)), break_long_words=False)
        columns.append((heading, texts, str in map(type, values)))
    height = max(len(heading) for heading, _, _ in columns)
    cells = []
    for heading, texts, is_left in columns:
        lines = [""] * (height - len(heading)) + heading + texts
        width = max(map(len, lines))
        cells.append([line.ljust(width) if is_left else line.rjust(width) for line in lines])
    for line in zip(*cells, strict=True):
        print("  ".join(line).rstrip())


def _text(value: Any, decimals: int) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)


def finish(
    given: argparse.Namespace, document: dict[str, Any], tables: list[str], plot: dict[str, Any]
) -> None:
    """Print the document's `tables` and, as one line, the document; draw the `plot` if asked."""
    if not given.json:
        for key in filter(document.get, tables):
            print_table(document[key])
            print()
    print(json.dumps(document))
    if given.plot:
        from benchmarks import plots

        plots.save(given.plot, **plot)
