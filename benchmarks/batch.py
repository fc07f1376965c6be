"""What does it bring to serve requests together? Batches of 1 … 16, speculation on and off.

So many clients ask at once, each three times, for texts of different lengths: the next request
takes the place of one that ended. The same requests run one after another, too. Every drafter does
it, with fixed K and with the controller, in turn. Speeds are tokens per second as medians.
`of_none` is a case's speed in that of not drafting in the same run, `of_best` that of `auto` in
that of the best of all other cases, `ratio` that of the batch in that of one after another. The
second table shows the longest gap between two tokens of a running request while a long prompt
arrives.

    python -m benchmarks.batch [--runs 5] [--tokens 96] [--sizes 1 4 8 16] [--together]
        [--model smollm2] [--json]
"""

import time
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from tqdm import tqdm

import benchmarks as bench
from messages import Request
from serving.options import between

SIZES = (1, 2, 4, 8, 16)
LONG_PROMPT = 1800
ROUNDS = 3  # requests, one after another, of each of those that ask at once
Case = tuple[str | None, bool]  # the drafter, and whether K is fixed
PLAIN: Case = (None, False)
CHOOSING: Case = (bench.AUTO, False)


def measure_batches(engine: Any, given: Any) -> list[dict[str, Any]]:
    """One row per size and case."""
    fixed, rows = bench.core.Engine(engine.target, engine.panel.drafters), []
    fixed.eos_ids = engine.eos_ids
    prompts = list(bench.flat(bench.demo_prompts(engine)).values()) * 4
    drafting = ((n, is_fixed) for n in engine.panel.drafters for is_fixed in (True, False))
    cases = [PLAIN, *drafting, CHOOSING]

    def method(case: Case, size: int, is_alone: bool) -> Any:
        chosen = fixed if case[1] else engine
        requests = [
            Request(prompt, given.tokens // 2 + 7 * i % 16 * given.tokens // 15, case[0])
            for i, prompt in enumerate(prompts[: ROUNDS * size])
        ]
        run = partial(bench.run_together, chosen, requests, at_once=1 if is_alone else size)
        return lambda: [one.output for one in run()]

    ways = (False,) if given.together else (True, False)
    for size in given.sizes:
        methods = {(case, alone): method(case, size, alone) for alone in ways for case in cases}
        timed = bench.interleave(methods, given.runs, f"batches of {size}")
        plain = timed[PLAIN, False]
        for case in cases:
            row = row_of(case, plain, timed[case, False], timed.get((case, True)))
            rows.append({"batch": size} | row)
        others = [timed[case, False].ms for case in cases[:-1]]
        rows[-1]["of_best"] = of_best(timed[CHOOSING, False].ms, others)
    return rows


def of_best(ours: list[float], others: list[list[float]]) -> float:
    """Our speed in that of the best of the others, as the median of runs.

    The fastest of several noisy medians is too fast by chance. So the best is the one with the
    fastest median of all other runs, and its time in this run is what counts.

    Example: of_best([10, 10], [[9, 11], [12, 12]]) -> .9 and 1.1, so 1.0.
    """
    shares = []
    for index, ms in enumerate(ours):
        best = min(others, key=lambda each: median(each[:index] + each[index + 1 :] or each))
        shares.append(best[index] / ms)
    return round(median(shares), 3)


def row_of(
    case: Case, plain: bench.Calls, batched: bench.Calls, alone: bench.Calls | None
) -> dict[str, Any]:
    """The figures of one case among all of its size."""
    name, is_fixed = case
    found, gain = batched.results[-1], bench.speedup(plain.ms, batched.ms)
    tokens = sum(map(len, found))
    row = {
        "drafter": name or "none",
        "k": "–" if name is None else "5" if is_fixed else "controller",
        "batch_tokens_per_s": round(tokens / median(batched.ms) * 1e3, 1),
        "of_none": gain.median, "quartiles": gain.quartiles, "of_best": None,
        "identical": found == plain.results[-1],
    }  # fmt: skip
    if alone:
        row["alone_tokens_per_s"] = round(tokens / median(alone.ms) * 1e3, 1)
        row["ratio"] = bench.speedup(alone.ms, batched.ms).median
        row["identical"] &= found == alone.results[-1]
    return row


def measure_gaps(engine: Any, runs: int) -> dict[str, Any]:
    """The longest pause of a running request, and the late one's time to its first token."""
    longest, first = list[float](), list[float]()
    for _ in tqdm(range(runs), desc="gaps"):
        running = engine.open(Request([7] * 5, 1000))
        for _ in range(5):
            engine.step([running])
        late = engine.open(Request([7] * LONG_PROMPT, 2))
        moments = [time.perf_counter()]
        while not late.output:
            engine.step([running, late])
            moments.append(time.perf_counter())
        longest.append(max(end - begin for begin, end in pairwise(moments)) * 1e3)
        first.append((moments[-1] - moments[0]) * 1e3)
        engine.close(running)
        engine.close(late)
    row = {"prompt_tokens": LONG_PROMPT, "longest_gap_ms": round(median(longest), 1)}
    return row | {"time_to_first_token_ms": round(median(first), 1)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, on average")
    options.add_argument("--sizes", type=between(1, 16), nargs="+", default=SIZES, help="batches")
    options.add_argument("--model", default="embedded", help="the target (default: ours)")
    options.add_argument("--together", action="store_true", help="only in batches, and no gaps")
    given = options.parse_args(arguments)
    engine = bench.load_engine(model=given.model, max_running=max(SIZES))
    engine.eos_ids = set()  # every request is as long as the others
    results = {"batches": measure_batches(engine, given)}
    results["gaps"] = [] if given.together else [measure_gaps(engine, given.runs)]
    bench.report(__spec__.name, arguments, given, results)


if __name__ == "__main__":
    main()
