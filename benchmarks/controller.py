"""Who drafts best, how many tokens at a time, and does the controller find that out?

Each demo prompt is generated plainly, by each drafter at every fixed K, and with the controller,
which may go up to the largest of these K. Speed-ups count all that a request takes, its prompt
included. They are medians of interleaved runs, each divided by plain decoding in the same run.

`results` has a row for each prompt, drafter and K. tau: tokens of a cycle with a draft; alpha: the
chance that a draft token is accepted once those before it are; c: one draft token's time, and
t_verify: one pass's, both in passes of plain decoding; break_even_alpha: the alpha at which drafts
of these lengths, at these costs, would take as long as plain decoding.

`summary` has medians over the prompts. A drafter earns its keep where speedup is above 1. Where the
controller chose, of_best is its speed in that of the best fixed K, or of plain decoding; `auto` may
choose the drafter as well, so its best is the best of all. As the best is the luckiest of several
measurements, of_best is below 1 for a perfect choice, too. The drafter `none` is plain decoding
against itself, which shows how far from 1 mere noise is.

    python -m benchmarks.controller [--k 1 2 3 5] [--temperature 0 1] [--kinds easy hard]
        [--model DIR] [--draft-model DIR] [--tokens 96] [--runs 5] [--json]
"""

import argparse
from collections import defaultdict
from statistics import median
from typing import Any

import benchmarks as bench
from control.formulas import break_even_of_drafts
from messages import Request, Sampling
from serving.errors import RequestError
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS, check_fields

Case = tuple[str, str]  # drafter, and K or CHOSEN
CHOSEN = "controller"
PLAIN, AGAIN = ("plain", "0"), ("none", "0")
LEAST_SPEEDUP, LEAST_OF_BEST = 0.97, 0.9  # what a row should reach


def temperature(text: str) -> float:
    """An argparse type: a temperature that a request may have."""
    try:
        check_fields({"temperature": float(text)})
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return float(text)


def measure(
    engine: Any, prompts: dict[str, list[int]], given: argparse.Namespace, warmth: float
) -> list[dict[str, Any]]:
    """One row per prompt and case at one temperature."""
    fixed, names = bench.without_controller(engine), bench.drafter_names(engine)
    cases = [PLAIN, AGAIN, *((name, str(k)) for name in names for k in given.k)]
    cases += [(name, CHOSEN) for name in [*names, bench.AUTO]]

    def method(prompt: list[int], case: Case) -> Any:
        drafter = None if case in (PLAIN, AGAIN) else case[0]
        is_chosen, sampling = case[1] == CHOSEN, Sampling(temperature=warmth)
        limit = max(given.k) if is_chosen else int(case[1])
        request = Request(prompt, given.tokens, drafter, limit, sampling=sampling)
        return lambda: bench.run(engine if is_chosen else fixed, request)

    methods = {(name, case): method(p, case) for name, p in prompts.items() for case in cases}
    timed, rows = bench.interleave(methods, given.runs, f"temperature {warmth:g}"), []
    for name in prompts:
        place, plain = {"temperature": warmth, "prompt": name}, timed[name, PLAIN]
        of_prompt = [place | row_of(case, timed[name, case], plain) for case in cases[1:]]
        for row in of_prompt:
            best = best_speedup(row, of_prompt) if row["k"] == CHOSEN else None
            row |= {"best_speedup": best, "of_best": best and round(row["speedup"] / best, 3)}
        rows += of_prompt
    return rows


def row_of(case: Case, calls: list[bench.Timed], before: list[bench.Timed]) -> dict[str, Any]:
    """One case on one prompt, beside plain decoding."""
    gain = bench.speedup(bench.times(before), bench.times(calls))
    # Of all runs together: counts are the same in each, times are not.
    ours, plain = (bench.total([call.result for call in each]) for each in (calls, before))
    cost = (ours.draft_ms + ours.verify_ms) / (plain.verify_ms / plain.target_passes)
    needed = break_even_of_drafts(ours.drafted_at, ours.target_passes, cost)
    output = calls[0].result.output
    return {
        "drafter": case[0],
        "k": case[1],
        "tokens_per_s": round(len(output) / bench.median_ms(calls) * 1e3, 1),
        "speedup": gain.median,
        "quartiles": gain.quartiles,
        "acceptance_rate": bench.places(ours.draft_acceptance_rate),
        "tau": bench.places(ours.mean_acceptance_length, 2),
        "tokens_per_pass": bench.places(ours.tokens_per_pass, 2),
        **{name: bench.places(value) for name, value in ours.costs(plain).items()},
        "break_even_alpha": bench.places(needed) if ours.num_draft_tokens else None,
        "identical": output == before[0].result.output,
    }


def best_speedup(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Of what the controller could have chosen, plain decoding included."""
    able = [r for r in rows if r["k"] != CHOSEN and row["drafter"] in (r["drafter"], bench.AUTO)]
    return max([1.0, *(each["speedup"] for each in able)])


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per temperature, drafter and K."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["temperature"], row["drafter"], row["k"]].append(row)

    def middle(group: list[dict[str, Any]], name: str) -> float | None:
        values = [row[name] for row in group if row[name] is not None]
        return round(median(values), 3) if values else None

    result = []
    for (warmth, drafter, k), group in groups.items():
        worst = min(group, key=lambda row: row["speedup"])
        shares = [row["of_best"] for row in group if row["of_best"] is not None]
        names = ("speedup", "acceptance_rate", "tau", "alpha", "c", "t_verify", "break_even_alpha")
        result.append(
            {"temperature": warmth, "drafter": drafter, "k": k}
            | {name: middle(group, name) for name in names}
            | {
                "worst": worst["speedup"],
                "worst_prompt": worst["prompt"],
                f"below_{LEAST_SPEEDUP}": sum(row["speedup"] < LEAST_SPEEDUP for row in group),
                "best_speedup": middle(group, "best_speedup"),
                "of_best": middle(group, "of_best"),
                "worst_of_best": min(shares, default=None),
                f"below_{LEAST_OF_BEST}": sum(share < LEAST_OF_BEST for share in shares),
                "identical": all(row["identical"] for row in group),
            }
        )
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    k = between(1, MAX_SPECULATIVE_TOKENS)
    options.add_argument("--k", type=k, nargs="+", default=[1, 2, 3, 5])
    options.add_argument("--temperature", type=temperature, nargs="+", default=[0.0, 1.0])
    options.add_argument("--kinds", nargs="+", help="prompts whose names begin so (default: all)")
    options.add_argument("--model", default="embedded", help="the target (default: %(default)s)")
    options.add_argument("--draft-model", help="one of your own")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    given = options.parse_args(arguments)
    engine = bench.load_engine(model=given.model, draft_model=given.draft_model)
    prompts = bench.flat(bench.demo_prompts(engine.target.tokenizer, given.kinds))
    rows = [row for t in given.temperature for row in measure(engine, prompts, given, t)]
    results = {"results": rows, "summary": summary(rows)}
    bench.report(__spec__.name, arguments, given, results, ["summary"])


if __name__ == "__main__":
    main()
