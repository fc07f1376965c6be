"""The gated delta rule in C (recurrent.c)."""

import ctypes

import torch
from torch import Tensor

from . import library

_WIDEST = 512  # keys that recurrent.c has room for


def delta_steps(
    state: Tensor, both: Tensor, value: Tensor, decay: Tensor, beta: Tensor, product: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The rule over the tokens of one text: the state behind them, and the outputs.

    Takes what GatedDelta.prepare in fastpath/recurrent.py gives [T, …], and returns [H, K, V] and
    [T, H, V]. None for heads that the code has no room for.
    """
    if state.shape[1] > _WIDEST:
        return None
    inputs = [x.float().contiguous() for x in (both, value, decay, beta, product)]
    heads, width, columns = state.shape
    tokens = len(both)
    sizes = [2 * width, columns, 1, 1, 1]
    assert all(x.numel() == tokens * heads * size for x, size in zip(inputs, sizes, strict=True)), (
        "sizes that do not go together"
    )
    after, out = state.float().clone().contiguous(), state.new_empty(tokens, heads, columns)
    given = [ctypes.c_void_p(x.data_ptr()) for x in (after, *inputs, out)]
    numbers = tokens, heads, width, columns, torch.get_num_threads()
    library.load().delta_steps(*given, *numbers)
    return after, out
