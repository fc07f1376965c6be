"""Is it faster than transformers' generate()? The same weights, K, prompts and tokens, in turn.

Four ways to decode, each like for like: plain greedy; n-gram against prompt lookup, with suffixes
of the same sizes; the draft model against an assistant model, whose schedule is constant and whose
confidence threshold 0, so that it drafts K tokens as well; and MTP, where generate() drafts one
token per layer of the head, so K is 1 for both. generate() reads the head from disk at each call;
here it gets one that was loaded before. Its models are separate copies that nothing was done to.
Models of random weights (--shape 0.6b) have neither draft model nor head, and their prompt is a
random pattern, repeated.

`ratio` counts prompts, too; `decode_ratio` only what comes after the first tokens; `pass_ratio` is
per pass and not per token, for outputs that are not equal and so take different numbers of passes.

`passes` are forwards of the target, prompts included. generate() drafts before it has read the
prompt (not with MTP), which saves up to one pass a request; our n-gram takes the latest match, not
the first, and reads on in its own draft where the text ends. `equal_tokens` are those before the
first difference. In float32 all should be equal; in bfloat16 a position's logits differ with the
number of rows beside it, in generate() as well, and texts part at near-ties.

Where llama-cpp-python and gguf are installed, a second table compares forwards with llama.cpp's
(llama_peer.py). Not covered: vLLM, which is made for other machines.

    python -m benchmarks.peers [--shape demo|0.6b] [--dtype float32|bfloat16] [--context 64] [--k 5]
        [--kinds easy hard] [--tokens 96] [--runs 5] [--json] [--plot FILE.png]
"""

import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import (
    SHAPES,
    Timed,
    demo_prompts,
    describe,
    finish,
    fixed_engine,
    flat,
    generate_all,
    interleave,
    llama_peer,
    median_ms,
    model_folder,
    parser,
)
from benchmarks.transformers_peer import Peer, Result
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

METHODS = {"greedy": None, "ngram": "ngram", "draft_model": "draft_model", "mtp": "mtp"}
Case = tuple[str, str, str]  # method, prompt, "ours" or "theirs"


def generate_ours(
    engine: Any, prompt: list[int], num_tokens: int, drafter: str | None, k: int
) -> Result:
    """Up to `num_tokens` greedy tokens."""
    outputs, statistics = generate_all(engine, [prompt], num_tokens, drafter, k)
    passes = statistics.prefills + statistics.target_passes
    return Result(outputs[0], passes, statistics.prompt_ms, 1)


def cases(engine: Any, peer: Peer, prompts: dict[str, list[int]], given: Any) -> dict[Case, Any]:
    """What to time: a function without arguments, by case."""
    found: dict[Case, Callable[[], Result]] = {}
    for method in peer.arguments:
        k = min(given.k, peer.head.num_mtp_layers) if method == "mtp" else given.k
        for name, prompt in prompts.items():
            ours = prompt, given.tokens, METHODS[method], k
            theirs = method, prompt, given.tokens
            found[method, name, "ours"] = lambda a=ours: generate_ours(engine, *a)
            found[method, name, "theirs"] = lambda a=theirs: peer.generate(*a)
    return found


class Total(NamedTuple):
    """A list of prompts together; rates in tokens per second."""

    num_tokens: int
    num_passes: int
    rate: float  # medians of times, prompts included
    decode_rate: float | None  # of what comes after the first tokens, if anything does
    rates: list[float]  # run by run


def total(calls: list[list[Timed]]) -> Total:
    """Of several runs of each prompt."""
    results = [of_prompt[0].result for of_prompt in calls]
    num_tokens = sum(len(result.tokens) for result in results)
    num_later = num_tokens - sum(result.num_first for result in results)
    later_ms = sum(median(call.ms - call.result.prompt_ms for call in runs) for runs in calls)
    return Total(
        num_tokens,
        sum(result.num_passes for result in results),
        num_tokens / sum(map(median_ms, calls)) * 1e3,
        num_later / later_ms * 1e3 if num_later else None,
        [num_tokens / sum(call.ms for call in run) * 1e3 for run in zip(*calls, strict=True)],
    )


