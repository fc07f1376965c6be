"""Is what is measured what is served? The same requests over HTTP and in an engine's own process.

A server is started as README has it, and an engine is loaded here, in the thread that runs it. The
same prompts go to both in turn, after a pause in which the other's idle threads fall asleep: here,
through POST /generate, and the same as a stream. Neither remembers prompts or outputs.
`whole` and `streamed` are served speeds in that of the engine here, with quartiles over runs.
`first_ms` is the time of a request for one token here; a stream's first token comes
`first_later_ms` later.
Several `--clients` ask in the same moment; the engine here has one batch of theirs.

    python -m tools.served [--cases embedded float32 bfloat16 int8] [--drafters none auto]
        [--clients 1 8] [--prompts 3] [--tokens 128] [--runs 5] [--json]

float32, bfloat16 and int8 are SmolLM2's weights. Not covered: clients elsewhere.
"""

import time
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import tools as bench
from runtime.models.prompts import read_prompts
from runtime.values import Request
from server.options import between
from tools.servers import PAUSE_S, at_once, our_command, started

CASES = {
    "embedded": {"model": "embedded"},
    **{dtype: {"model": "smollm2", "dtype": dtype} for dtype in ("float32", "bfloat16", "int8")},
}
METHODS = ("here", "whole", "streamed")


def measure(case: str, flags: Any) -> list[dict[str, Any]]:
    """One row per drafter and number of clients."""
    engine, rows = bench.load_engine(**CASES[case]), []
    texts = read_prompts(bool(engine.target.tokenizer.chat_template))
    prompts = list(bench.ids_of(texts, engine.target).values())

    def call(method: str, drafter: str, prompts: list[list[int]], count: int) -> tuple:
        """All requests in the same moment: over HTTP, or in one batch of this process.

        Returns milliseconds until all are done and until each has begun, and their tokens.
        """
        if method != "here":
            common = {"max_tokens": count, "drafter": drafter, "stream": method == "streamed"}
            bodies = [{"prompt": ids} | common for ids in prompts]
            ms, told = at_once(server.port, "/generate", bodies)
            first_ms = max(each.at_ms[0] for each in told)
            return ms, first_ms, [each.events[-1]["token_ids"] for each in told]
        named = None if drafter == "none" else drafter
        requests = [Request(ids, count, named) for ids in prompts]
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        outputs = [one.output for one in bench.run_together(engine, requests)]
        ms = (time.perf_counter() - began) * 1e3
        return ms, ms, outputs

    with started(our_command(**CASES[case])) as server:
        for drafter, clients in product(flags.drafters, flags.clients):
            calls = {
                (method, count, begin): partial(
                    call, method, drafter, prompts[begin:][:clients], count
                )
                for begin in range(0, max(clients, flags.prompts), clients)
                for method, count in (*((method, flags.tokens) for method in METHODS), ("here", 1))
            }
            timed = bench.interleave(calls, flags.runs, f"{case}, {drafter}, {clients}")
            row = {"case": case, "drafter": drafter, "clients": clients}
            rows.append(row | row_of(timed, flags.tokens))
    return rows


def row_of(timed: dict[Any, bench.Calls], count: int) -> dict[str, Any]:
    """The figures of all prompts together."""
    runs = {method: bench.by_run(timed, method, count) for method in METHODS}
    long = {method: [sum(ms for ms, *_ in run) for run in runs[method]] for method in METHODS}
    here, first = (
        [median(first_ms for _, first_ms, _ in run) for run in those]
        for those in (bench.by_run(timed, "here", 1), runs["streamed"])
    )
    told = {
        method: [[ids for *_, all in run for ids in all] for run in runs[method]]
        for method in METHODS
    }
    num_tokens = sum(map(len, told["here"][-1]))
    row = {
        f"{method}_tokens_per_s": round(num_tokens / median(long[method]) * 1e3, 1)
        for method in METHODS
    }
    for method in METHODS[1:]:
        row[method], row[f"{method}_quartiles"] = bench.speedup(long["here"], long[method])
    later = [theirs - own for theirs, own in zip(first, here, strict=True)]
    row["first_ms"] = round(median(here), 2)
    row["first_later_ms"], row["first_quartiles"] = bench.spread(later)
    return row | {"identical": told["here"] == told["whole"] == told["streamed"]}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--drafters", nargs="+", type=bench.drafter, default=["none", bench.AUTO])
    options.add_argument("--clients", nargs="+", type=between(1, 8), default=[1])
    bench.add_count(options, "--prompts", 1, 13, 3, "at least, of the demo's")
    bench.add_count(options, "--tokens", 2, 1000, 128, "a request, at most")
    flags = options.parse_args(arguments)
    rows = [row for case in flags.cases for row in measure(case, flags)]
    bench.report(__spec__.name, arguments, flags, {"results": rows})


if __name__ == "__main__":
    main()
