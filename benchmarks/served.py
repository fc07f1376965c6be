"""Is what is measured what is served? The same requests over HTTP and in an engine's own process.

A server is started as README has it, and an engine is loaded here, in the thread that runs it. The
same prompts go to both in turn, after a pause in which the other's idle threads fall asleep: here,
through POST /generate, and the same as a stream. Neither remembers prompts or outputs.
`whole` and `streamed` are served speeds in that of the engine here, with quartiles over runs.
`first_ms` is the time of a request for one token here; its stream ends `first_later_ms` later.
Several `--clients` ask in the same moment; the engine here has one batch of theirs.

    python -m benchmarks.served [--cases embedded float32 bfloat16 int8] [--drafters none auto]
        [--clients 1 8] [--prompts 3] [--tokens 128] [--runs 5] [--json]

float32, bfloat16 and int8 are SmolLM2's weights. Not covered: clients elsewhere.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import benchmarks as bench
import demo
from benchmarks.servers import FORGETFUL, OURS, PAUSE_S, at_once, started
from messages import Request
from models.prompts import chat_ids, prompt_ids
from serving.options import Options, between

CASES = {
    "embedded": {"model": "embedded"},
    "float32": {"model": "smollm2", "dtype": "float32"},
    "bfloat16": {"model": "smollm2", "dtype": "bfloat16"},
    "int8": {"model": "smollm2", "quantize": "int8"},
}
WAYS = ("here", "whole", "streamed")


Tokens = tuple[float, list[list[int]]]  # milliseconds for all requests, and their tokens


def there(port: int, bodies: list[dict[str, Any]]) -> Tokens:
    """All requests in the same moment, over HTTP."""
    ms, told = at_once(port, "/generate", bodies)
    return ms, [each.answer["token_ids"] for each in told]


def here(engine: Any, requests: list[Request]) -> Tokens:
    """The same in one batch of this process."""
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    outputs = bench.outputs(bench.run_together(engine, requests))
    return (time.perf_counter() - began) * 1e3, outputs


def measure(case: str, given: Any) -> list[dict[str, Any]]:
    """One row per drafter and number of clients."""
    engine, tokenizer = (found := bench.load_engine(**CASES[case])), found.target.tokenizer
    flags = [part for name, value in CASES[case].items() for part in (f"--{name}", value)]
    is_chat, rows = Options(**CASES[case]).is_chat(tokenizer), []
    texts, read = list(demo.read_prompts(is_chat).values()), chat_ids if is_chat else prompt_ids
    ids = {text: read(text, tokenizer, engine.target.max_length) for text in texts}

    def calls_of(texts: list[str], name: str, count: int) -> dict[str, Callable[[], Tokens]]:
        drafter = None if name == "none" else name
        requests = [Request(ids[text], count, drafter) for text in texts]
        bodies = [{"prompt": ids[t], "max_tokens": count, "drafter": name} for t in texts]
        streamed = [body | {"stream": True} for body in bodies]
        return {
            "here": lambda: here(engine, requests),
            "whole": lambda: there(server.port, bodies),
            "streamed": lambda: there(server.port, streamed),
        }

    with started([*OURS, *FORGETFUL, *flags]) as (server, _):
        for name in given.drafters:
            for clients in given.clients:
                begins = range(0, max(clients, given.prompts), clients)
                calls = {
                    (way, begin, count): call
                    for begin in begins
                    for count in (given.tokens, 1)
                    for way, call in calls_of(texts[begin:][:clients], name, count).items()
                }
                timed = bench.interleave(calls, given.runs, f"{case}, {name}, {clients}")
                row = row_of(timed, given.tokens)
                rows.append({"case": case, "drafter": name, "clients": clients} | row)
    return rows


def row_of(timed: dict[Any, bench.Calls], count: int) -> dict[str, Any]:
    """The figures of all prompts together."""

    def runs(way: str, count: int) -> list[list[Tokens]]:
        calls = [own.results for key, own in timed.items() if key[0] == way and key[2] == count]
        return list(zip(*calls, strict=True))

    long = {way: [sum(ms for ms, _ in run) for run in runs(way, count)] for way in WAYS}
    here, first = ([median(ms for ms, _ in run) for run in runs(way, 1)] for way in WAYS[::2])
    told = {way: [ids for _, all in runs(way, count)[-1] for ids in all] for way in WAYS}
    num_tokens = sum(map(len, told["here"]))
    row = {f"{way}_tokens_per_s": round(num_tokens / median(long[way]) * 1e3, 1) for way in WAYS}
    for way in WAYS[1:]:
        row[way], row[f"{way}_quartiles"] = bench.speedup(long["here"], long[way])
    later = [theirs - own for theirs, own in zip(first, here, strict=True)]
    row["first_ms"] = round(median(here), 2)
    row["first_later_ms"], row["first_quartiles"] = bench.spread(later)
    return row | {"identical": told["here"] == told["whole"] == told["streamed"]}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--drafters", nargs="+", default=["none", bench.AUTO])
    options.add_argument("--clients", nargs="+", type=between(1, 8), default=[1])
    bench.add_count(options, "--prompts", 1, 13, 3, "at least, of the demo's")
    bench.add_count(options, "--tokens", 2, 1000, 128, "a request, at most")
    given = options.parse_args(arguments)
    rows = [row for case in given.cases for row in measure(case, given)]
    bench.report(__spec__.name, arguments, given, {"results": rows})


if __name__ == "__main__":
    main()
