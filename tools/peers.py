"""Is it faster than transformers' generate()? The same weights, K, prompts and tokens, in turn.

Ways to decode, each like for like: plain greedy; n-gram against prompt lookup, with suffixes of the
same sizes; and for the embedded model its draft model against an assistant, whose schedule is
constant and whose confidence threshold 0, so that it drafts K tokens as well, and MTP, where
generate() drafts one token per layer of the head, so K is 1 for both. For a model with recurrent
layers (--model hybrid) generate() refuses every way to draft, so there `mtp` is ours against its
plain greedy decoding. generate()'s models are separate copies that nothing was done to.

`ratio` counts prompts, too, and is a median of runs; `decode_ratio` counts only what comes after
the first tokens. A ratio above 1 says that ours is faster. `passes` are the target's, prompts
included: generate() drafts before it has read the prompt, which saves up to one a request.
`equal_tokens` are those before the first difference: in float32 all should be equal; in bfloat16
generate()'s logits depend on the number of positions in a pass, and texts part at near-ties.

    python -m tools.peers [--model embedded|hybrid|smollm2|DIR] [--dtype float32|bfloat16]
        [--k 5] [--each 8] [--tokens 96] [--runs 5] [--json]

A chat model gets the prompts of tools/chat.jsonl, another one the demo's. llama.cpp is
compared in tools.pair and tools.passes.
"""

import os
import time
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import tools as bench
from runtime.models.catalogue import resolve_model
from runtime.models.files import is_gguf
from runtime.values import MAX_SPECULATIVE_TOKENS, Engine, Request
from server.options import ROOT, Options


class Result(NamedTuple):
    """One generation."""

    tokens: list[int]
    num_passes: int  # of the target, the prompt's included
    prompt_ms: float  # until the first tokens came
    num_first: int  # how many those were: generate() may draft before it reads the prompt


class Peer:
    """transformers' generate(), on models of its own, told to draft as much as ours does."""

    def __init__(self, model: str, dtype: str, device: Any, k: int) -> None:
        def load(name: str) -> Any:
            folder, file = os.path.split(name) if is_gguf(name) else (name, None)
            file = {"gguf_file": file} if file else {}
            found = AutoModelForCausalLM.from_pretrained(folder, **file, dtype=dtype)
            return found.to(device).eval()

        self.model, self.head, self.passes = load(resolve_model(model)), None, list[None]()
        self.model.register_forward_pre_hook(lambda *_: self.passes.append(None))
        # It looks up suffixes down to one token, as ours does.
        lookup = {
            "prompt_lookup_num_tokens": k,
            "max_matching_ngram_size": Options.prompt_lookup_max,
        }
        self.arguments: dict[str, dict[str, Any]] = {"greedy": {}, "ngram": lookup}
        if model == "hybrid":
            self.arguments = {"greedy": {}, "mtp": {}}
        if model == "embedded":
            assistant = load(str(ROOT / "demo_models" / "draft"))
            own = assistant.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = k, "constant"
            own.assistant_confidence_threshold = 0.0
            self.arguments["draft_model"] = {"assistant_model": assistant}
            self.head = MtpModel.from_pretrained(self.model)
            self.arguments["mtp"] = {"use_mtp": True}

    def generate(self, method: str, prompt: list[int], num_tokens: int) -> Result:
        """Up to `num_tokens` greedy tokens."""
        self.passes, came, began = [], list[tuple[float, int]](), time.perf_counter()

        def put(tokens: torch.Tensor) -> None:
            """It is handed the prompt, then tokens as they come."""
            came.append((time.perf_counter(), tokens.numel()))

        ids = torch.tensor([prompt], device=self.model.device)
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
            pad_token_id=0, streamer=Mock(put=put), **self.arguments[method],
        )  # fmt: skip
        first_at, num_first = came[1]
        new = output[0, len(prompt) :].tolist()
        return Result(new, len(self.passes), (first_at - began) * 1e3, num_first)


