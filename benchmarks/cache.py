"""What does a cycle's cache work cost? Append 6 tokens and take them back, at 512 … 16k tokens.

All 28 layers of Qwen3-0.6B's shape in bfloat16, no model. Ours is preallocated, and truncating
lowers a length. transformers' DynamicCache joins tensors by `torch.cat`, then crops. Microseconds,
medians of interleaved runs.

    python -m benchmarks.cache [--context 512 4096 16384] [--layers 28] [--runs 9] [--json]
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import benchmarks as bench
from benchmarks import core
from fastpath.forward import FastPlace
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
        place = slots.current = FastPlace(slots.place([row], [states.shape[2]]))
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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=9)
    length = between(1, 10**6)
    options.add_argument("--context", type=length, nargs="+", default=[512, 4096, 16_384])
    bench.add_count(options, "--layers", 1, 999, 28, "of the cache")
    given = options.parse_args(arguments)
    rows = [measure(context, given.layers, given.runs) for context in given.context]
    bench.report(__spec__.name, arguments, given, {"results": rows}, ["results"])


if __name__ == "__main__":
    main()
