"""What equal bits cost: the same forwards with and without the shapes that give them.

    python -m benchmarks.exactness --shape demo --dtype float32

Two copies of one model, one as `--bitwise` runs it and one as `--no-bitwise` does, take turns. The
cost is the ratio of their medians, less 1. One row is a step of plain decoding, six are a verify of
five drafts, the batch is eight verifies at once; prompts are read from nothing.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import SHAPES, core, describe, finish, interleave, median_ms, model_folder, parser
from serving.options import between

PROMPTS = (20, 256, 1000)


def load(folder: str, dtype: str, bitwise: bool) -> Any:
    """The target alone, with room for eight texts."""
    options = core.Options(model=folder, dtype=dtype, max_running=9, max_model_len=2048)
    model = core.load_model(folder, options)
    speed_up(model)
    engine = core.Engine(model, {})
    engine.prepare(core.replace(options, bitwise=bitwise))
    return model


def methods_of(model: Any, text: list[int], context: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    cache = model.cache
    held = [cache.open_row() for _ in range(8)]
    for row in held:
        model.forward([row], [text[:context]], [1])

    def verify(rows: list[int], count: int) -> Callable[[], None]:
        def run() -> None:
            fed = [text[:count]] * len(rows)
            outputs = model.forward(rows, fed, [count] * len(rows)).logits
            [logits.argmax(-1).tolist() for logits in outputs]
            for row in rows:
                cache.truncate(row, context)

        return run

    def prompt(length: int) -> Callable[[], None]:
        def run() -> None:
            row = cache.open_row(length)
            model.forward([row], [text[:length]], [1]).logits[0].argmax().item()
            cache.close_row(row)

        return run

    batch = {"batch of 8, 6 rows each": verify(held, 6), "batch of 8, 1 row each": verify(held, 1)}
    return (
        {"1 row": verify(held[:1], 1), "6 rows": verify(held[:1], 6)}
        | batch
        | {f"prompt of {length}": prompt(length) for length in PROMPTS}
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a table, then one JSON line."""
    options = parser(__doc__, runs=25)
    options.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    options.add_argument("--model", help="a folder, in place of a shape")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options.add_argument("--context", type=between(17, 1900), default=300, help="tokens before")
    given = options.parse_args(arguments)
    with model_folder(given.shape, given.dtype) as folder:
        folder = given.model or folder
        models = {exact: load(folder, given.dtype, exact) for exact in (True, False)}
    chance = torch.Generator().manual_seed(0)
    text = torch.randint(models[True].vocab_size, (1900,), generator=chance).tolist()
    methods = {
        (name, exact): run
        for exact, model in models.items()
        for name, run in methods_of(model, text, given.context).items()
    }
    in_turns = dict(sorted(methods.items()))
    timed = interleave(in_turns, given.runs, "forwards")
    names = list(dict.fromkeys(name for name, _ in methods))
    costs = []
    for name in names:
        ms = {exact: median_ms(timed[name, exact]) for exact in models}
        ratios = sorted(
            ours.ms / theirs.ms
            for ours, theirs in zip(timed[name, True], timed[name, False], strict=True)
        )
        costs.append(
            {
                "what": name,
                "ms": round(ms[True], 3),
                "ms_no_bitwise": round(ms[False], 3),
                "cost": round(ms[True] / ms[False] - 1, 3),
                "quartiles": [
                    round(ratios[len(ratios) * i // 4] - 1, 3) for i in (1, 3)
                ],
            }
        )  # fmt: skip
    document = describe(__spec__.name, arguments) | {
        "shape": given.model or given.shape,
        "dtype": given.dtype,
        "context": given.context,
        "runs": given.runs,
        "exactness": models[True].report.as_dict() | {"min_rows": models[True].shapes.min_rows},
        "min_rows_no_bitwise": models[False].shapes.min_rows,
        "costs": costs,
    }
    panels = {"cost": {"": [(i, row["cost"]) for i, row in enumerate(costs)]}}
    finish(given, document, ["costs"], {"panels": panels, "x_label": "forward", "y_label": "cost"})


if __name__ == "__main__":
    main()
