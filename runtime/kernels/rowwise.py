"""Functions of torch in forms that give a row the same bits whatever stands beside it.

torch computes most of a tensor a vector of numbers at a time. What is left over at the end of a
thread's share it computes one by one, and there some functions call another exp(). So the same
number may give other bits in another row, beside more rows or with more threads. Here they are put
together from functions that have no second form (exp, log1p, tanh and erf), and from operations
that IEEE 754 rounds in one way only.

A product of rows with a weight goes to the kernels. Any other product of matrices is torch's, which
adds in an order that depends on the number of rows: it is noted, as are functions that have two
forms, and then nothing is promised.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .weights import DTYPES, PackedMatrix


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """x · sigmoid(x), inside in float32."""
    wide = x.float()
    below = wide.neg().exp_().add_(1)
    return torch.div(wide, below, out=below).to(x.dtype)  # a second buffer costs page faults


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x · Φ(x), or with Φ by tanh, inside in float32."""
    wide = x.float()
    if approximate == "none":
        return (wide * math.sqrt(0.5)).erf_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)
    inner = (wide * wide).mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), inside in float32."""
    return x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(beta x)) / beta, inside in float32, and x where torch gives x."""
    wide = x.float() * beta
    return torch.where(wide > threshold, wide, wide.exp().log1p()).div_(beta).to(x.dtype)


def rsqrt(x: Tensor) -> Tensor:
    """1 / √x, inside in float32."""
    return x.float().rsqrt().to(x.dtype)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (silu, gelu, sigmoid, softplus, rsqrt)
}
_FEW = 8  # terms of a sum that is written out
_UNSTEADY = {  # products, and functions that were seen to have two forms
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "bilinear",
    "scaled_dot_product_attention", "conv1d", "grouped_mm",
    "mish", "elu", "selu", "celu", "exp2", "sinh", "cosh",
}  # fmt: skip
_POWERS = 2, 3, 0.5, -1, -0.5  # that torch computes in one form; the last one in float32 alone


def _is_unsteady(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a call with these arguments has two forms, where others have not."""
    if name in ("pow", "__pow__"):
        power = args[1] if len(args) > 1 else None
        is_wide = args[0].dtype == torch.float32
        return not isinstance(power, int | float) or power not in _POWERS[: 5 if is_wide else 4]
    if name == "softmax":
        dim = options.get("dim", args[1] if len(args) > 1 else None)
        return dim is None or dim % args[0].dim() != args[0].dim() - 1
    return False


class RowWise(TorchFunctionMode):
    """Within it torch's functions are the ones above, in the code of a model, too."""

    def __init__(self, model: nn.Module) -> None:
        """Weights of `model` that its code multiplies with by itself are put in panels, once."""
        super().__init__()
        self._storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self._panels: dict[tuple[Any, ...], PackedMatrix] = {}
        self.unsteady = set[str]()  # torch's functions that ran and are not row by row

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        """What torch calls in the place of any of its functions."""
        name, options = getattr(function, "__name__", ""), options or {}
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*args, **options)
        if name == "linear" and args[1].dtype in DTYPES:
            return self._multiply(*args, **options)
        if name in ("matmul", "bmm", "mm") and (product := self._product(*args)) is not None:
            return product
        if name in _UNSTEADY or _is_unsteady(name, args, options):
            self.unsteady.add(name)
        return function(*args, **options)

    def _is_weight(self, weight: Tensor) -> bool:
        return weight.untyped_storage().data_ptr() in self._storages

    def _product(self, x: Tensor, y: Tensor) -> Tensor | None:
        """x @ y in one order of every sum; None where the sums can have several orders."""
        if y.dim() in (2, 3) and y.dtype in DTYPES and self._is_weight(y):
            if y.dim() == 2:
                return self._multiply(x, y.T)
            return torch.stack([self._multiply(*pair) for pair in zip(x, y.mT, strict=True)])
        if min(x.dim(), y.dim()) < 2 or x.shape[-1] > _FEW:
            return None
        terms = zip(x.split(1, -1), y.split(1, -2), strict=True)
        return reduce(torch.add, (one * other for one, other in terms))

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] with a weight [out, in] -> [..., out]."""
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        if (panels := self._panels.get(key)) is None:
            panels = PackedMatrix.of(weight)
            if self._is_weight(weight):  # for as long as the model is there
                self._panels[key] = panels
        result = panels(x).to(x.dtype)
        return result if bias is None else result + bias