def ours(engine: Engine, request: Request) -> Result:
    """What our engine makes of a request."""
    ((output, statistics),) = bench.run_together(engine, [request])
    passes = statistics.prefills + statistics.target_passes
    return Result(output, passes, statistics.prompt_ms, 1)


def measure(engine: Engine, peer: Peer, flags: Any) -> list[dict[str, Any]]:
    """One row per method and kind of prompts."""
    kinds = bench.chats(engine, flags.each)
    prompts, methods = bench.flat(kinds), {}
    for method in peer.arguments:
        k = min(flags.k, peer.head.num_mtp_layers) if method == "mtp" and peer.head else flags.k
        drafter = None if method == "greedy" else method
        for name, prompt in prompts.items():
            request = Request(prompt, flags.tokens, drafter, k)
            methods[method, name, "ours"] = partial(ours, engine, request)
            methods[method, name, "theirs"] = partial(peer.generate, method, prompt, flags.tokens)
    # generate() loads the MTP head anew at each call.
    with patch.object(MtpModel, "from_pretrained", lambda *_, **__: peer.head):
        timed = bench.interleave(methods, flags.runs, "generate")
    groups = {kind: list(group) for kind, group in kinds.items()} | {"all": list(prompts)}
    return [
        {"method": method, "prompts": kind}
        | row_of(*([timed[method, name, who] for name in names] for who in ("ours", "theirs")))
        for method in peer.arguments
        for kind, names in groups.items()
    ]


def per_token(calls: list[bench.Calls], of_later: bool = False) -> np.ndarray:
    """Milliseconds a token of each run over all prompts; of the tokens after the first ones."""
    results = [of_prompt.results[0] for of_prompt in calls]
    count = sum(len(each.tokens) - of_later * each.num_first for each in results)
    ms = np.array([of_prompt.ms for of_prompt in calls])  # [prompts, runs]
    prompt_ms = np.array([[one.prompt_ms for one in of_prompt.results] for of_prompt in calls])
    return (ms - of_later * prompt_ms).sum(0) / max(count, 1)


def row_of(ours: list[bench.Calls], theirs: list[bench.Calls]) -> dict[str, Any]:
    """One method on some prompts."""
    own, other = per_token(ours), per_token(theirs)
    gain = bench.speedup(other, own)
    later = bench.speedup(per_token(theirs, of_later=True), per_token(ours, of_later=True))
    results = [[of_prompt.results[0] for of_prompt in side] for side in (ours, theirs)]
    pairs = [(mine.tokens, other.tokens) for mine, other in zip(*results, strict=True)]
    ours_passes, their_passes = (sum(each.num_passes for each in side) for side in results)
    return {
        "ours_tokens_per_s": round(1e3 / np.median(own), 1),
        "generate_tokens_per_s": round(1e3 / np.median(other), 1),
        "ratio": gain.median, "quartiles": gain.quartiles, "decode_ratio": later.median,
        "ours_passes": ours_passes, "generate_passes": their_passes,
        "num_tokens": sum(len(mine) for mine, _ in pairs),
        "equal_tokens": sum(len(os.path.commonprefix(pair)) for pair in pairs),
        "num_outputs": len(pairs), "equal_outputs": sum(mine == other for mine, other in pairs),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__)
    options.add_argument("--model", default="embedded", help="(default: %(default)s)")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    bench.add_count(options, "--k", 1, MAX_SPECULATIVE_TOKENS, 5, "draft tokens")
    bench.add_count(options, "--each", 1, 8, 8, "prompts of each kind, at most")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    flags = options.parse_args(arguments)
    engine = bench.load_engine(model=flags.model, dtype=flags.dtype, fixed_k=True, max_running=2)
    peer = Peer(flags.model, flags.dtype, engine.target.model.device, flags.k)
    bench.report(__spec__.name, arguments, flags, {"results": measure(engine, peer, flags)})


if __name__ == "__main__":
    main()
