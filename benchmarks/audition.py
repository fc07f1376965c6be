"""Does this drafter earn its keep? Every loaded drafter, and draft models of yours, side by side.

All generate greedily from the same demo prompts at a fixed K. acceptance: accepted / drafted; tau:
tokens of a cycle with a draft (1 + accepted / cycles); alpha: the chance that a draft token is
accepted once those before it are; break-even alpha: what it would have to be for drafting and
verifying, at their measured costs and with drafts as long as these were, to take as long as plain
decoding. The verdict is that of the clock, prompts included: `earns its keep` if it gives more
tokens per second than plain decoding. Each --draft-model loads a target of its own.

    python -m benchmarks.audition [--model DIR] [--draft-model DIR]... [--k 5] [--kinds easy hard]
        [--tokens 96] [--runs 5] [--json] [--plot FILE.png]
"""

from pathlib import Path
from typing import Any

from benchmarks import (
    core,
    demo_prompts,
    describe,
    finish,
    fixed_engine,
    flat,
    generate_all,
    interleave,
    median_ms,
    parser,
    places,
)
from control.formulas import break_even_of_drafts
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

PLAIN = "none"


def candidates(model: str, draft_models: list[str]) -> dict[str, tuple[Any, str | None]]:
    """(engine, drafter) by the name to show; plain decoding first."""
    engine = fixed_engine(model=model)
    found = {PLAIN: (engine, None)} | {name: (engine, name) for name in engine.drafters}
    for folder in draft_models:
        name = f"draft_model {Path(folder).name}"
        while name in found:
            name += "'"
        found[name] = fixed_engine(model=model, draft_model=folder), "draft_model"
    return found


def measure(
    found: dict[str, tuple[Any, str | None]], prompts: list[list[int]], given: Any
) -> list[dict[str, Any]]:
    """One row per candidate."""
    methods = {
        name: lambda e=engine, d=drafter: generate_all(e, prompts, given.tokens, d, given.k)
        for name, (engine, drafter) in found.items()
    }
    timed = interleave(methods, given.runs, "drafters")
    plain_ms = median_ms(timed[PLAIN])
    # Times of all runs together; counts are the same in each.
    sums = {
        name: sum((call.result.statistics for call in calls), core.Statistics())
        for name, calls in timed.items()
    }
    pass_ms = sums[PLAIN].verify_ms / sums[PLAIN].target_passes
    rows = []
    for name, calls in timed.items():
        ours, ms = sums[name], median_ms(calls)
        outputs = calls[0].result.outputs
        costs = ours.costs(sums[PLAIN])
        cost = (ours.draft_ms + ours.verify_ms) / pass_ms
        needed = break_even_of_drafts(ours.drafted_at, ours.target_passes, cost)
        row = {
            "drafter": name,
            "tokens_per_s": round(sum(map(len, outputs)) / ms * 1e3, 1),
            "speedup": round(plain_ms / ms, 2),
            "acceptance_rate": places(ours.draft_acceptance_rate),
            "tau": places(ours.mean_acceptance_length, 2),
            "c": places(costs["c"]),
            "t_verify": places(costs["t_verify"]),
            "alpha": places(costs["alpha"]),
            "break_even_alpha": places(needed),
            "identical": outputs == timed[PLAIN][0].result.outputs,
            "verdict": "does not",
        }
        if ms < plain_ms and ours.num_draft_tokens:
            row["verdict"] = "earns its keep"
        if name == PLAIN:
            row |= {"break_even_alpha": None, "verdict": "the baseline"}
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a table, then one JSON line."""
    options = parser(__doc__)
    options.add_argument("--model", default=core.Options.model, help="the target (default: ours)")
    options.add_argument("--draft-model", action="append", default=[], metavar="DIR")
    options.add_argument("--k", type=between(1, MAX_SPECULATIVE_TOKENS), default=5)
    options.add_argument("--kinds", nargs="+", help="prompts whose names begin so (default: all)")
    options.add_argument("--tokens", type=between(2, 1000), default=96, help="a request, at most")
    given = options.parse_args(arguments)
    found = candidates(given.model, given.draft_model)
    kinds = demo_prompts(found[PLAIN][0].target.tokenizer, given.kinds)
    rows = measure(found, list(flat(kinds).values()), given)
    document = describe(__spec__.name, arguments) | {
        "runs": given.runs,
        "tokens": given.tokens,
        "k": given.k,
        "prompts": {kind: list(group) for kind, group in kinds.items()},
        "results": rows,
    }
    drafted = [row for row in rows if row["alpha"] is not None]
    panels = {
        "speed-up by tau": {r["drafter"]: [(r["tau"], r["speedup"])] for r in drafted},
        "alpha above what is needed": {
            r["drafter"]: [(r["alpha"] - (r["break_even_alpha"] or 1), r["speedup"])]
            for r in drafted
        },
    }
    plot = {"panels": panels, "x_label": "", "y_label": "speed-up", "level": 1.0}
    finish(given, document, ["results"], plot)


if __name__ == "__main__":
    main()
