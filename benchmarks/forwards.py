"""Forwards of a model, and the memory floor: the weights must be read, whatever is computed.

The bandwidth is that of summing a large tensor with the threads in use; a model that fits into a
processor's cache may be read faster.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers

from benchmarks import interleave, median_ms


def read_bandwidth(device: torch.device, num_bytes: int = 1 << 29) -> float:
    """Bytes per second: the best of several sums."""
    tensor, best_s = torch.ones(num_bytes // 4, device=device), float("inf")
    for _ in range(10):
        began = time.perf_counter()
        tensor.sum().item()
        best_s = min(best_s, time.perf_counter() - began)
    return num_bytes / best_s


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """What one step of a dense model reads: all weights; of an embedding only a few rows."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in model.parameters())  # a tied one counts once
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        count -= embedding.numel()
    return count * dtype.itemsize


def forward(model: Any, row: int, tokens: list[int]) -> Callable[[], None]:
    """A verify of `tokens` behind what the cache row holds, and its end."""

    def run() -> None:
        length = model.cache.lengths[row]
        model.forward([row], [tokens], [len(tokens)]).logits[0].argmax(-1).tolist()
        model.cache.truncate(row, length)

    return run


def measure_forwards(
    model: Any, prompt: list[int], counts: Iterable[int], runs: int
) -> list[dict[str, Any]]:
    """One row per number of tokens in a forward."""
    row = model.cache.open_row()
    model.forward([row], [prompt], [1])
    methods = {count: forward(model, row, prompt[:count]) for count in counts}
    timed = interleave(methods, runs, "forwards")
    model.cache.close_row(row)
    one = median_ms(timed[1])
    return [
        {
            "rows": count,
            "ms": round(median_ms(calls), 3),
            "min_ms": round(min(call.ms for call in calls), 3),
            "max_ms": round(max(call.ms for call in calls), 3),
            "t_verify": round(median_ms(calls) / one, 3),
        }
        for count, calls in timed.items()
    ]
