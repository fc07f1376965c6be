"""What does it bring to serve requests together? 1 to 16 clients over HTTP, with each drafter.

So many clients ask at once, each three times, for texts of different lengths: the next request
takes the place of one that ended. Every drafter does it in turn, with the server's own choice of K.
Speeds are tokens per second of all clients together, as medians. `of_none` is a drafter's speed in
that of not drafting in the same run, `of_best` that of `auto` in that of the best of all others.

    python -m benchmarks.batch [--runs 5] [--tokens 96] [--sizes 1 4 8 16] [--model smollm2]
        [--json]
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import benchmarks as bench
from benchmarks.servers import FORGETFUL, OURS, Server, ask, started
from drafters.pool import PLAIN
from models.prompts import read_prompts
from serving.options import between

SIZES = (1, 4, 8, 16)
ROUNDS = 3  # requests, one after another, of each client


def measure(flags: Any) -> list[dict[str, Any]]:
    """One row per number of clients and drafter."""
    command, rows = [*OURS, *FORGETFUL, "--model", flags.model], list[dict[str, Any]]()
    with started([*command, "--max-running", str(max(SIZES))]) as server:
        health = server.health()
        others = [name for name in health["drafters"] if name not in (bench.AUTO, *bench.SPECIAL)]
        names = [PLAIN, *others, bench.AUTO]
        chat = {"chat": health["chat_template"]}
        bodies = [
            {"prompt": text, "max_tokens": flags.tokens // 2 + 7 * i % 16 * flags.tokens // 15}
            for i, text in enumerate(list(read_prompts(chat["chat"]).values()) * 16)
        ]
        for size in flags.sizes:
            methods = {
                name: partial(write, server, bodies[: ROUNDS * size], chat | {"drafter": name})
                for name in names
            }
            timed = bench.interleave(methods, flags.runs, f"{size} clients")
            rows += [{"clients": size} | row_of(name, timed) for name in names]
            others = [timed[name].ms for name in names[:-1]]
            rows[-1]["of_best"] = of_best(timed[bench.AUTO].ms, others)
    return rows


def write(server: Server, bodies: list[dict[str, Any]], fields: dict[str, Any]) -> list[list[int]]:
    """The token ids of all answers; a third as many clients as requests ask at once."""
    size = len(bodies) // ROUNDS

    def client(first: int) -> list[list[int]]:
        told = [ask(server.port, "/generate", body | fields) for body in bodies[first::size]]
        return [each.events[-1]["token_ids"] for each in told]

    with ThreadPoolExecutor(size) as pool:
        return [ids for found in pool.map(client, range(size)) for ids in found]


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


def row_of(name: str, timed: dict[str, bench.Calls]) -> dict[str, Any]:
    """The figures of one drafter among all."""
    plain, own = timed[PLAIN], timed[name]
    gain, tokens = bench.speedup(plain.ms, own.ms), sum(map(len, own.results[-1]))
    return {
        "drafter": name, "tokens_per_s": round(tokens / median(own.ms) * 1e3, 1),
        "of_none": gain.median, "quartiles": gain.quartiles, "of_best": None,
        "identical": own.results[-1] == plain.results[-1],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, on average")
    options.add_argument("--sizes", type=between(1, 16), nargs="+", default=SIZES, help="clients")
    options.add_argument("--model", default="embedded", help="the target (default: ours)")
    flags = options.parse_args(arguments)
    bench.report(__spec__.name, arguments, flags, {"batches": measure(flags)})


if __name__ == "__main__":
    main()
