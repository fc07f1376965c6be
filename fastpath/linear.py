"""Linear layers whose weights lie as the CPU's matrix kernel wants them (oneDNN's packed format).

MKL takes two to three times as long for 2 to 6 rows as for one, so a verify would lose the rows
that it is meant to get for free; oneDNN with packed weights stays nearly flat (figures:
benchmarks/LOG.md). It also gives a row the same bits whatever other rows stand beside it, from two
rows on, which is half of bitwise lossless decoding.

The operators are torch's own but private: where one of them is missing, or on another device,
layers stay as they are. Not covered: experts of a mixture, which are no linear layers.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


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


# x [..., in] and, if any, what to add to the result -> [..., out].
Compute = Callable[[Tensor, Tensor | None], Tensor]


@torch.no_grad()
def compute_with(weight: Tensor, bias: Tensor | None) -> Compute:
    """The layer of weight [out, in] and bias [out], packed where possible; keeps neither then."""
    weight, bias = weight.detach(), None if bias is None else bias.detach().clone()
    if not can_pack(weight.dtype, weight.device.type):
        return lambda x, residual=None: plus(nn.functional.linear(x, weight, bias), residual)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    operators = torch.ops.mkldnn._linear_pointwise

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return operators.default(x, packed, bias, "none", [], "")
        return operators.binary(x, residual, packed, bias, "add")

    def compute(x: Tensor, residual: Tensor | None = None) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        num_pads = rows_to_run(num_rows) - num_rows
        if not num_pads:
            return run(x, residual)
        padded = [t if t is None else pad_rows(t, num_pads) for t in (x, residual)]
        return run(*padded)[:num_rows].view(*x.shape[:-1], -1)

    return compute


_STEPS = (16, 1), (64, 4), (256, 8), (inf, 32)  # (up to so many rows, rounded up to these)


@cache
def rows_to_run(num_rows: int) -> int:
    """How many rows to compute for so many: a few numbers for all that prompts may have.

    For each number of rows oneDNN makes code of its own and keeps it: 1 to 2.5 MB for all layers of
    the demo target, where prompts of 256 lengths would be 0.5 GB.

    Example: 1 to 16 as they are, 17 -> 20, 100 -> 104, 257 -> 288.
    """
    step = next(step for most, step in _STEPS if num_rows <= most)
    return -(-num_rows // step) * step


def pad_rows(x: Tensor, num_pads: int) -> Tensor:
    """[..., in] -> [rows + pads, in]."""
    return nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, num_pads))


def plus(x: Tensor, residual: Tensor | None) -> Tensor:
    """Their sum, in the place of x."""
    return x if residual is None else x.add_(residual)


class PackedLinear(nn.Module):
    """What a linear layer becomes when it is packed."""

    compute: Compute

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.compute(x, None)


class JoinedLinear:
    """Linear layers of the same input as one: gives their outputs one behind the other.

    Until `join` it computes with the layers' own weights; that takes no memory.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = list(layers)
        self.compute: Compute = lambda x, residual=None: plus(
            torch.cat([layer(x) for layer in self._layers], -1), residual
        )

    def join(self) -> None:
        """Make one layer of them, packed where possible, and let go of the others."""
        weight = torch.cat([layer.weight for layer in self._layers])
        biases = [layer.bias for layer in self._layers]
        if any(bias is not None for bias in biases):
            biases = [
                layer.weight.new_zeros(len(layer.weight)) if bias is None else bias
                for layer, bias in zip(self._layers, biases, strict=True)
            ]
        self.compute = compute_with(weight, None if biases[0] is None else torch.cat(biases))
        self._layers = []


def pack(module: nn.Module) -> None:
    """Pack every linear layer in `module`, in place and one by one; the originals are freed.

    In place, so that whoever shares a layer (an MTP head its target's output layer) has it packed
    as well. A weight that an embedding shares stays with the embedding: the packed copy is extra.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            weight, bias = layer.weight, layer.bias
        elif type(layer) is Conv1D:  # GPT-2's: a linear layer with its weight transposed
            weight, bias = layer.weight.T, layer.bias
        else:
            continue
        if can_pack(weight.dtype, weight.device.type):
            layer._parameters.clear()
            layer.__class__ = PackedLinear
            layer.compute = compute_with(weight, bias)
