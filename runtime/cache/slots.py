"""The memory of a KV cache: rows for requests that come and go, and what transformers writes there.

A row is a request's handle, a slot its place in the buffers now. When a row closes, the row in the
last slot moves to its slot. So the open rows lie together, and a pass reads them in one piece.
"""

import mmap
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, CacheLayerMixin

from runtime import kernels
from runtime.values import Model


@dataclass
class Placement:
    """Where a pass's tokens go: counts[b] tokens of text b, to slot slots[b] of the cache.

    They are [B, T], where shorter texts are padded on the left. Pads are never written there.
    """

    slots: list[int]
    counts: list[int]
    ends: list[int]  # each text's length after the pass
    end: int  # the largest of them: attention reads this many keys of each text
    device: torch.device

    @cached_property
    def positions(self) -> Tensor:
        """[B, T]: each token's place in its text, as [7, 8] of 2 that end at 9; of pads, any."""
        back = torch.arange(-max(self.counts), 0, device=self.device)
        return (back + torch.tensor(self.ends, device=self.device)[:, None]).clamp_(min=0)

    @cached_property
    def real(self) -> Tensor:
        """[B, T] bool: False on pads."""
        width, counts = self.positions.shape[1], self.positions.new_tensor(self.counts)
        return torch.arange(width, device=counts.device) >= width - counts[:, None]

    @cached_property
    def written(self) -> tuple[Tensor, Tensor]:
        """(slots, positions) of the real tokens."""
        slots = self.positions.new_tensor(self.slots)[:, None].expand_as(self.positions)
        return slots[self.real], self.positions[self.real]

    def arrange(self, rows: list[Tensor]) -> Tensor:
        """Pad and stack each text's ids [t] to [B, T], or its states [t, D] to [B, T, D]."""
        return pad_sequence(rows, batch_first=True, padding_side="left")

    def part(self, result: Tensor) -> list[Tensor]:
        """Split a pass's result [B, T, D] by text, without pads: [counts[b], D]."""
        return [row[len(row) - n :] for row, n in zip(result, self.counts, strict=True)]

    def mask(
        self, dtype: torch.dtype, window: int | None = None, looks_ahead: bool = False,
        size: int = 0,
    ) -> Tensor:  # fmt: skip
        """Additive mask [B, 1, T, end]: a token sees at most `window` tokens up to itself.

        [B, 1, size, end] of the last `size` tokens, which may be a block that `looks_ahead`: there
        each sees those behind it, too.
        """
        keys = torch.arange(self.end, device=self.positions.device)
        queries = self.positions[:, None, -size:, None]  # of size 0: all
        last = queries[:, :, -1:].expand_as(queries) if looks_ahead else queries
        unseen = keys > last
        if window is not None:
            unseen |= keys <= queries - window
        # Floats and not bools: transformers' eager attention adds the mask to the scores.
        return torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, torch.finfo(dtype).min)

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write keys or values [B, H, T, width]; returns all of these texts, [B, H, end, width]."""
        slots, positions = self.written
        buffer[slots, :, positions] = new.transpose(1, 2)[self.real]
        return buffer[self.slots, :, : self.end]


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, preallocated [slots, heads, capacity, width]."""

    def __init__(self, cache: "Slots") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Widths come from the states: not every family's are in its config. Zeros, not torch.empty:
        # attention multiplies a masked value by 0, and 0 · NaN would be NaN.
        rows, capacity = self._cache.num_rows, self._cache.max_length
        self.keys = lazy_zeros(key_states, rows, capacity)
        self.values = lazy_zeros(value_states, rows, capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write [B, H, T, width] at the current place; returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self._cache.current
        return place.write(self.keys, key_states), place.write(self.values, value_states)

    def get_seq_length(self) -> int:
        return self._cache.current.end - max(self._cache.current.counts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.current.end, 0

    def get_max_length(self) -> int:
        return self._cache.max_length


class Slots(Cache):
    """Rows, their slots, and each layer's buffers [slots, heads, max_length, width].

    One pass: `place` its tokens, run the model with this cache, `advance`.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int, device: Any) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.num_rows, self.max_length, self.device = num_rows, max_length, device
        self.lengths = [0] * num_rows  # tokens that each row holds
        self.rows: list[int] = []  # the open rows, by slot
        self.current: Placement  # of the current pass
        self.recurrent: list[Any] = []  # layers with a recurrent state (see states.py)
        self._free = list(range(num_rows))[::-1]
        self._written = [0] * num_rows  # tokens written to each slot since it was zeroed

    def slot(self, row: int) -> int:
        """An open row's slot, its place in the buffers."""
        return self.rows.index(row)

    def open_row(self, opened: ExitStack | None = None) -> int:
        """Take an empty row, which `opened` is to close. Raises ValueError when all are taken."""
        if not self._free:
            raise ValueError(f"all {self.num_rows} rows of the KV cache are in use")
        row = self._free.pop()
        self.rows.append(row)
        if opened:
            opened.callback(self.close_row, row)
        return row

    @torch.inference_mode()
    def close_row(self, row: int) -> None:
        """Free a row. The row in the last slot, if it is another one, is copied to this slot."""
        assert row not in self._free, f"row {row} closed twice"
        slot, last, buffers = self.slot(row), self.rows.pop(), self.buffers()
        scrub(buffers, slot, self._written[slot])
        if last != row:
            source, length = len(self.rows), self.lengths[last]
            for buffer in buffers:
                buffer[slot, :, :length] = buffer[source, :, :length]
            scrub(buffers, source, self._written[source])
            self.rows[slot], self._written[slot] = last, length
            slot = source  # this one is free now
        self.lengths[row] = self._written[slot] = 0
        self._free.append(row)

    def place(self, rows: list[int], counts: list[int]) -> Placement:
        """Place counts[b] >= 1 tokens after those of rows[b]. Raises ValueError if too many."""
        ends = [self.lengths[row] + count for row, count in zip(rows, counts, strict=True)]
        if (end := max(ends)) > self.max_length:
            raise ValueError(f"{end} tokens do not fit a KV cache of {self.max_length}")
        slots = [self.slot(row) for row in rows]
        for slot, last in zip(slots, ends, strict=True):  # now: the pass may fail halfway
            self._written[slot] = max(self._written[slot], last)
        self.current = Placement(slots, counts, ends, end, self.device)
        return self.current

    def advance(self, place: Placement) -> None:
        """Count the placed tokens as cached, after the pass that wrote them."""
        for slot, count in zip(place.slots, place.counts, strict=True):
            self.lengths[self.rows[slot]] += count

    @torch.inference_mode()
    def move(self, row: int, places: list[int], begin: int) -> None:
        """Move a row's tokens at rising `places` together, so that they stand from `begin` on."""
        slot, end = self.slot(row), begin + len(places)
        for buffer in self.buffers():
            buffer[slot, :, begin:end] = buffer[slot, :, places]

    def buffers(self) -> list[Tensor]:
        """Keys and values of each layer that has any, each [slots, heads, max_length, width]."""
        written = [layer for layer in self.layers if layer.is_initialized]
        return [buffer for layer in written for buffer in (layer.keys, layer.values)]


@kernels.exclusive()
@torch.inference_mode()
def run_modules(
    cached: Model,
    ids: Tensor,
    place: Placement,
    logits_to_keep: Tensor | int,
    layers: tuple[int, ...],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run transformers' own modules. Logits and hidden states are arranged like `ids`."""
    masks = {kind: place.mask(cached.model.dtype, n) for kind, n in cached.windows.items()}
    result = cached.model(
        input_ids=ids,
        # A model whose kinds of layers differ in window takes a mask for each kind.
        attention_mask=masks if len(set(cached.windows.values())) > 1 else [*masks.values()][0],
        position_ids=place.positions,
        past_key_values=cached.cache,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        output_hidden_states=[i if i < 0 else i + 1 for i in layers] or False,
    )
    # transformers lists the embeddings, then each block's output; the last one is normed.
    return result.logits, {i: result.hidden_states[i if i < 0 else i + 1] for i in layers}


def lazy_zeros(like: Tensor, num_rows: int, capacity: int) -> Tensor:
    """Zeros [num_rows, H, capacity, width], with H and width of `like` [B, H, T, width].

    Small pages take memory only once they are written, because most requests are short. A forked
    process has its own.
    """
    shape = num_rows, like.shape[1], capacity, like.shape[-1]
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = prod(shape) * like.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where there are no large ones
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def scrub(buffers: list[Tensor], slot: int, length: int) -> None:
    """Zero a cache's slot if it holds a NaN or infinity: masked, these still spoil attention.

    `length` tokens were written. Only the last layer is checked: earlier faults reach it.
    """
    if length and not all(b[slot, :, :length].isfinite().all() for b in buffers[-2:]):
        for buffer in buffers:
            buffer[slot] = 0
