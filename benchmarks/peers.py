"""Is it faster than transformers' generate()? The same weights, K, prompts and tokens, in turn.

Four ways to decode, each like for like: plain greedy; n-gram against prompt lookup, with suffixes
of the same sizes; the draft model against an assistant model, whose schedule is constant and whose
confidence threshold 0, so that it drafts K tokens as well; and MTP, where generate() drafts one
token per layer of the head, so K is 1 for both. generate() reads the head from disk at each call;
here it gets one that was loaded before. Its models are separate copies that nothing was done to.
Models of random weights (--shape 0.6b) have neither draft model nor head, and their prompt is a
random pattern, repeated. For a model with recurrent layers (--shape hybrid, the embedded one)
generate() refuses every way to draft, so there `mtp` is ours against its plain greedy decoding.

`ratio` counts prompts, too, and is a median of runs; `decode_ratio` counts only what comes after
the first tokens; `pass_ratio` is per pass and not per token, for outputs that are not equal and so
take different numbers of passes. A ratio above 1 says that ours is faster.

`passes` are forwards of the target, prompts included. generate() drafts before it has read the
prompt (not with MTP), which saves up to one pass a request; our n-gram takes the latest match, not
the first, and reads on in its own draft where the text ends. `equal_tokens` are those before the
first difference. In float32 all should be equal; in bfloat16 a position's logits differ with the
number of rows beside it, in generate() as well, and texts part at near-ties.

Where llama-cpp-python and gguf are installed, a second table compares forwards with llama.cpp's
(llama_peer.py), with weights of the same type or of those that `--llama` names; `--passes` measures
nothing else. `floor` is the share that reading the weights takes of our pass, at the speed at which
torch sums 512 MiB, which some kernels surpass. Not covered: vLLM, which is made for other machines.

    python -m benchmarks.peers [--shape demo|hybrid|0.6b|1.5b] [--dtype float32|bfloat16]
        [--context 64] [--k 5] [--kinds easy hard] [--tokens 96] [--quantize int8]
        [--llama q8_0 q4_1] [--passes] [--runs 5] [--json]
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import benchmarks as bench
from benchmarks import llama_peer
from messages import Request
from serving.options import ROOT, Options, between
from serving.parsing import MAX_SPECULATIVE_TOKENS


class Result(NamedTuple):
    """One generation."""

    tokens: list[int]
    num_passes: int  # target forwards, the prompt's included
    prompt_ms: float  # until the first tokens came
    num_first: int  # how many those were: generate() may draft before it reads the prompt


class _Clock:
    """What generate() calls a streamer: is handed the prompt, then tokens as they come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


