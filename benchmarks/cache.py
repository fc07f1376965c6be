"""What does a cycle's cache work cost? Append 6 tokens and take them back, at 512 … 16k tokens.

All 28 layers of Qwen3-0.6B's shape in bfloat16, no model: ours (preallocated, truncating lowers a
length) against transformers' DynamicCache (`torch.cat`, then crop). Microseconds, medians of
interleaved runs.

    python -m benchmarks.cache [--context 512 4096 16384] [--layers 28] [--runs 9] [--json]
        [--plot FILE.png]
"""

from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import SHAPES, core, describe, finish, interleave, parser
from benchmarks.plots import lines
from serving.options import between

APPENDED = 6
HEADS, WIDTH = SHAPES["0.6b"]["num_key_value_heads"], SHAPES["0.6b"]["head_dim"]


class Ours:
    """A SlotCache with one row of `length` tokens."""

    def __init__(self, num_layers: int, states: torch.Tensor) -> None:
        length = states.shape[2]
        self.cache = core.SlotCache(num_layers, 1, length + APPENDED, states.device, core.Shapes())
        self.row, self.length = self.cache.open_row(), length
        self.append(states)

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Into every layer; the last one's keys."""
        place = self.cache.place([self.row], [states.shape[2]])
        for layer in self.cache.layers:
            keys, _ = layer.update(states, states)
        self.cache.advance(place)
        return keys

    def cycle(self, states: torch.Tensor) -> torch.Tensor:
        keys = self.append(states)
        self.cache.truncate(self.row, self.length)
        return keys


class Theirs:
    """The same with a DynamicCache."""

    def __init__(self, num_layers: int, states: torch.Tensor) -> None:
        self.cache, self.num_layers = DynamicCache(), num_layers
        self.append(states)

    def append(self, states: torch.Tensor) -> torch.Tensor:
        """Into every layer; the last one's keys."""
        for layer in range(self.num_layers):
            keys, _ = self.cache.update(states, states, layer)
        return keys

    def cycle(self, states: torch.Tensor) -> torch.Tensor:
        keys = self.append(states)
        self.cache.crop(-states.shape[2])
        return keys


@torch.inference_mode()
def measure(context: int, num_layers: int, runs: int) -> dict[str, Any]:
    """One context length's row."""
    torch.manual_seed(0)
    cached, new = (
        torch.randn(1, HEADS, count, WIDTH, dtype=torch.bfloat16) for count in (context, APPENDED)
    )
    ours, theirs = Ours(num_layers, cached), Theirs(num_layers, cached)
    is_equal = torch.equal(ours.cycle(new), theirs.cycle(new))
    methods = {"ours": lambda: ours.cycle(new).shape, "theirs": lambda: theirs.cycle(new).shape}
    timed = interleave(methods, runs, f"{context} tokens")
    us = {name: median(call.ms for call in calls) * 1e3 for name, calls in timed.items()}
    return {
        "context": context,
        "ours_us": round(us["ours"], 1),
        "dynamic_cache_us": round(us["theirs"], 1),
        "ratio": round(us["theirs"] / us["ours"], 1),
        "equal_keys": is_equal,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a table, then one JSON line."""
    options = parser(__doc__, runs=9)
    length = between(1, 10**6)
    options.add_argument("--context", type=length, nargs="+", default=[512, 4096, 16_384])
    options.add_argument(
        "--layers", type=between(1, 999), default=28, help="(default: %(default)s)"
    )
    given = options.parse_args(arguments)
    rows = [measure(context, given.layers, given.runs) for context in given.context]
    document = describe(__spec__.name, arguments) | {
        "layers": given.layers,
        "heads": HEADS,
        "width": WIDTH,
        "dtype": "bfloat16",
        "appended": APPENDED,
        "runs": given.runs,
        "results": rows,
    }
    drawn = {}
    for key, name in {"ours_us": "ours", "dynamic_cache_us": "DynamicCache"}.items():
        drawn |= lines(rows, lambda _, name=name: name, "context", key)
    plot = {"panels": {"cache work": drawn}, "x_label": "tokens", "y_label": "µs a cycle"}
    finish(given, document, ["results"], plot | {"is_log": True})


if __name__ == "__main__":
    main()
