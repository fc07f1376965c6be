"""Linear layers in integers of eight bits: a quarter of the memory, and sums without rounding.

    row of a weight  w = s · integers in [-127, 127]      s = max |w| / 127
    row of an input  x = t · integers in [-127, 127]      t = max |x| / 127
    output           s · t · (sum of products of integers)

A sum of integers does not depend on its order. So a row gets the same bits alone and in company,
where floats need shapes that were checked. The quantised model is another model than the one in the
file, though: its answers are its own, and speculation keeps to them.

The operators belong to torch, which says that they will be removed one day: they are called here
only. A CPU without VNNI adds pairs of products in 16 bits, and cuts off what does not fit without a
word. So the operator has to show exact sums of the largest numbers; else inputs get 7 bits, and if
even those are wrong there is no int8.

Not covered: experts of a mixture, and other devices than the CPU.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.weights import ShownWeight

from .linear import Weights

_LARGEST = 127  # of a weight's integers
_WIDEST = 66_000  # inputs, so that 255 · 127 · inputs fits 31 bits
_TINY = 1e-30  # the scale of a row of zeros


class _Inputs(NamedTuple):
    """How the integers of an input's row are kept: as `zero` plus at most `largest`."""

    largest: int
    zero: int


@cache
def inputs() -> _Inputs | None:
    """The finest inputs whose sums this machine computes exactly, or None."""
    for kind in (_Inputs(127, 128), _Inputs(63, 64)):
        try:
            if all(_is_exact(kind, width) for width in (64, 576, 1001)):
                return kind
        except (AttributeError, RuntimeError):  # this build of torch has no such operator
            return None
    return None


def _is_exact(kind: _Inputs, width: int) -> bool:
    """Whether the operator's sums of the largest products are those of exact integers."""
    random = torch.Generator().manual_seed(width)
    largest = torch.tensor([-1, 1])
    w = torch.cat([largest[torch.randint(2, (30, width), generator=random)], torch.ones(2, width)])
    x = torch.cat([largest[torch.randint(2, (7, width), generator=random)], torch.ones(1, width)])
    w[0], w[1] = -1, torch.randint(-_LARGEST, _LARGEST + 1, (width,), generator=random) / _LARGEST
    w[1, 0] = 1
    found = _multiply(x.float(), _packed(w.float()), kind)
    wanted = (x.double() * _LARGEST) @ (w.double() * _LARGEST).round().T / _LARGEST**2
    return torch.equal(found.double().mul(_LARGEST).round(), wanted.mul(_LARGEST).round())


def _packed(weight: Tensor) -> Any:
    """Integers of a weight [out, in], a scale for each output, as the operator wants them."""
    scales = _scales(weight)[:, 0].double()
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantize_per_channel will go
        integers = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(integers, None)


def _multiply(x: Tensor, packed: Any, kind: _Inputs) -> Tensor:
    """x [..., in] float32, whose numbers are at most 1 in size -> [..., out] float32."""
    operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return operator(x, 1 / kind.largest, kind.zero, packed)


class Int8Weights(Weights):
    """One linear layer [out, in] in integers; inputs and outputs are floats as they were."""

    @torch.no_grad()
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        kind = inputs()
        if kind is None or weight.shape[1] > _WIDEST:
            wide = f"--quantize int8 takes inputs of at most {_WIDEST} numbers"
            raise ValueError(why_not(weight.device.type) or wide)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = None if bias is None else bias.detach().float()
        self._kind, self._packed = kind, _packed(weight.detach().float())
        self.most_rows = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Layers of equal signatures run the same code on numbers of their own."""
        return "int8", *super().signature

    @property
    def num_bytes(self) -> int:
        """A byte for each weight, and for each output its scale and its sum of weights."""
        return self.out_features * (self.in_features + 8)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in] and, if any, what to add to the result [..., out] -> [..., out]."""
        x = x.float()
        scale = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True).clamp_(min=_TINY)
        result = _multiply(x / scale, self._packed, self._kind).mul_(scale)
        if self._bias is not None:
            result += self._bias
        return (result if residual is None else result.add_(residual)).to(self.dtype)


class Int8Embedding(nn.Embedding):
    """What an embedding becomes: integers [words, D], and a scale for each word."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., D]."""
        rows = (self.integers[ids] * self.scales[ids]).to(self.anchor.dtype)
        return rows * self.embed_scale.to(rows.dtype) if hasattr(self, "embed_scale") else rows


@torch.no_grad()
def quantise_embedding(model: nn.Module) -> None:
    """Turn the embedding of a model of transformers into integers, in place."""
    embedding = model.get_input_embeddings()
    # Gemma's embeddings have a scale for all words, and do nothing else of their own.
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        return
    weight, embedding.padding_idx = embedding.weight.detach(), None
    embedding.scales = _scales(weight)
    embedding.integers = torch.cat(
        [(w / s).round_().to(torch.int8) for w, s in _slices(weight, embedding.scales)]
    )
    embedding._parameters.clear()
    embedding.weight = ShownWeight(weight.dtype, weight.device, tuple(weight.shape))
    # Nothing else may be left of a model that modules could ask for its type.
    embedding.anchor = nn.Parameter(weight.new_zeros(0), requires_grad=False)
    embedding.__class__ = Int8Embedding


def _scales(weight: Tensor) -> Tensor:
    """[rows, in] -> [rows, 1] float32: the largest number of each row is 127 times its scale."""
    largest = torch.maximum(weight.amax(1, keepdim=True), -weight.amin(1, keepdim=True))
    return largest.float().clamp_(min=_TINY) / _LARGEST


def _slices(weight: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows at a time in float32: all of a large table would double it for a while."""
    return zip((part.float() for part in weight.split(4096)), scales.split(4096), strict=True)


def why_not(device: str) -> str | None:
    """Why there is no int8 on this device, in a sentence; None if there is."""
    if device != "cpu":
        return f"--quantize int8 runs on a CPU only, not on {device}"
    if inputs() is None:
        return "--quantize int8 gives wrong sums on this machine, or torch has no operator for it"
    return None
