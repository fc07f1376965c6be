"""How long is a pass over several positions, ours and llama.cpp's, for each form of weights?

SmolLM2's file is written anew with matrices of each `--weights`, and each `--file` is taken as it
is. Ours verifies so many tokens of one text behind 200; llama-batched-bench decodes one token of
each of so many texts behind 200. They take turns. `ours` and `llama` are milliseconds, medians of
runs, with the quartiles of their ratio. `of_one_row` is our time in our time for one position.

    python -m tools.passes --llama PATH/llama-batched-bench [--rows 1 6 8] [--runs 5] [--json]
        [--weights float32 bfloat16 q8_0 q4_0] [--file MODEL.gguf …]

The memory's speed is measured before and after each model.
"""

import json
import subprocess
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch

import tools as bench
from runtime import kernels
from runtime.models.catalogue import resolve_model
from server.options import between
from tools.servers import memory_gb_per_s
from tools.training.heads import write_gguf

# The format's names of matrices, and its numbers of files with them.
KINDS = {"float32": ("F32", 0), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
BEHIND, NUM_TOKENS = 200, 24


def retype(source: str, path: str, kind: str) -> None:
    """Write the same GGUF file with matrices of another type."""
    reader, (matrices, number) = gguf.GGUFReader(source), KINDS[kind]
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_file_type(number)
    written = "GGUF.", "general.architecture", "general.file_type"  # by the writer itself
    fields = [field for name, field in reader.fields.items() if not name.startswith(written)]
    weights = ((t.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors)
    write_gguf(writer, fields, ((n, w, matrices if w.ndim > 1 else "F32") for n, w in weights))


def theirs(program: str, path: str, rows: list[int]) -> dict[int, float]:
    """Milliseconds of a pass of llama.cpp, by how many texts decode."""
    options = f"-t {torch.get_num_threads()} -npp {BEHIND} -ntg {NUM_TOKENS}"
    options += f" -npl {','.join(map(str, rows))} -c {(BEHIND + NUM_TOKENS) * 16}"
    command = [program, "-m", path, *options.split(), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["pl"]: line["t_tg"] / line["tg"] * 1e3 for line in lines}


def measure(name: str, path: str, flags: Any) -> list[dict[str, Any]]:
    """A row for each number of positions."""
    model = bench.load_engine(model=path, dtype="packed", fixed_k=True, drafter="none").target
    chance, row = torch.Generator().manual_seed(0), model.cache.open_row()
    text = torch.randint(model.vocab_size, (BEHIND,), generator=chance).tolist()
    model.forward([row], [text], [1])

    @kernels.exclusive()
    def verify(count: int) -> None:
        model.forward([row], [text[:count]], [count]).logits[0].argmax(-1).tolist()
        model.cache.truncate(row, BEHIND)

    def ours() -> dict[int, float]:
        time.sleep(0.2)
        calls = {count: partial(verify, count) for count in flags.rows}
        timed = bench.interleave(calls, NUM_TOKENS, "ours")
        return {count: median(calls.ms) for count, calls in timed.items()}

    methods = {"ours": ours, "llama": partial(theirs, flags.llama, path, flags.rows)}
    before, timed = memory_gb_per_s(), bench.interleave(methods, flags.runs, name)
    after, rows = memory_gb_per_s(), []
    for count in flags.rows:
        own, other = ([run[count] for run in timed[method].results] for method in methods)
        share = bench.speedup(own, other)
        rows.append({
            "model": name, "rows": count, "ours_ms": round(median(own), 2),
            "llama_ms": round(median(other), 2), "ours_of_llama": share.median,
            "quartiles": share.quartiles, "memory_gb_per_s": [before, after],
        })  # fmt: skip
    return [row | {"of_one_row": round(row["ours_ms"] / rows[0]["ours_ms"], 2)} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    options.add_argument("--llama", required=True, help="the program llama-batched-bench")
    options.add_argument("--weights", nargs="*", choices=KINDS, default=list(KINDS))
    options.add_argument("--file", nargs="*", default=[], help="GGUF files of your own")
    options.add_argument("--rows", nargs="+", type=between(1, 16), default=[1, 6, 8])
    flags, rows = options.parse_args(arguments), []
    with TemporaryDirectory() as folder:
        for kind in flags.weights:
            path = f"{folder}/{kind}.gguf"
            retype(resolve_model("smollm2"), path, kind)
            rows += measure(f"SmolLM2, {kind}", path, flags)
    for path in flags.file:
        rows += measure(Path(path).name, path, flags)
    bench.report(__spec__.name, arguments, flags, {"results": rows})


if __name__ == "__main__":
    main()
