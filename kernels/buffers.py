"""Memory of a KV cache: it is taken where it is written, and cleaned where a NaN was."""

from math import prod
from mmap import mmap

import torch
from torch import Tensor


def lazy_zeros(like: Tensor, num_rows: int, capacity: int) -> Tensor:
    """Zeros [num_rows, H, capacity, width], with H and width of `like` [B, H, T, width].

    They take memory only where something is written: most requests are short. (A forked process
    shares them. Memory of its own would be slower to write to.)
    """
    shape = num_rows, like.shape[1], capacity, like.shape[-1]
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    memory = mmap(-1, prod(shape) * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def scrub(buffers: list[Tensor], slot: int, length: int) -> None:
    """Zero a cache's slot if a NaN is in it: one that stays spoils attention even where masked.

    `length` tokens were written. What breaks a model shows in its last layer.
    """
    if length and not all(b[slot, :, :length].isfinite().all() for b in buffers[-2:]):
        for buffer in buffers:
            buffer[slot] = 0
