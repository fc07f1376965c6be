"""Which drafter is the fastest for your model and your prompts, or is plain decoding?

Every drafter that fits the model, `auto` and plain decoding have every prompt in turn. Speeds are
tokens per second, prompts included; `of_plain` is the speed in that of plain decoding in the same
run, as a median with its quartiles. `tok_pass` counts the tokens after the first one per target
pass, and `equal` says whether all outputs are plain decoding's. The second table has the command
line to use: that of the fastest, or of plain decoding where even its lower quartile is not above 1.
In the last one `at_1` … are the shares of drafts whose first, second, … token was accepted, with
all before it.

    python -m benchmarks.audition [--prompts FILE] [--each 3] [--raw] [--model NAME_OR_PATH]
        [--draft-model …] [--eagle3 …] [--dflash …] [--dtype float32] [--quantize int8]
        [--drafters ngram auto] [--k 5] [--fixed-k] [--tokens 128] [--temperature 0] [--runs 5]
        [--json]

FILE has a prompt per line; or, if its name ends with .jsonl, an object {"prompt": …} per line. A
chat model gets them in its chat template, unless --raw is given. Without FILE it gets `--each` of
each kind in benchmarks/chat.jsonl, and another model the demo's. `--fixed-k` leaves the controller
out: so is a head's acceptance measured. Past outputs, which a server may look up for the drafter
suffix, are left out: every run has the same prompts.
"""

import argparse
import shlex
import sys
from functools import partial
from statistics import median
from typing import Any

import benchmarks as bench
from drafters.pool import PLAIN
from messages import MAX_SPECULATIVE_TOKENS, Engine, Request, RequestError, Sampling
from models.prompts import ids_of, prompts_of
from serving.options import Options

LOADED = ("model", "draft_model", "eagle3", "dflash", "dtype", "quantize")
Found = dict[tuple[str, str], bench.Finished]  # by method of decoding and prompt
Kinds = dict[str, dict[str, list[int]]]  # token ids by kind and name of a prompt


def measure(
    engine: Engine, prompts: dict[str, list[int]], drafters: list[str], flags: argparse.Namespace
) -> tuple[list[dict[str, Any]], Found]:
    """One row per method of decoding, plain decoding first, and what came of the first run."""
    sampling, methods = Sampling(temperature=flags.temperature), [PLAIN, *drafters]

    def run(method: str, prompt: list[int]) -> bench.Finished:
        drafter = None if method == PLAIN else method
        request = Request(prompt, flags.tokens, drafter, flags.k, sampling=sampling, seed=1)
        return bench.run_together(engine, [request])[0]

    calls = {
        (method, name): partial(run, method, p) for name, p in prompts.items() for method in methods
    }
    timed, rows = bench.interleave(calls, flags.runs, "prompts"), []
    found = {key: calls.results[0] for key, calls in timed.items()}

    def ms_per_token(method: str) -> list[float]:
        count = sum(len(found[method, name].output) for name in prompts)
        return [ms / count for ms in bench.in_all(timed[method, name].ms for name in prompts)]

    for method in methods:
        own_ms, total = ms_per_token(method), bench.total([found[method, name] for name in prompts])
        gain = bench.speedup(ms_per_token(PLAIN), own_ms)
        are_equal = [found[method, name].output == found[PLAIN, name].output for name in prompts]
        rows.append({
            "drafter": method, "tokens_per_s": round(1e3 / median(own_ms), 1),
            "of_plain": gain.median, "quartiles": gain.quartiles,
            "tok_pass": bench.places(total.tokens_per_pass, 2),
            "acceptance": bench.places(total.draft_acceptance_rate),
            "equal_outputs": sum(are_equal), "equal": all(are_equal),
        })  # fmt: skip
    return rows, found


