"""Is the controller ever slower than not speculating, or than the best K one could have chosen?

Each demo prompt is generated plainly, with each drafter at every fixed K, and with the controller,
which may go up to the largest of these K. `auto` may choose the drafter as well, so its best is the
best of all. Ratios of tokens per second, prompts included, medians over interleaved runs. The
drafter `none` is plain decoding against itself: how far from 1 mere noise is, in the same run. As
`best` is the luckiest of several measurements, `of_best` is below 1 for a perfect choice, too.

    python -m benchmarks.controller [--k 1 2 3 5] [--temperature 0 1] [--kinds easy hard]
        [--tokens 96] [--runs 5] [--json] [--plot FILE.png]
"""

from statistics import median
from typing import Any

from benchmarks import (
    Timed,
    check_temperatures,
    core,
    demo_prompts,
    describe,
    finish,
    flat,
    generate_all,
    interleave,
    parser,
)
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

PLAIN, AGAIN = (None, 0), ("none", 0)
LEAST_SPEEDUP, LEAST_OF_BEST = 0.97, 0.9  # what a row should reach


def rate(calls: list[Timed]) -> float:
    """Tokens per second."""
    return median(sum(map(len, call.result.outputs)) / call.ms for call in calls) * 1e3


def cases(
    chosen: Any, fixed: Any, prompts: list[list[int]], given: Any, temperature: float
) -> dict[tuple[Any, Any], Any]:
    """What to time, by drafter and K; None as K is the controller's choice."""

    def case(engine: Any, drafter: str | None, k: int) -> Any:
        return lambda: generate_all(engine, prompts, given.tokens, drafter, k, temperature)

    found = {PLAIN: case(fixed, None, 0), AGAIN: case(fixed, None, 0)}
    found |= {(name, k): case(fixed, name, k) for name in fixed.drafters for k in given.k}
    return found | {(name, None): case(chosen, name, max(given.k)) for name in chosen.drafters}


def rows_of(rates: dict[tuple[Any, Any], float]) -> list[dict[str, Any]]:
    """One row per drafter, and one for the noise."""
    rows = []
    for name, k in rates:
        if k is not None and (name, k) != AGAIN:
            continue
        own = {
            case: value
            for case, value in rates.items()
            if case == PLAIN or case[1] and name in (case[0], core.AutoDrafter.name)
        }
        best = max(own, key=own.get)
        speedup = rates[name, k] / rates[PLAIN]
        row = {"drafter": name, "speedup": round(speedup, 3)}
        best_row = {
            "best": "plain" if best == PLAIN else f"{best[0]}, K={best[1]}",
            "best_speedup": round(own[best] / rates[PLAIN], 3),
            "of_best": round(rates[name, k] / own[best], 3),
        }
        rows.append(row | (best_row if k is None else dict.fromkeys(best_row)))
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per temperature and drafter."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    result = []
    for (temperature, drafter), group in groups.items():
        worst = min(group, key=lambda row: row["speedup"])
        shares = [row["of_best"] for row in group if row["of_best"]]
        result.append(
            {
                "temperature": temperature,
                "drafter": drafter,
                "speedup": median(row["speedup"] for row in group),
                "worst": worst["speedup"],
                "worst_prompt": worst["prompt"],
                f"below_{LEAST_SPEEDUP}": sum(row["speedup"] < LEAST_SPEEDUP for row in group),
                "of_best": median(shares) if shares else None,
                "worst_of_best": min(shares, default=None),
                f"below_{LEAST_OF_BEST}": sum(share < LEAST_OF_BEST for share in shares),
            }
        )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: two tables, then one JSON line."""
    options = parser(__doc__)
    k = between(1, MAX_SPECULATIVE_TOKENS)
    options.add_argument("--k", type=k, nargs="+", default=[1, 2, 3, 5])
    options.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    options.add_argument("--kinds", nargs="+", help="prompts whose names begin so (default: all)")
    options.add_argument("--tokens", type=between(2, 1000), default=96, help="a request, at most")
    given = options.parse_args(arguments)
    check_temperatures(options, given.temperature)
    chosen = core.load_engine(core.Options())
    drafters = {name: d for name, d in chosen.drafters.items() if name != core.AutoDrafter.name}
    fixed = core.Engine(chosen.target, drafters)
    prompts = flat(demo_prompts(chosen.target.tokenizer, given.kinds))
    rows = []
    for temperature in given.temperature:
        methods = {
            (name, *case): method
            for name, prompt in prompts.items()
            for case, method in cases(chosen, fixed, [prompt], given, temperature).items()
        }
        timed = interleave(methods, given.runs, f"temperature {temperature:g}")
        for prompt in prompts:
            rates = {case[1:]: rate(calls) for case, calls in timed.items() if case[0] == prompt}
            place = {"temperature": temperature, "prompt": prompt}
            rows += [place | row for row in rows_of(rates)]
    document = describe(__spec__.name, arguments) | {
        "runs": given.runs,
        "tokens": given.tokens,
        "k": given.k,
        "results": rows,
        "summary": summary(rows),
    }
    panels = {
        f"temperature {temperature:g}": {
            drafter: [
                (row["best_speedup"], row["speedup"])
                for row in rows
                if (row["temperature"], row["drafter"]) == (temperature, drafter)
            ]
            for drafter in chosen.drafters
        }
        for temperature in given.temperature
    }
    plot = {"panels": panels, "x_label": "best fixed K", "y_label": "controller", "level": 1.0}
    finish(given, document, ["results", "summary"], plot | {"are_joined": False})


if __name__ == "__main__":
    main()