class Peer:
    """transformers' generate(), on models of its own, told to draft as much as ours does."""

    def __init__(self, folder: str, dtype: str, device: Any, k: int, shape: str) -> None:
        def load(name: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()

        self.model, self.head, self.num_passes = load(folder), None, 0
        self.model.register_forward_pre_hook(self._count)
        assert Options.prompt_lookup_min == 1, "prompt lookup goes down to suffixes of one token"
        largest = Options.prompt_lookup_max
        lookup = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": largest}
        self.arguments: dict[str, dict[str, Any]] = {"greedy": {}, "ngram": lookup}
        if shape == "hybrid":
            self.arguments = {"greedy": {}, "mtp": {}}
        if shape == "demo":
            assistant = load(str(ROOT / "demo_models" / "draft"))
            own = assistant.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = k, "constant"
            own.assistant_confidence_threshold = 0.0
            self.arguments["draft_model"] = {"assistant_model": assistant}
            self.head = MtpModel.from_pretrained(self.model)
            self.arguments["mtp"] = {"use_mtp": True}

    def _count(self, *_: Any) -> None:
        self.num_passes += 1

    @contextmanager
    def keeping_the_head(self) -> Iterator[None]:
        """generate() loads the MTP head anew at each call; within, it finds this one."""
        with mock.patch.object(MtpModel, "from_pretrained", lambda *_, **__: self.head):
            yield

    def generate(self, method: str, prompt: list[int], num_tokens: int) -> Result:
        """Up to `num_tokens` greedy tokens."""
        self.num_passes, clock, began = 0, _Clock(), time.perf_counter()
        ids = torch.tensor([prompt], device=self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            **self.arguments[method],
        )
        new, prompt_ms = output[0, len(prompt) :].tolist(), (clock.times[1] - began) * 1e3
        return Result(new, self.num_passes, prompt_ms, clock.counts[1])


def generate_ours(engine: Any, request: Request) -> Result:
    """The same by ours."""
    output, statistics = bench.run(engine, request)
    passes = statistics.prefills + statistics.target_passes
    return Result(output, passes, statistics.prompt_ms, 1)


def measure(
    engine: Any, peer: Peer, kinds: dict[str, dict[str, list[int]]], given: Any
) -> list[dict[str, Any]]:
    """One row per method and kind of prompts."""
    prompts, methods = bench.flat(kinds), {}
    for method in peer.arguments:
        k = min(given.k, peer.head.num_mtp_layers) if method == "mtp" and peer.head else given.k
        drafter = None if method == "greedy" else method
        for name, prompt in prompts.items():
            request, theirs = Request(prompt, given.tokens, drafter, k), (method, prompt)
            methods[method, name, "ours"] = lambda r=request: generate_ours(engine, r)
            methods[method, name, "theirs"] = lambda a=theirs: peer.generate(*a, given.tokens)
    with peer.keeping_the_head():
        timed = bench.interleave(methods, given.runs, "generate")
    groups = {kind: list(group) for kind, group in kinds.items()}
    groups |= {"all": list(prompts)} if len(groups) > 1 else {}
    return [
        {"method": method, "prompts": kind}
        | row_of(*([timed[method, name, who] for name in names] for who in ("ours", "theirs")))
        for method in peer.arguments
        for kind, names in groups.items()
    ]


class Total(NamedTuple):
    """A list of prompts together."""

    num_tokens: int
    num_passes: int
    ms_per_token: list[float]  # run by run, prompts included
    later_ms_per_token: list[float]  # of what comes after the first tokens, if anything does


def total(calls: list[list[bench.Timed]]) -> Total:
    """Of several runs of each prompt."""
    results = [of_prompt[0].result for of_prompt in calls]
    num_tokens = sum(len(result.tokens) for result in results)
    num_later = num_tokens - sum(result.num_first for result in results)
    ms = [sum(call.ms for call in of_run) for of_run in zip(*calls, strict=True)]
    later_ms = [
        sum(call.ms - call.result.prompt_ms for call in of_run)
        for of_run in zip(*calls, strict=True)
    ]
    return Total(
        num_tokens,
        sum(result.num_passes for result in results),
        [each / num_tokens for each in ms],
        [each / num_later for each in later_ms] if num_later else [],
    )


def row_of(ours: list[list[bench.Timed]], theirs: list[list[bench.Timed]]) -> dict[str, Any]:
    """One method on some prompts."""
    own, other = total(ours), total(theirs)
    gain = bench.speedup(other.ms_per_token, own.ms_per_token)
    can_decode = own.later_ms_per_token and other.later_ms_per_token
    own_share, other_share = (side.num_tokens / side.num_passes for side in (own, other))
    pairs = [
        (mine[0].result.tokens, other[0].result.tokens)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {
        "ours_tokens_per_s": round(1e3 / median(own.ms_per_token), 1),
        "generate_tokens_per_s": round(1e3 / median(other.ms_per_token), 1),
        "ratio": gain.median,
        "quartiles": gain.quartiles,
        "decode_ratio": bench.speedup(other.later_ms_per_token, own.later_ms_per_token).median
        if can_decode
        else None,
        "pass_ratio": round(gain.median * other_share / own_share, 2),
        "ours_passes": own.num_passes,
        "generate_passes": other.num_passes,
        "num_tokens": own.num_tokens,
        "equal_tokens": sum(len(os.path.commonprefix(pair)) for pair in pairs),
        "num_outputs": len(pairs),
        "equal_outputs": sum(mine == other for mine, other in pairs),
    }


def pattern(vocabulary: int, length: int) -> list[int]:
    """Random tokens that repeat after 32: something to look up."""
    return (bench.random_tokens(vocabulary, 32) * length)[:length]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    bench.add_model(options)
    length = between(2, 10**5)
    options.add_argument("--context", type=length, help="of a random model's prompt (64)")
    bench.add_count(options, "--k", 1, MAX_SPECULATIVE_TOKENS, 5, "draft tokens")
    options.add_argument("--kinds", nargs="+", help="demo prompts whose names begin so (all)")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    options.add_argument("--quantize", choices=["int8"], help="of our target")
    options.add_argument("--llama", nargs="+", choices=llama_peer.TYPES, help="(as --dtype)")
    options.add_argument("--passes", action="store_true", help="leave generate() out")
    given = options.parse_args(arguments)
    is_demo = given.shape in bench.EMBEDDED
    if is_demo and given.context or given.kinds and not is_demo:
        options.error("--context goes with a random --shape, and --kinds with the demo prompts")
    context = given.context or (300 if is_demo else 64)
    length = None if is_demo else context + max(given.tokens, 8)  # six rows, at the least
    with bench.model_folder(given.shape, given.dtype) as folder:
        size = {"max_running": 2, "max_model_len": length}
        kind = {"dtype": given.dtype, "quantize": given.quantize}
        engine = bench.load_engine(model=folder, fixed_k=True, **kind, **size)
        peer = Peer(folder, given.dtype, engine.target.model.device, given.k, given.shape)
    text = pattern(engine.target.vocab_size, context)
    if is_demo:
        kinds = bench.demo_prompts(engine.target.tokenizer, given.kinds)
    else:
        engine.eos_ids = set()  # as generate() has none for a random model
        kinds = {"random": {"pattern": text}}
    rows = [] if given.passes else measure(engine, peer, kinds, given)
    lacking, llama = llama_peer.missing(), []
    if lacking:
        print(lacking, file=sys.stderr)
    else:
        for kind in given.llama or [given.dtype]:
            llama += llama_peer.measure(peer.model, engine.target, kind, text, given.runs)
    lengths = {kind: {name: len(p) for name, p in group.items()} for kind, group in kinds.items()}
    results = {"prompts": lengths, "results": rows, "llama_cpp": llama}
    bench.report(__spec__.name, arguments, given, results, ["results", "llama_cpp"])


if __name__ == "__main__":
    main()
