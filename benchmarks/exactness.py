"""What does a forward cost, by its rows, and what do equal bits add?

Two copies of one model, one computed in C and one by transformers' modules (`--no-kernels`), take
turns. The cost is the ratio of their times, less 1; below 0 equal bits are faster. One row is a
step of plain decoding, six are a verify of five drafts, the batch is eight verifies at once;
prompts are read from nothing. t_verify is in forwards over one row.

    python -m benchmarks.exactness [--shape demo|0.6b] [--dtype float32|bfloat16] [--model DIR]
        [--context 300] [--runs 25] [--json]
"""

from collections.abc import Callable
from typing import Any

import benchmarks as bench

ROWS = (1, 2, 4, 6, 9, 17)
PROMPTS = (20, 256, 1000)
TEXT = 1900  # tokens


def methods_of(model: Any, text: list[int], context: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    held = bench.hold(model, text[:context], 8)

    def prompt(length: int) -> Callable[[], None]:
        def read() -> None:
            row = model.cache.open_row()
            model.forward([row], [text[:length]], [1]).logits[0].argmax().item()
            model.cache.close_row(row)

        return read

    methods = {f"{n} row{'s' * (n > 1)}": bench.verifying(model, held[:1], text[:n]) for n in ROWS}
    methods["batch of 8, 1 row each"] = bench.verifying(model, held, text[:1])
    methods["batch of 8, 6 rows each"] = bench.verifying(model, held, text[:6])
    return methods | {f"prompt of {length}": prompt(length) for length in PROMPTS}


def measure(models: dict[bool, Any], context: int, runs: int) -> list[dict[str, Any]]:
    """One row per forward; the models by whether the kernels compute them."""
    text = bench.random_tokens(models[True].vocab_size, TEXT)
    by_model = {kernels: methods_of(model, text, context) for kernels, model in models.items()}
    names = list(by_model[True])
    methods = {(name, kernels): by_model[kernels][name] for name in names for kernels in models}
    timed = bench.interleave(methods, runs, "forwards")
    rows = []
    for name in names:
        ms = bench.median_ms(timed[name, True])
        found = bench.speedup(bench.times(timed[name, True]), bench.times(timed[name, False]))
        rows.append(
            {
                "what": name,
                "ms": round(ms, 3),
                "ms_modules": round(bench.median_ms(timed[name, False]), 3),
                "cost": round(found.median - 1, 3),
                "quartiles": [round(share - 1, 3) for share in found.quartiles],
                "t_verify": round(ms / bench.median_ms(timed["1 row", True]), 3),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=25)
    bench.add_model(options)
    options.add_argument("--model", help="a folder, in place of a shape")
    bench.add_count(options, "--context", 17, TEXT, 300, "tokens before")
    given = options.parse_args(arguments)
    size = {"dtype": given.dtype, "max_running": 9, "max_model_len": 2048}  # eight, and a prompt
    with bench.model_folder(given.shape, given.dtype) as folder:
        models = {
            kernels: bench.load_engine(model=given.model or folder, kernels=kernels, **size).target
            for kernels in (True, False)
        }
    shapes = {"exactness": models[True].report.as_dict()}
    costs = measure(models, given.context, given.runs)
    bench.report(__spec__.name, arguments, given, shapes | {"costs": costs}, ["costs"])


if __name__ == "__main__":
    main()
