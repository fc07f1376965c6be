"""Memory of a KV cache: allocated when first written, and zeroed where a NaN was found."""

from math import prod
from mmap import mmap

import torch
from torch import Tensor


def lazy_zeros(like: Tensor, num_rows: int, capacity: int) -> Tensor:
    """Zeros [num_rows, H, capacity, width], with H and width of `like` [B, H, T, width].

    Pages take memory only once they are written, because most requests are short. (The mapping
    is shared with forked processes. A private mapping would be slower to write to.)
    """
    shape = num_rows, like.shape[1], capacity, like.shape[-1]
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    memory = mmap(-1, prod(shape) * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def scrub(buffers: list[Tensor], slot: int, length: int) -> None:
    """Zero a cache's slot if it holds a NaN or infinity: masked, these still spoil attention.

    `length` tokens were written. Only the last layer is checked: earlier faults reach it.
    """
    if length and not all(b[slot, :, :length].isfinite().all() for b in buffers[-2:]):
        for buffer in buffers:
            buffer[slot] = 0
