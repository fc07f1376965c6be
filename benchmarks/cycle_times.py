"""What do the parts of a cycle take, by the size of the batch, and how do drafts fare alone?

What `benchmarks.scale` predicts from. `parts` has medians, in milliseconds, for each drafter at a
fixed K: draft, verify and other, and the rows of the pass, of the cycles in which all requests of a
batch ran; `prompts` is the reading of the batch's prompts, and `whole` another run of it from end
to end, which is what is predicted. `rows` has passes of one request over 1 … 17 tokens. `texts`
counts the cycles of each prompt, run alone: how many drafted d tokens, of which a were accepted, as
"d,a". Prompts and tokens are those of `benchmarks.batch`. With one thread all times are the
processor's.

    python -m benchmarks.cycle_times [--runs 3] [--k 5] [--tokens 96] [--sizes 1 2 4 8 16] [--json]
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import linear_regression, median
from typing import Any

import torch
from tqdm import tqdm

import benchmarks as bench
from benchmarks.simulation import Costs, Text
from messages import Request
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

SIZES = (1, 2, 4, 8, 16)
MOST = max(SIZES)
ROWS = (1, 2, 4, 6, 9, 17)
CONTEXT = 64  # about what a request of the batches holds in the middle of its text
NONE = "none"


def measure_parts(engine: Any, requests: list[Request]) -> dict[str, Any]:
    """Medians over the cycles of one batch, while all of its requests run."""
    sequences = [engine.open(request) for request in requests]
    times, rows = [], []
    try:
        while not any(s.finish_reason for s in sequences):
            start = engine.now()
            cycles = engine.step(sequences)
            end = engine.now()
            if len(cycles) == len(requests) and all(one.number for one in cycles.values()):
                began, drafted, verified, _ = next(iter(cycles.values())).times
                draft, verify = drafted - began, verified - drafted
                times.append((draft, verify, end - start - draft - verify))
                rows.append(sum(len(one.draft.tokens) + 1 for one in cycles.values()))
    finally:
        for s in sequences:
            engine.close(s)
    parts = [median(part) * 1e3 for part in zip(*times, strict=True)]
    return {"draft": parts[0], "verify": parts[1], "other": parts[2], "rows": median(rows)}


def clock() -> float:
    """Seconds: of the processor where there is one thread, as others may use it meanwhile."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def taken_ms(work: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    began = clock()
    work()
    return (clock() - began) * 1e3


def cycles_of(engine: Any, request: Request) -> dict[str, int]:
    """How often a request's cycles drafted d tokens, of which a were accepted."""
    cycles = [one for _, one in engine.generate(request)]
    whole = cycles[1:-1] or cycles[1:]  # the last is cut where the text ends
    return dict(Counter(f"{one.num_drafted},{one.num_accepted}" for one in whole))


def measure_rows(model: Any, runs: int) -> dict[int, float]:
    """Milliseconds of passes of one request."""
    text = bench.random_tokens(model.vocab_size, CONTEXT)
    held = bench.hold(model, text)
    methods = {n: bench.verifying(model, held, text[:n]) for n in ROWS}
    spent = [{n: taken_ms(verify) for n, verify in methods.items()} for _ in range(runs * 20)]
    model.cache.close_row(held[0])
    return {n: round(median(each[n] for each in spent[runs:]), 4) for n in ROWS}


def measure(engine: Any, given: Any) -> dict[str, Any]:
    """All of it, in turns; medians count."""
    fixed, tokens = bench.without_controller(engine), given.tokens
    fixed.eos_ids, fixed.now = set(), clock  # every request is as long as the others
    prompts = list(bench.flat(bench.demo_prompts(engine.target.tokenizer)).values()) * 2
    names = [None, *bench.drafter_names(engine)]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    cases = [(name, size) for size in given.sizes for name in names]
    for _, (name, size) in tqdm([(run, case) for run in range(given.runs) for case in cases]):
        few = [Request(prompt, tokens, name, given.k) for prompt in prompts[:size]]
        short = [replace(request, max_tokens=1) for request in few]
        parts = measure_parts(fixed, few)
        parts["prompts"] = taken_ms(partial(bench.run_together, fixed, short))
        parts["whole"] = taken_ms(partial(bench.run_together, fixed, few))
        found.setdefault((name or NONE, size), []).append(parts)
    parts = [
        {"drafter": name, "batch": size}
        | {part: round(median(run[part] for run in runs), 4) for part in runs[0]}
        for (name, size), runs in found.items()
    ]
    texts = {
        name: [cycles_of(fixed, Request(p, tokens, name, given.k)) for p in prompts[:MOST]]
        for name in names[1:]
    }
    return {"parts": parts, "rows": measure_rows(engine.target, given.runs), "texts": texts}


# ------------------------------------------------------------------------------ what is made of it
def replayed(counts: dict[str, int]) -> Text:
    """A request whose cycles are drawn from those that it had alone."""
    cycles = {(int(d), int(a)): n for key, n in counts.items() for d, a in [key.split(",")]}
    reached = sum(n * min(d, a + 1) for (d, a), n in cycles.items())
    accepted = sum(n * a for (_, a), n in cycles.items())
    return Text(cycles, accepted / reached if reached else 0.0)


def on_line(known: dict[int, float], size: float) -> float:
    """On the line through the neighbours; beyond the last on the line through the last two."""
    sizes = sorted(known)
    at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return known[low] + (known[high] - known[low]) * (size - low) / (high - low)


def measured(times: dict[str, Any], name: str) -> Costs:
    """Costs of a drafter, or of none, from the parts that were measured in each size of batch."""
    parts = {(row["drafter"], row["batch"]): row for row in times["parts"]}
    sizes = [batch for drafter, batch in parts if drafter == NONE]

    lines = {}  # of each size: a pass without drafts, and a further row of each request
    for size in sizes:
        plain, wide = parts[NONE, size], parts[name, size]
        more_ms = (wide["verify"] - plain["verify"]) / max(1, wide["rows"] - plain["rows"])
        lines[size] = plain["verify"], more_ms * size

    def verify(batch: int, rows: int) -> float:
        more = rows / batch - 1
        return on_line({size: ms + each * more for size, (ms, each) in lines.items()}, batch) / 1e3

    def part(what: str) -> Callable[[int], float]:
        ms = {size: parts[name, size][what] for size in sizes}
        return lambda batch: on_line(ms, batch) / 1e3

    return Costs(part("draft"), verify, part("other"))


def from_one(times: dict[str, Any], name: str) -> Costs:
    """The same from one request alone: a line through its passes, the rest in proportion."""
    alone = next(row for row in times["parts"] if (row["drafter"], row["batch"]) == (name, 1))
    slope, fixed = linear_regression([int(n) for n in times["rows"]], [*times["rows"].values()])
    share = alone["verify"] / (fixed + slope * alone["rows"])  # behind a text of its length

    def verify(_: int, rows: int) -> float:
        return share * (fixed + slope * rows) / 1e3

    def draft(batch: int) -> float:
        return alone["draft"] * verify(batch, batch) / verify(1, 1) / 1e3

    return Costs(draft, verify, lambda batch: alone["other"] * batch / 1e3)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=3)
    options.add_argument("--k", type=between(1, MAX_SPECULATIVE_TOKENS), default=5)
    bench.add_count(options, "--tokens", 4, 1000, 96, "a request")
    options.add_argument("--sizes", type=between(1, 16), nargs="+", default=SIZES)
    given = options.parse_args(arguments)
    engine = bench.load_engine(max_running=MOST)
    bench.report(__spec__.name, arguments, given, measure(engine, given), ["parts"])


if __name__ == "__main__":
    main()
