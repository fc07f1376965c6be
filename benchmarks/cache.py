"""What does a cycle's cache work cost? Append 6 tokens and take them back, at 512 … 16k tokens.

All 28 layers of Qwen3-0.6B's shape in bfloat16, no model. Ours is preallocated, and truncating
lowers a length. transformers' DynamicCache joins tensors by `torch.cat`, then crops. Microseconds,
medians of interleaved runs.

Then, of recurrent layers in Qwen3.5-0.8B's shape: what does it cost to take half a draft back? Ours
steps the tokens that stay again (kernels/states.py). The other ways are to run the model again
for them, and to copy the state behind each token. In float32, 4 layers of which 3 are recurrent.

    python -m benchmarks.cache [--context 512 4096 16384] [--layers 28] [--k 1 4 8] [--runs 9]
"""

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import benchmarks as bench
from benchmarks import core
from kernels.decoder import Rows
from kernels.modules import FlatPlace
from kernels.start import speed_up
from serving.options import between

APPENDED = 6
HEADS, WIDTH = bench.SHAPES["0.6b"]["num_key_value_heads"], bench.SHAPES["0.6b"]["head_dim"]


@torch.inference_mode()
def measure(context: int, num_layers: int, runs: int) -> dict[str, Any]:
    """One context length's row."""
    torch.manual_seed(0)
    cached, new = (
        torch.randn(1, HEADS, count, WIDTH, dtype=torch.bfloat16) for count in (context, APPENDED)
    )
    slots = core.SlotCache(num_layers, 1, context + APPENDED, new.device)
    row, dynamic = slots.open_row(), DynamicCache()

    def append(states: Tensor) -> Tensor:
        count, where = states.shape[2], Rows()
        where.chain(0, slots.lengths[row], count)
        place = slots.current = FlatPlace(slots.place([row], [count]), *where.tensors())
        for layer in slots.layers:
            keys, _ = layer.update(states, states)
        slots.advance(place)
        return keys

    def append_there(states: Tensor) -> Tensor:
        for layer in range(num_layers):
            keys, _ = dynamic.update(states, states, layer)
        return keys

    append(cached)
    append_there(cached)
    # The keys are compared once; a timed call keeps nothing, so that memory is free again.
    methods = {
        "ours": lambda: (append(new).shape, slots.truncate(row, context)),
        "theirs": lambda: (append_there(new).shape, dynamic.crop(-APPENDED)),
    }
    is_equal = torch.equal(append(new), append_there(new))
    slots.truncate(row, context)
    dynamic.crop(-APPENDED)
    timed = bench.interleave(methods, runs, f"{context} tokens")
    return {
        "context": context,
        "ours_us": round(bench.median_ms(timed["ours"]) * 1e3, 1),
        "dynamic_cache_us": round(bench.median_ms(timed["theirs"]) * 1e3, 1),
        "ratio": bench.speedup(bench.times(timed["theirs"]), bench.times(timed["ours"])).median,
        "equal_keys": is_equal,
    }


def hybrid() -> Any:
    """A random model of Qwen3.5-0.8B's shape, but for its depth and vocabulary."""
    config = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, vocab_size=4096, eos_token_id=0,
        linear_num_key_heads=16, linear_num_value_heads=16, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(bench.EMBEDDED["demo"]).save_pretrained(folder)
        model = core.load_model(folder, core.Options(max_running=2))
    speed_up(model)
    return model


@torch.inference_mode()
def take_back(model: Any, k: int, runs: int) -> dict[str, Any]:
    """The row of drafts of `k` tokens, of which half are refused."""
    cache, stay = model.cache, 1 + k // 2
    (row,) = bench.hold(model, list(range(1, 65)))
    length, tokens = cache.lengths[row], list(range(9, 10 + k))
    states = [layer._marks[row][-1].state for layer in cache.recurrent]

    def verify(count: int = k + 1) -> Tensor:
        logits = model.forward([row], [tokens[:count]], [count]).logits[0]
        cache.truncate(row, length)
        return logits

    def step_again() -> None:
        cache.lengths[row] = length + stay
        for layer in cache.recurrent:
            layer._at(row, states[0])
            layer._marks[row].pop()  # to be made anew
        cache.truncate(row, length)

    verify()
    for layer in cache.recurrent:
        layer._marks[row].pop()  # behind the draft
    methods = {
        "step_again": step_again,
        "copies": lambda: [state.clone() for state in states for _ in tokens],
    }
    timed = bench.interleave(methods, runs, f"K = {k}: states")
    timed |= bench.interleave({"verify": verify, "again": lambda: verify(stay)}, runs, f"K = {k}")
    ms = {name: bench.median_ms(found) for name, found in timed.items()}
    cache.close_row(row)
    return {"k": k, "verify_ms": round(ms["verify"], 2)} | {
        f"{name}_percent": round(100 * ms[name] / ms["verify"], 1)
        for name in ("step_again", "again", "copies")
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=9)
    length = between(1, 10**6)
    options.add_argument("--context", type=length, nargs="+", default=[512, 4096, 16_384])
    bench.add_count(options, "--layers", 1, 999, 28, "of the cache")
    options.add_argument("--k", type=between(1, 16), nargs="*", default=[1, 4, 8])
    given = options.parse_args(arguments)
    rows = [measure(context, given.layers, given.runs) for context in given.context]
    model = hybrid() if given.k else None
    found = {"results": rows, "rollback": [take_back(model, k, given.runs) for k in given.k]}
    bench.report(__spec__.name, arguments, given, found, ["results", "rollback"])


if __name__ == "__main__":
    main()
