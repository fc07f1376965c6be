"""Who drafts best, how many tokens at a time, and does the controller find that out?

Each demo prompt is generated plainly, by each drafter at every fixed K, and with the controller,
which may go up to the largest of these K. Speed-ups count all that a request takes, its prompt
included. They are medians of interleaved runs, each divided by plain decoding in the same run.

The first table is by kind of prompts, drafter and K. tau: tokens of a cycle with a draft;
alpha: the chance that a draft token is accepted once those before it are; c: one draft token's
time, and t_verify: one pass's, both in passes of plain decoding; break_even_alpha: the alpha at
which drafts of these lengths, at these costs, would take as long as plain decoding. A drafter earns
its keep where speedup is above 1. The second table compares the controller with plain decoding and
with the best fixed K of each prompt; `auto` may choose the drafter as well, so its best is the best
of all. The drafter `none` is plain decoding against itself, which shows how far from 1 mere noise
is. As `best` is the luckiest of several measurements, of_best is below 1 for a perfect choice, too.

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
from serving.options import Options, between
from serving.parsing import MAX_SPECULATIVE_TOKENS, RequestError, check_fields

Case = tuple[str | None, int | None]  # drafter and K; None as K is the controller's choice
Calls = dict[Case, list[bench.Timed]]
PLAIN, AGAIN = (None, 0), ("none", 0)
LEAST_SPEEDUP, LEAST_OF_BEST = 0.97, 0.9  # what a row should reach


def temperature(text: str) -> float:
    """An argparse type: a temperature that a request may have."""
    try:
        check_fields({"temperature": float(text)})
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return float(text)


def measure(
    chosen: Any, prompts: dict[str, list[int]], given: argparse.Namespace, warmth: float
) -> dict[str, Calls]:
    """Every case of every prompt, in turn: by prompt, then by case."""
    fixed, names = bench.without_controller(chosen), bench.drafter_names(chosen)
    cases = [PLAIN, AGAIN, *((name, k) for name in names for k in given.k)]
    cases += [(name, None) for name in [*names, bench.AUTO]]

    def method(prompt: list[int], case: Case) -> Any:
        drafter, k = (None, 0) if case == AGAIN else case
        limit = max(given.k) if k is None else k
        sampling = Sampling(temperature=warmth)
        request = Request(prompt, given.tokens, drafter, limit, sampling=sampling)
        return lambda: bench.run(chosen if k is None else fixed, request)

    methods = {(name, case): method(p, case) for name, p in prompts.items() for case in cases}
    timed = bench.interleave(methods, given.runs, f"temperature {warmth:g}")
    return {name: {case: timed[name, case] for case in cases} for name in prompts}


def drafting_row(case: Case, prompts: list[Calls]) -> dict[str, Any]:
    """One drafter at one K on several prompts together."""
    finished = [[call.result for call in calls[case]] for calls in prompts]
    before = [[call.result for call in calls[PLAIN]] for calls in prompts]
    ms, plain_ms = (
        [sum(of_run) for of_run in zip(*(bench.times(calls[c]) for calls in prompts), strict=True)]
        for c in (case, PLAIN)
    )
    gain = bench.speedup(plain_ms, ms)
    # Of all runs together: counts are the same in each, times are not.
    ours, plain = bench.total(sum(finished, [])), bench.total(sum(before, []))
    costs = ours.costs(plain)
    cost = (ours.draft_ms + ours.verify_ms) / (plain.verify_ms / plain.target_passes)
    num_tokens = sum(len(of_prompt[0].output) for of_prompt in finished)
    return {
        "drafter": case[0],
        "k": "controller" if case[1] is None else str(case[1]),
        "tokens_per_s": round(num_tokens / median(ms) * 1e3, 1),
        "speedup": gain.median,
        "quartiles": gain.quartiles,
        "acceptance_rate": bench.places(ours.draft_acceptance_rate),
        "tau": bench.places(ours.mean_acceptance_length, 2),
        "tokens_per_pass": bench.places(ours.tokens_per_pass, 2),
        **{name: bench.places(value) for name, value in costs.items()},
        "break_even_alpha": bench.places(
            break_even_of_drafts(ours.drafted_at, ours.target_passes, cost)
        ),
        "identical": list(map(bench.outputs, finished)) == list(map(bench.outputs, before)),
    }


def prompt_rows(calls: Calls) -> list[dict[str, Any]]:
    """One prompt: a row for each drafter with the controller, and one for the noise."""
    gains = {
        case: bench.speedup(bench.times(calls[PLAIN]), bench.times(calls[case])).median
        for case in calls
    }
    rows = []
    for name, k in gains:
        if (name, k) == AGAIN:
            empty = dict.fromkeys(("best", "best_speedup", "of_best"))
            rows.append({"drafter": name, "speedup": gains[AGAIN]} | empty)
        if k is not None:
            continue
        own = {c: gain for c, gain in gains.items() if c[1] and name in (c[0], bench.AUTO)}
        own[PLAIN] = 1.0
        best = max(own, key=own.get)
        rows.append(
            {
                "drafter": name,
                "speedup": gains[name, k],
                "best": "plain" if best == PLAIN else f"{best[0]}, K={best[1]}",
                "best_speedup": own[best],
                "of_best": round(gains[name, k] / own[best], 3),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per temperature and drafter; figures of all prompts are medians."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["temperature"], row["drafter"]].append(row)
    result = []
    for (warmth, drafter), group in groups.items():
        worst = min(group, key=lambda row: row["speedup"])
        bests = [row["best_speedup"] for row in group if row["best"]]
        shares = [row["of_best"] for row in group if row["best"]]
        result.append(
            {
                "temperature": warmth,
                "drafter": drafter,
                "speedup": median(row["speedup"] for row in group),
                "best_speedup": median(bests) if bests else None,
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
    """Run the command line."""
    options = bench.parser(__doc__)
    k = between(1, MAX_SPECULATIVE_TOKENS)
    options.add_argument("--k", type=k, nargs="+", default=[1, 2, 3, 5])
    options.add_argument("--temperature", type=temperature, nargs="+", default=[0.0, 1.0])
    options.add_argument("--kinds", nargs="+", help="prompts whose names begin so (default: all)")
    options.add_argument("--model", default=Options.model, help="the target (default: ours)")
    options.add_argument("--draft-model", help="one of your own")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    given = options.parse_args(arguments)
    engine = bench.load_engine(model=given.model, draft_model=given.draft_model)
    kinds = bench.demo_prompts(engine.target.tokenizer, given.kinds)
    drafting, rows = [], []
    for warmth in given.temperature:
        timed = measure(engine, bench.flat(kinds), given, warmth)
        for kind in kinds:
            of_kind = [timed[name] for name in kinds[kind]]
            place = {"temperature": warmth, "prompts": kind}
            cases = [case for case in of_kind[0] if case not in (PLAIN, AGAIN)]
            drafting += [place | drafting_row(case, of_kind) for case in cases]
        for name, calls in timed.items():
            place = {"temperature": warmth, "prompt": name}
            rows += [place | row for row in prompt_rows(calls)]
    results = {"drafting": drafting, "results": rows, "summary": summary(rows)}
    bench.report(__spec__.name, arguments, given, results, ["drafting", "summary"])


if __name__ == "__main__":
    main()
