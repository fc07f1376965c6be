"""Activations whose bits do not depend on where a number stands in its tensor.

torch computes most of a tensor a vector of numbers at a time. What is left over at the end of a
thread's share it computes one by one, and there some functions call another exp(). So the same
number may give other bits in another row, beside more rows or with more threads.

Either no share ends in a left-over, which depends on the width and on the number of threads, or the
activation is put together here from functions that have no second form: exp, log1p, tanh and erf,
and operations that IEEE 754 rounds in one way only. That takes three to five operations for one.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Numbers of rows that a forward may have, of which exact.py takes those with equal bits. Few, as
# oneDNN makes code for each and keeps it.
ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)

_VECTOR_BYTES = 128  # torch computes at most so much at a time
_GRAIN = 1 << 15  # torch gives each thread at least so many elements


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), inside in float32."""
    wide = x.float()
    below = wide.neg().exp_().add_(1)
    return torch.div(wide, below, out=below).to(x.dtype)  # a second buffer costs page faults


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x), inside in float32."""
    wide = x.float()
    return ((wide * math.sqrt(0.5)).erf_().add_(1).mul_(wide).mul_(0.5)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The same with Φ by tanh, as GPT-2's and Gemma's."""
    wide = x.float()
    inner = (wide * wide).mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x)."""
    wide = x.float()
    below = (wide * -1.702).exp_().add_(1)
    return torch.div(wide, below, out=below).to(x.dtype)


_STEADY = {
    "SiLU": silu,
    "SiLUActivation": silu,
    "GELUActivation": gelu,
    "GELUTanh": gelu_tanh,
    "QuickGELUActivation": quick_gelu,
}  # by the names of torch's and transformers' modules


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), inside in float32."""
    return x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), inside in float32, and x where torch gives x."""
    wide = x.float()
    return torch.where(wide > 20, wide, wide.exp().log1p()).to(x.dtype)


def has_left_over(width: int, dtype: torch.dtype) -> bool:
    """Whether some share of some number of rows of this width ends within a vector."""
    lanes = _VECTOR_BYTES // dtype.itemsize
    for rows in ROWS:
        size = rows * width
        threads = min(torch.get_num_threads(), -(-size // _GRAIN))
        share = -(-size // threads)
        if width % lanes or (threads > 1 and share % lanes):
            return True
    return False


def steady(activation: nn.Module, width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The activation for rows of this width, put together where it has to be."""
    return (
        _STEADY.get(type(activation).__name__, activation)
        if has_left_over(width, dtype)
        else activation
    )


class Steady(nn.Module):
    """A module in the place of the one that it computes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> [...], number by number."""
        return self.function(x.detach())  # nobody trains a packed model


def make_steady(model: nn.Module) -> None:
    """Replace the activations of a model of transformers, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in _STEADY:
                setattr(module, name, Steady(_STEADY[type(child).__name__]))


_STEADY_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    nn.functional.softplus: softplus,
    nn.functional.silu: silu,
}


class SteadyMode(TorchFunctionMode):
    """Within it these functions are the steady ones, whoever calls them: a model's own code.

    A call with options, as softplus(x, beta=4), is torch's own.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        """What torch calls in the place of any of its functions."""
        is_plain = len(args) == 1 and options in (None, {}, {"inplace": False})  # nn.SiLU's
        if function in _STEADY_FUNCTIONS and is_plain:
            return _STEADY_FUNCTIONS[function](args[0])
        return function(*args, **(options or {}))
