"""Weight matrices in panels, as linear.h lays them out, and products with them.

    PackedMatrix.of(weight, bias)               float32 or bfloat16, as the weight is
    PackedMatrix.of(weight, bias, "int8")       8-bit blocks made of it, or "int4"
    PackedMatrix("Q4K", shape, pieces)          rows of bytes, as a GGUF file has them

An 8-bit block is 32 successive inputs of an output: whole numbers and a scale.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from . import library
from .library import FORMS, LANES, lay_out, room_for
from .structs import STRUCTS

BLOCK = 32  # inputs of a block
DTYPES = torch.float32, torch.bfloat16  # of weights that are packed
_FOUR_BITS = "Q4", "Q4M", "Q4K"
_AT_ONCE = 1 << 22  # weights that are quantised at once: all of a table would double it
_Matrix, _Layer = STRUCTS["matrix"], STRUCTS["layer"]


class PackedMatrix:
    """A weight matrix [outputs, inputs] in one of FORMS, with a bias or without."""

    def __init__(
        self, form: str, shape: tuple[int, int], rows: Iterable[np.ndarray] | np.ndarray,
        bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Take over a GGUF tensor's rows, as `lay_out` takes them, or finished panels."""
        self.outputs, self.inputs = shape
        self.struct = _Matrix(outputs=self.outputs, inputs=self.inputs)
        self._alone = PackedMatrix.side_by_side([self])
        self._fill(form, rows)
        self.set_bias(bias)

    def _fill(self, form: str, rows: Iterable[np.ndarray] | np.ndarray) -> None:
        """Hold these rows in panels."""
        is_done = isinstance(rows, np.ndarray)
        self.form = form
        self._data = rows if is_done else lay_out(form, (self.outputs, self.inputs), rows)
        self.struct.form = FORMS.index(form)
        self.struct.panels = ctypes.c_void_p(self._data.ctypes.data)

    def set_bias(self, bias: Tensor | None) -> None:
        """What is added to the outputs, or nothing."""
        assert bias is None or bias.shape == (self.outputs,)
        self.bias = None if bias is None else bias.detach().float().contiguous().clone()
        self.struct.bias = library.address(self.bias)

    @classmethod
    @torch.no_grad()
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, quantize: str | None = None
    ) -> "PackedMatrix":
        """The matrix of a weight [outputs, inputs] in float32 or bfloat16."""
        weight, shape = weight.detach(), tuple(weight.shape)
        if quantize == "int8":
            return cls("Q8", shape, _rounded(weight), bias)
        is_half = weight.dtype == torch.bfloat16
        rows = (weight if is_half else weight.float()).contiguous().view(torch.uint8)
        panels = cls("HALF" if is_half else "FLOAT", shape, [rows.numpy()], bias)
        if quantize:
            panels.quantise(quantize)
        return panels

    @staticmethod
    def side_by_side(matrices: Sequence["PackedMatrix"]) -> ctypes.Structure:
        """linear.h's `layer` of these matrices, which the caller holds."""
        return _Layer(len(matrices), tuple(ctypes.pointer(matrix.struct) for matrix in matrices))

    def unpacked(self) -> Tensor:
        """The weight [outputs, inputs]."""
        return self.rows(torch.arange(self.outputs))

    def quantise(self, quantize: str) -> None:
        """Make 8-bit blocks of the matrix, or 4-bit ones, for all modules that share it.

        In 4-bit blocks each scale is one that leaves a small error. A matrix that has 4 bits, or
        numbers that cannot be written so, stays as it is.
        """
        if quantize == "int8":
            self._fill("Q8", _rounded(self.unpacked()))
        elif self.form not in _FOUR_BITS:
            panels = room_for("Q4", self.outputs, self.inputs)
            structs = ctypes.byref(self.struct), ctypes.c_void_p(panels.ctypes.data)
            if library.load().round_matrix(*structs, library.num_threads()):
                self._fill("Q4", panels)

    def to_floats(self) -> None:
        """Hold the same numbers in float32."""
        self._fill("FLOAT", [self.unpacked().view(torch.uint8).numpy()])

    @property
    def reads(self) -> str:
        """What it reads inputs as."""
        floats = {"FLOAT": "float32", "FLOAT16": "float32", "HALF": "bfloat16"}
        return floats.get(self.form, "blocks")

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> x W + bias [..., outputs], float32."""
        rows = x.reshape(-1, self.inputs).float().contiguous()
        y = rows.new_empty(len(rows), self.outputs)
        addresses = map(library.address, (rows, y))
        library.compute("apply_linear", ctypes.byref(self._alone), len(rows), *addresses)
        return y.view(*x.shape[:-1], self.outputs)

    def some(self, ids: Tensor) -> "PackedMatrix":
        """A matrix of the rows `ids` [n], int64, which must be there."""
        panels = room_for(self.form, len(ids), self.inputs)
        to = library.address(ids, dtype=torch.int64), ctypes.c_void_p(panels.ctypes.data)
        library.load().gather(ctypes.byref(self.struct), len(ids), *to)
        bias = None if self.bias is None else self.bias[ids]
        return PackedMatrix(self.form, (len(ids), self.inputs), panels, bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [...] of the matrix -> [..., inputs] float32: an embedding."""
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.outputs:
            raise IndexError(f"rows must be from 0 to {self.outputs - 1}")
        embeddings = library.empty_f32(len(flat), self.inputs)
        indexes, written = library.address(flat, dtype=torch.int64), library.address(embeddings)
        library.load().read_rows(ctypes.byref(self.struct), len(flat), indexes, written)
        return embeddings.view(*ids.shape, self.inputs)


def why_not_int8(device: str) -> str | None:
    """Why there is no int8 on this device, in a clause; None if there is."""
    if device != "cpu":
        return f"runs on a CPU only, not on {device}"
    return None if library.is_used else "needs the kernels in C, which are not there"


def _rounded(weight: Tensor) -> Iterator[np.ndarray]:
    """A weight's rows in 8-bit blocks: a float16 scale, and 32 numbers, the largest of them 127."""
    for rows in weight.split(max(1, _AT_ONCE // weight.shape[1] // LANES) * LANES):
        blocks = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % BLOCK))
        blocks = blocks.unflatten(1, (-1, BLOCK))
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
        # A block whose scale is none in float16 is nothing.
        inverse = torch.where(scales > 0, 1 / scales.float(), 0)
        numbers = (blocks * inverse).round_().clamp_(-127, 127).to(torch.int8)
        parts = scales.view(torch.uint8), numbers.view(torch.uint8)
        yield torch.cat(parts, -1).flatten(1).numpy()
