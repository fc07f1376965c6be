"""The forward of a family that is not made of plain blocks: transformers' modules, our sums.

All that is fed is one flat batch of rows, as in forward.py:

    texts   a b c │ d │ e f      ids [1, N]   a b c d e f     each with its slot, position and place

Linear layers, experts and attention run in C, where a row's bits depend on that row, and on the
keys that it sees. What is left in a module goes number by number or row by row (rowwise.py).
Attention reads the KV cache's buffers where they are, so no row of keys is padded or cut.

Families whose modules have special code for attention cannot be run so.
"""

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from runtime.cache.slots import run_modules
from runtime.values import KeyCache, Model

from . import library
from .decoder import BlockStruct, Rows
from .patches import panels_in
from .rowwise import RowWise
from .weights import DTYPES, PackedMatrix

NAME = "kernels"  # transformers' name for our attention


class FlatPlacement:
    """Where the rows of a forward go in the cache; stands in for a Placement of cache/slots.py."""

    def __init__(self, place: Any, fed: Rows) -> None:
        self.slots, self.counts, self.ends = place.slots, place.counts, place.ends
        self.end, self._references = place.end, list[Any]()
        self.batch = fed.batch(self._references)
        self.rows = torch.tensor([fed.slots, fed.positions, fed.places])  # [3, N]
        self.positions = self.rows[1][None]  # [1, N]
        self.num_written = self.num_attended = 0
        assert 0 <= int(self.rows.min()) and int(self.rows[1:].max()) < self.end, "no such place"
        assert max(map(max, fed.lines), default=0) < self.end

    def arrange(self, rows: list[Tensor]) -> Tensor:
        """Join the tensors [t, …] of all texts: -> [1, N, …]."""
        return torch.cat(rows)[None]

    def part(self, result: Tensor) -> list[Tensor]:
        """A forward's result [1, N, D] -> [t, D] of each text."""
        return list(result[0].split(self.counts))

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """A mask that hides nothing and takes no memory: it leads `attention_forward` here."""
        mask = torch.zeros((), dtype=dtype).expand(1, 1, self.rows.shape[1], self.end)
        mask.place, mask.window = self, window
        return mask

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write keys or values [1, H, N, width]; returns those of all slots up to the last."""
        slots, _, places = self.rows
        buffer[slots, :, places] = new[0].transpose(0, 1).to(buffer.dtype)
        self.num_written += 1
        return buffer[: max(self.slots) + 1, :, : self.end]


def attention_forward(
    module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, scaling: float | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: query [1, H, N, D] -> ([1, N, H, D], no weights).

    key and value [slots, Hkv, L, width] are what `FlatPlacement.write` returned, or made of it. A
    call without our mask gets transformers' sdpa.
    """
    place = getattr(attention_mask, "place", None)
    if place is None and softcap is None and s_aux is None:
        mask = attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    if place is None or options.get("position_bias") is not None or key.dtype not in DTYPES:
        raise TypeError("attention by a mask that is not known here")
    count, width = query.shape[2:]
    is_ours = key.shape[:3] == value.shape[:3] and key.shape[3] == width
    has_all = len(key) > max(place.slots) and key.shape[2] >= place.end
    if not (is_ours and has_all and count == place.rows.shape[1] and key.dtype == value.dtype):
        raise TypeError("keys and values of a form that is not known here")
    place.num_attended += 1
    capacity = _capacity(key)
    if capacity is None or capacity != _capacity(value):
        key, value, capacity = key.contiguous(), value.contiguous(), key.shape[2]
    queries, heads = query[0].transpose(0, 1).float().contiguous(), query.shape[1]
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    assert not heads % key.shape[1] and key.is_cpu and value.is_cpu
    block = BlockStruct(
        window=attention_mask.window or 0, softcap=softcap or 0,
        scaling=width**-0.5 if scaling is None else scaling, is_half=key.dtype == torch.bfloat16,
        heads=heads, kv_heads=key.shape[1], width=width, value_width=value.shape[3],
        capacity=capacity, keys=key.data_ptr(), values=value.data_ptr(),
        sinks=library.address(sinks, heads),
    )  # fmt: skip
    attended = library.empty_f32(count, heads, value.shape[3])
    structs = ctypes.byref(block), ctypes.byref(place.batch)
    library.compute("run_attention", *structs, *map(library.address, (queries, attended)))
    return attended[None].to(query.dtype), None


def _capacity(buffer: Tensor) -> int | None:
    """Keys of a head of [slots, H, L, width], as they lie; None if heads do not lie in a row."""
    slots, heads, length, width = buffer.shape
    step = buffer.stride(1)
    is_whole = slots == 1 or buffer.stride(0) == heads * step
    if buffer.stride()[2:] != (width, 1) or not is_whole or step < length * width or step % width:
        return None
    return step // width


class _Mode(RowWise):
    """Calls of torch's attention with our mask are ours, too."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        if function is nn.functional.scaled_dot_product_attention:
            if hasattr(mask := (options or {}).get("attn_mask"), "place"):
                attended, _ = attention_forward(None, *args[:3], mask, options.get("scale"))
                return attended.transpose(1, 2)
        return super().__torch_function__(function, types, args, options)


class Modules:
    """Runs a cached model's modules on flat batches: what KernelForward asks of a Decoder."""

    nets = ()  # that C runs: recurrent layers are modules here, and keep their states themselves
    ropes: dict[str, Any] = {}  # modules rotate by themselves

    def __init__(self, cached: Model) -> None:
        """`cached` is the core's CachedModel, whose layers are packed."""
        self._cached, self._mode = cached, _Mode(cached.model)
        self.unsteady = self._mode.unsteady
        self.num_threads = torch.get_num_threads()

    @property
    def panels(self) -> set[PackedMatrix]:
        return panels_in(self._cached.model)

    def follow(self, cache: KeyCache) -> None:
        """Check the cache: transformers' modules write keys and values to the model's cache."""
        assert cache is self._cached.cache

    def __call__(
        self, rows: Rows, layers: tuple[int, ...] = (), **_: Any
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [n, V] of the rows wanted, and states [N, D] behind each of `layers`."""
        cache = self._cached.cache
        place = cache.current = FlatPlacement(cache.current, rows)
        ids, wanted = torch.tensor([rows.ids]), torch.tensor(rows.wanted or [0])
        with self._mode:  # it needs no gradients, and leaves the cores to the kernels
            logits, states = run_modules(self._cached, ids, place, wanted, layers)
        if place.num_attended < place.num_written // 2:
            raise TypeError("layers attend by code of their own")
        return logits[0, : len(rows.wanted)].float(), {i: state[0] for i, state in states.items()}


def attend_in_c(model: PreTrainedModel) -> None:
    """Let a model of transformers attend by `attention_forward`.

    Most families ask an interface. Falcon calls torch's attention, which is caught. Some have a
    method `_attn`, which is replaced.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(type(module), "_attn"):  # GPT-J, GPT-Neo, CodeGen, …
            module._attn = partial(_attend_for, module)


def _attend_for(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """What a method `_attn` does: the result is [1, H, N, D]."""
    if not hasattr(attention_mask, "place"):
        return type(module)._attn(module, query, key, value, attention_mask)
    divisors = (getattr(module, name, None) for name in ("scale_attn", "norm_factor"))
    scaling = 1 / float(next((divisor for divisor in divisors if divisor is not None), 1))
    attended, _ = attention_forward(module, query, key, value, attention_mask, scaling)
    return attended.transpose(1, 2).to(value.dtype), None
