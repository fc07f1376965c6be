"""Which K is best for which drafter and text? K = 0 … 16 on easy and hard prompts, fixed K.

Each drafter at each K generates from all demo prompts of a kind; K = 0 is plain decoding. Tokens
per second count all that a request takes, its prompt included; ms per token only what comes after
the first one (draft, verify and the engine's own time); both are medians over interleaved runs.
`identical` compares outputs with plain decoding's. With several temperatures there is a row for
each; seeds are fixed.

    python -m benchmarks.sweep [--k 0 1 2 4 8 16] [--kinds easy hard] [--temperature 0]
        [--tokens 96] [--runs 5] [--json] [--plot FILE.png]
    python -m benchmarks.sweep --k 0 5 --temperature 0 0.5 1 1.5
"""

from statistics import median
from typing import Any

from benchmarks import (
    Run,
    Timed,
    check_temperatures,
    demo_prompts,
    describe,
    finish,
    fixed_engine,
    generate_all,
    interleave,
    median_ms,
    parser,
    places,
)
from benchmarks.plots import lines
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

PLAIN = None, 0  # drafter and K


def row_of(calls: list[Timed], reference: Run | None) -> dict[str, Any]:
    """One case's figures; `reference` is what plain decoding gave, if that must be the same."""
    outputs, statistics = calls[0].result
    num_tokens, ms = sum(map(len, outputs)), median_ms(calls)
    return {
        "tokens_per_s": round(num_tokens / ms * 1e3, 1),
        "ms_per_token": places(median(call.result.statistics.ms_per_token for call in calls)),
        "acceptance_rate": places(statistics.draft_acceptance_rate),
        "tokens_per_pass": places(statistics.tokens_per_pass, 2),
        "identical": reference and outputs == reference.outputs,
    }


def measure(
    engine: Any, prompts: list[list[int]], k_values: list[int], given: Any, temperature: float
) -> list[dict[str, Any]]:
    """One row per drafter and K; plain decoding's, K = 0, counts for every drafter."""
    cases = [PLAIN, *((name, k) for name in engine.drafters for k in k_values if k)]
    methods = {
        case: lambda case=case: generate_all(engine, prompts, given.tokens, *case, temperature)
        for case in cases
    }
    timed = interleave(methods, given.runs, f"temperature {temperature:g}")
    plain = timed[PLAIN][0].result
    rows = []
    for name in engine.drafters:
        for k in k_values:
            case = (name, k) if k else PLAIN
            rows.append({"drafter": name, "k": k} | row_of(timed[case], plain))
    return rows


def mark_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best K of each temperature, kind and drafter, and how much faster than K = 0 it is."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["temperature"], row["kind"], row["drafter"]), []).append(row)
    result = []
    for (temperature, kind, drafter), group in groups.items():
        best = max(group, key=lambda row: row["tokens_per_s"])
        plain = next((row["tokens_per_s"] for row in group if not row["k"]), None)
        result.append(
            {
                "temperature": temperature,
                "kind": kind,
                "drafter": drafter,
                "best_k": best["k"],
                "tokens_per_s": best["tokens_per_s"],
                "speedup": plain and round(best["tokens_per_s"] / plain, 2),
            }
        )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: two tables, then one JSON line."""
    options = parser(__doc__)
    k, tokens = between(0, MAX_SPECULATIVE_TOKENS), between(2, 1000)
    options.add_argument("--k", type=k, nargs="+", default=[0, 1, 2, 4, 8, 16])
    options.add_argument("--kinds", nargs="+", default=["easy", "hard"], help="names begin so")
    options.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    options.add_argument("--tokens", type=tokens, default=96, help="a request, at most")
    given = options.parse_args(arguments)
    check_temperatures(options, given.temperature)
    engine = fixed_engine()
    kinds = demo_prompts(engine.target.tokenizer, given.kinds)
    k_values = sorted({0, *given.k})
    rows = [
        {"temperature": temperature, "kind": kind} | row
        for temperature in given.temperature
        for kind in kinds
        for row in measure(engine, list(kinds[kind].values()), k_values, given, temperature)
    ]
    document = describe(__spec__.name, arguments) | {
        "runs": given.runs,
        "tokens": given.tokens,
        "prompts": {kind: list(kinds[kind]) for kind in kinds},
        "results": rows,
        "best": mark_best(rows),
    }
    panels = {
        f"{kind}, temperature {temperature:g}": lines(
            [r for r in rows if (r["kind"], r["temperature"]) == (kind, temperature)],
            "drafter",
            "k",
            "tokens_per_s",
        )
        for kind in kinds
        for temperature in given.temperature
    }
    plot = {"panels": panels, "x_label": "K", "y_label": "tokens per second"}
    finish(given, document, ["results", "best"], plot)


if __name__ == "__main__":
    main()