def row_of(ours: list[list[Timed]], theirs: list[list[Timed]]) -> dict[str, Any]:
    """One method on some prompts; a ratio above 1 says that ours is faster."""
    own, other = total(ours), total(theirs)
    both_decode = own.decode_rate and other.decode_rate
    pass_ms = [side.num_tokens / side.rate / side.num_passes for side in (own, other)]
    ratios = [mine / its for mine, its in zip(own.rates, other.rates, strict=True)]
    pairs = [
        (mine[0].result.tokens, other[0].result.tokens)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {
        "ours_tokens_per_s": round(own.rate, 1),
        "generate_tokens_per_s": round(other.rate, 1),
        "ratio": round(own.rate / other.rate, 2),
        "min_ratio": round(min(ratios), 2),
        "max_ratio": round(max(ratios), 2),
        "decode_ratio": both_decode and round(own.decode_rate / other.decode_rate, 2),
        "pass_ratio": round(pass_ms[1] / pass_ms[0], 2),
        "ours_passes": own.num_passes,
        "generate_passes": other.num_passes,
        "num_tokens": own.num_tokens,
        "equal_tokens": sum(len(os.path.commonprefix(pair)) for pair in pairs),
        "num_outputs": len(pairs),
        "equal_outputs": sum(mine == other for mine, other in pairs),
    }


def rows_of(timed: dict[Case, list[Timed]], kinds: dict[str, list[str]]) -> list[dict[str, Any]]:
    """One row per method and kind of prompts."""
    return [
        {"method": method, "prompts": kind}
        | row_of(*([timed[method, name, who] for name in names] for who in ("ours", "theirs")))
        for method in dict.fromkeys(method for method, _, _ in timed)
        for kind, names in kinds.items()
    ]


def pattern(vocabulary: int, length: int) -> list[int]:
    """Random tokens that repeat after 32: something to look up."""
    chance = torch.Generator().manual_seed(0)
    return (torch.randint(vocabulary, (32,), generator=chance).tolist() * length)[:length]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a table, then one JSON line."""
    options = parser(__doc__)
    options.add_argument("--shape", choices=["demo", *SHAPES], default="demo", help="of the target")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options.add_argument(
        "--context", type=between(2, 10**5), help="of a random model's prompt (64)"
    )
    options.add_argument("--k", type=between(1, MAX_SPECULATIVE_TOKENS), default=5)
    options.add_argument("--kinds", nargs="+", help="demo prompts whose names begin so (all)")
    options.add_argument("--tokens", type=between(2, 1000), default=96, help="a request, at most")
    given = options.parse_args(arguments)
    is_demo = given.shape == "demo"
    if is_demo and given.context or given.kinds and not is_demo:
        options.error("--context goes with a random --shape, and --kinds with the demo prompts")
    context = given.context or (300 if is_demo else 64)
    length = None if is_demo else context + max(given.tokens, 8)  # six rows, at the least
    with model_folder(given.shape, given.dtype) as folder:
        engine = fixed_engine(model=folder, dtype=given.dtype, max_running=2, max_model_len=length)
        peer = Peer(folder, given.dtype, engine.target.model.device, given.k, is_demo)
    if is_demo:
        chosen = demo_prompts(engine.target.tokenizer, given.kinds)
    else:
        engine.eos_ids = set()  # as generate() has none for a random model
        chosen = {"random": {"pattern": pattern(engine.target.vocab_size, context)}}
    prompts = flat(chosen)
    with peer.keeping_the_head():
        timed = interleave(cases(engine, peer, prompts, given), given.runs, "generate")
    if lacking := llama_peer.missing():
        print(lacking, file=sys.stderr)
        llama = []
    else:
        text = pattern(engine.target.vocab_size, context)
        llama = llama_peer.measure(peer.model, engine.target, given.dtype, text, given.runs)
    kinds = {kind: list(group) for kind, group in chosen.items()}
    rows = rows_of(timed, kinds | ({"all": list(prompts)} if len(kinds) > 1 else {}))
    document = describe(__spec__.name, arguments) | {
        "shape": given.shape,
        "dtype": given.dtype,
        "k": given.k,
        "tokens": given.tokens,
        "runs": given.runs,
        "prompts": {kind: {name: len(prompts[name]) for name in kinds[kind]} for kind in kinds},
        "results": rows,
        "llama_cpp": llama,
    }
    bars = {row["method"]: [] for row in rows}
    for row in rows:
        bars[row["method"]].append((row["prompts"], row["ratio"]))
    plot = {
        "panels": {"ours / generate()": bars},
        "x_label": "prompts",
        "y_label": "tokens/s, ratio",
    }
    finish(given, document, ["results", "llama_cpp"], plot | {"level": 1.0})


if __name__ == "__main__":
    main()