def advice(rows: list[dict[str, Any]], flags: argparse.Namespace) -> dict[str, str]:
    """The fastest method in words, and its command line."""
    best, pays = rows[0], rows[0]["quartiles"][0] > 1
    words = ["python", "08_speculative_decoding.py", "--port", "5000"]
    for name in LOADED:
        value = getattr(flags, name)
        if value not in (None, getattr(Options, name)):
            words += [f"--{name.replace('_', '-')}", value]
    words += ["--drafter", best["drafter"] if pays else PLAIN]
    if pays and flags.k != Options.num_speculative_tokens:
        words += ["--num-speculative-tokens", str(flags.k)]
    gain = f"{best['drafter']} has {best['of_plain']:.2f} times the speed of plain decoding"
    found = gain if pays else "speculation does not pay here"
    return {"found": found, "command_line": shlex.join(words)}


def accepted(found: Found, kinds: Kinds, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per drafter and kind of prompts: how much of its drafts came true."""
    rows = []
    for drafter in flags.drafters:
        for kind, names in (kinds | {"all": bench.flat(kinds)}).items():
            total = bench.total([found[drafter, name] for name in names])
            shares = total.per_position()["acceptance_rate_per_position"]
            shares += [None] * (flags.k - len(shares))  # places that no draft reached
            row = {"drafter": drafter, "prompts": kind}
            row["tok_pass"] = bench.places(total.tokens_per_pass, 2)
            row |= {f"at_{i}": bench.places(share, 2) for i, share in enumerate(shares, 1)}
            rows.append(row)
    return rows


def parser() -> argparse.ArgumentParser:
    """The models, and what is asked of them."""
    options = bench.parser(__doc__)
    text = "a prompt per line, or in a .jsonl file an object with the field prompt"
    options.add_argument("--prompts", metavar="FILE", help=text)
    bench.add_count(options, "--each", 1, 8, 3, "prompts of each kind, without FILE")
    options.add_argument("--raw", action="store_true", help="without the chat template")
    options.add_argument("--model", default="smollm2", help="the target (default: %(default)s)")
    options.add_argument("--draft-model", help="for the drafter draft_model")
    options.add_argument("--eagle3", help="a head for the target")
    options.add_argument("--dflash", help="a head of that kind")
    options.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    options.add_argument("--quantize", choices=["int8"], help="of the target")
    options.add_argument("--drafters", nargs="+", help="(default: all that fit, and auto)")
    default = Options.num_speculative_tokens
    bench.add_count(options, "--k", 1, MAX_SPECULATIVE_TOKENS, default, "draft tokens, at most")
    options.add_argument("--fixed-k", action="store_true", help="without the controller")
    options.add_argument("--temperature", type=float, default=0.0)
    bench.add_count(options, "--tokens", 2, 100_000, 128, "a request, at most")
    return options


def load(flags: argparse.Namespace) -> tuple[Engine, Kinds]:
    """The engine of these models, and the prompts for it. Raises ValueError and RequestError."""
    if flags.raw and not flags.prompts:
        raise ValueError("--raw goes with --prompts")
    texts = prompts_of(flags.prompts) if flags.prompts else {}
    models = {name: getattr(flags, name) for name in LOADED}
    common = {"drafter": bench.AUTO, "num_speculative_tokens": flags.k, "max_running": 1}
    engine = bench.load_engine(**models, **common, fixed_k=flags.fixed_k)
    own = ids_of(texts, engine.target, flags.raw)
    return engine, {"all": own} if own else bench.chats(engine, flags.each)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = parser()
    flags = options.parse_args(arguments)
    try:
        engine, kinds = load(flags)
    except (ValueError, OSError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    choices = [name for name in engine.pool.choices if name not in engine.pool.special]
    flags.drafters = flags.drafters or choices
    if unknown := set(flags.drafters) - set(choices):
        options.error(f"no drafter {min(unknown)}: choose from {', '.join(choices)}")
    rows, found = measure(engine, bench.flat(kinds), flags.drafters, flags)
    rows.sort(key=lambda row: -row["of_plain"])
    results = {"results": rows, "advice": [advice(rows, flags)]}
    results["accepted"] = accepted(found, kinds, flags)
    bench.report(__spec__.name, arguments, flags, results)


if __name__ == "__main__":
    main()
