"""Which drafter is the fastest for your model and your prompts, or is plain decoding?

Every drafter that fits the model, `auto` and plain decoding have every prompt in turn. Speeds are
tokens per second, prompts included; `of_plain` is the speed in that of plain decoding in the same
run, as a median with its quartiles. `tok_pass` counts the tokens after the first one per target
pass, and `equal` says whether all outputs are plain decoding's. The last table has the command line
to use: that of the fastest, or of plain decoding where even its lower quartile is not above 1.

    python -m benchmarks.audition --prompts FILE [--model NAME_OR_PATH] [--draft-model …]
        [--eagle3 …] [--dflash …] [--dtype float32] [--quantize int8] [--k 5] [--tokens 128]
        [--temperature 0] [--raw] [--runs 5] [--json]

FILE has a prompt per line; or, if its name ends with .jsonl, an object {"prompt": …} per line. A
chat model gets them in its chat template, unless --raw is given. Past outputs, which a server may
look up for the drafter suffix, are left out: every run has the same prompts.
"""

import argparse
import shlex
import sys
from functools import partial
from statistics import median
from typing import Any

import benchmarks as bench
from drafters.panel import PLAIN
from engines.plan import LOADED, server_words
from messages import Engine, Request, RequestError, Sampling
from models.prompts import ids_of, prompts_of
from serving.options import Options
from serving.parsing import MAX_SPECULATIVE_TOKENS

Found = dict[tuple[str, str], bench.Finished]  # by way of decoding and prompt


def measure(
    engine: Engine, prompts: dict[str, list[int]], drafters: list[str], given: argparse.Namespace
) -> tuple[list[dict[str, Any]], Found]:
    """One row per way of decoding, plain decoding first, and what came of the first run."""
    sampling, ways = Sampling(temperature=given.temperature), [PLAIN, *drafters]

    def run(way: str, prompt: list[int]) -> bench.Finished:
        drafter = None if way == PLAIN else way
        request = Request(prompt, given.tokens, drafter, given.k, sampling=sampling, seed=1)
        return bench.run_together(engine, [request])[0]

    calls = {(way, name): partial(run, way, p) for name, p in prompts.items() for way in ways}
    timed, rows = bench.interleave(calls, given.runs, "prompts"), []
    found = {key: calls.results[0] for key, calls in timed.items()}

    def ms_per_token(way: str) -> list[float]:
        count = sum(len(found[way, name].output) for name in prompts)
        return [ms / count for ms in bench.in_all(timed[way, name].ms for name in prompts)]

    for way in ways:
        own_ms, total = ms_per_token(way), bench.total([found[way, name] for name in prompts])
        gain = bench.speedup(ms_per_token(PLAIN), own_ms)
        are_equal = [found[way, name].output == found[PLAIN, name].output for name in prompts]
        rows.append({
            "drafter": way, "tokens_per_s": round(1e3 / median(own_ms), 1),
            "of_plain": gain.median, "quartiles": gain.quartiles,
            "tok_pass": bench.places(total.tokens_per_pass, 2),
            "acceptance": bench.places(total.draft_acceptance_rate),
            "equal_outputs": sum(are_equal), "equal": all(are_equal),
        })  # fmt: skip
    return rows, found


def advice(rows: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, str]:
    """The fastest way in words, and its command line."""
    best, pays = rows[0], rows[0]["quartiles"][0] > 1
    words = [*server_words(given), "--drafter", best["drafter"] if pays else PLAIN]
    if pays and given.k != Options.num_speculative_tokens:
        words += ["--num-speculative-tokens", str(given.k)]
    gain = f"{best['drafter']} has {best['of_plain']:.2f} times the speed of plain decoding"
    found = gain if pays else "speculation does not pay here"
    return {"found": found, "command_line": shlex.join(words)}


def parser(doc: str, runs: int, k: int, dtype: str) -> argparse.ArgumentParser:
    """The models, and what is asked of them."""
    options = bench.parser(doc, runs)
    options.add_argument("--model", default="smollm2", help="the target (default: %(default)s)")
    options.add_argument("--draft-model", help="for the drafter draft_model")
    options.add_argument("--eagle3", help="a head for the target")
    options.add_argument("--dflash", help="a head of that kind")
    options.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default=dtype)
    options.add_argument("--quantize", choices=["int8"], help="of the target")
    bench.add_count(options, "--k", 1, MAX_SPECULATIVE_TOKENS, k, "draft tokens, at most")
    options.add_argument("--temperature", type=float, default=0.0)
    bench.add_count(options, "--tokens", 2, 100_000, 128, "a request, at most")
    return options


def load(given: argparse.Namespace, **options: Any) -> Engine:
    """The engine of these models."""
    models = {name: getattr(given, name) for name in LOADED}
    common = {"drafter": bench.AUTO, "num_speculative_tokens": given.k, "max_running": 1}
    return bench.load_engine(**models, **common, **options)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = parser(__doc__, 5, Options.num_speculative_tokens, "auto")
    text = "a prompt per line, or in a .jsonl file an object with the field prompt"
    options.add_argument("--prompts", required=True, metavar="FILE", help=text)
    options.add_argument("--raw", action="store_true", help="without the chat template")
    given = options.parse_args(arguments)
    try:
        texts = prompts_of(given.prompts)
        engine = load(given)
        prompts = ids_of(texts, engine.target, given.raw)
    except (ValueError, OSError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    rows = measure(engine, prompts, list(engine.panel.choices), given)[0]
    rows.sort(key=lambda row: -row["of_plain"])
    results = {"results": rows, "advice": [advice(rows, given)]}
    bench.report(__spec__.name, arguments, given, results)


if __name__ == "__main__":
    main()
