"""Linear layers whose weights lie as the CPU's matrix kernel wants them (oneDNN's packed format).

MKL takes two to three times as long for 2 to 6 rows as for one, so a verify would lose the rows
that it is meant to get for free; oneDNN with packed weights stays nearly flat (figures:
benchmarks/LOG.md). It also gives a row the same bits whatever other rows stand beside it, from two
rows on, which is half of bitwise lossless decoding.

The operators are torch's own but private: where one of them is missing, or on another device,
layers stay as they are. Not covered: experts of a mixture, which are no linear layers.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kernels.parts import linear_of
from kernels.weights import ShownWeight


@cache
def can_pack(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Whether this machine packs weights of this type."""
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        ops = torch.ops.mkldnn
        if dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
            return False
        packed = ops._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), None)
        x = torch.ones(2, 16, dtype=dtype)
        result = ops._linear_pointwise(x, packed, None, "none", [], "")
        added = ops._linear_pointwise.binary(x, x, packed, None, "add")
    except (AttributeError, RuntimeError):
        return False
    return bool((result == 16).all() and (added == 17).all())


def computes_bfloat16() -> bool:
    """Whether this CPU multiplies numbers of bfloat16 by itself, without making floats of them."""
    tests = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    return any(getattr(torch.cpu, name)() for name in tests if hasattr(torch.cpu, name))


LARGE = 8192  # outputs, of a layer that takes long
_MOST_ROWS = 32


class Weights:
    """One linear layer [out, in], packed where this machine can; the originals may then be freed.

    Bits depend on the number of rows that a call computes: whoever calls it keeps to the numbers
    that were checked (exact.py).
    """

    _is_packed = False

    @torch.no_grad()
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().clone()
        self._is_packed = can_pack(weight.dtype, weight.device.type)
        if self._is_packed:
            contiguous = self._weight.contiguous()
            self._weight = torch.ops.mkldnn._reorder_linear_weight(contiguous, None)
        # More rows than this are computed in several calls; None: any number at once. An output
        # layer takes seconds to check at every number of rows, so it has few of them. It loses
        # nothing: then arithmetic, not the reading of weights, is what takes time.
        is_large = self._is_packed and self.out_features > LARGE
        self.most_rows = _MOST_ROWS if is_large else None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Layers of equal signatures run the same code on numbers of their own."""
        return self.out_features, self.in_features, self.dtype, self._bias is None

    @property
    def num_bytes(self) -> int:
        """What the weight takes."""
        return self.out_features * self.in_features * self.dtype.itemsize

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in] and, if any, what to add to the result [..., out] -> [..., out]."""
        if not self._is_packed:
            return plus(nn.functional.linear(x, self._weight, self._bias), residual)
        if self.most_rows is not None and x.shape[-2] > self.most_rows and residual is None:
            return torch.cat([self(part) for part in x.split(self.most_rows, -2)], -2)
        operators = torch.ops.mkldnn._linear_pointwise
        if residual is None:
            return operators.default(x, self._weight, self._bias, "none", [], "")
        return operators.binary(x, residual, self._weight, self._bias, "add")


def plus(x: Tensor, residual: Tensor | None) -> Tensor:
    """Their sum, in the place of x."""
    return x if residual is None else x.add_(residual)


Kind = type[Weights]  # what linear layers become: packed floats, or integers (int8.py)


class PackedLinear(nn.Module):
    """What a linear layer becomes when it is packed."""

    compute: Weights

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.compute(x)


def pack(module: nn.Module, kind: Kind = Weights, besides: nn.Module | None = None) -> None:
    """Pack every linear layer in `module`, in place and one by one; the originals are freed.

    Those that are in `besides` as well are left to whoever packs that.

    In place, so that whoever shares a layer (an MTP head its target's output layer) has it packed
    as well. A weight that an embedding shares stays with the embedding: the packed copy is extra.
    """
    others = set(besides.modules()) if besides else set()
    for layer in module.modules():
        weight, bias = linear_of(layer) or (None, None)
        if weight is None or layer in others:
            continue
        if kind is not Weights or can_pack(weight.dtype, weight.device.type):
            layer._parameters.clear()
            layer.__class__ = PackedLinear
            layer.weight = ShownWeight(weight.dtype, weight.device, tuple(weight.shape))
            layer.compute = kind(weight, bias)
