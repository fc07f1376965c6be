"""How a weight matrix comes to lie in panels, as linear.h describes them.

This needs the compiled kernels and no torch, so that it can be done while torch is imported.
"""

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from . import library

LANES = 16  # outputs of a panel
# As in linear.h.
FORMS = "FLOAT", "FLOAT16", "HALF", "Q8", "Q4", "Q4M", "Q5", "Q5M", "Q4K", "Q5K", "Q6K"
_MOST_INPUTS = 1 << 24
_LARGE_PAGE = 1 << 21  # bytes


def lay_out(form: str, shape: tuple[int, int], pieces: Iterable[np.ndarray]) -> np.ndarray:
    """A GGUF tensor's bytes in panels: the same numbers in another order. uint8 [bytes].

    `pieces` are uint8 [rows, bytes of a row] of a matrix [outputs, inputs]; all but the last one
    have whole panels of rows.
    """
    (outputs, inputs), call, number, first = shape, library.load(), FORMS.index(form), 0
    assert 0 < outputs < 1 << 31 and 0 < inputs <= _MOST_INPUTS
    call.bytes_of.restype = ctypes.c_size_t
    data = _room(call.bytes_of(number, outputs, inputs))
    panels = ctypes.c_void_p(data.ctypes.data)
    for piece in pieces:
        assert first % LANES == 0 and piece.flags.c_contiguous and piece.dtype == np.uint8
        assert first + len(piece) <= outputs
        at = ctypes.c_void_p(piece.ctypes.data)
        call.repack(number, at, first, len(piece), inputs, panels)
        first += len(piece)
    assert first == outputs
    return data


def _room(size: int) -> np.ndarray:
    """Memory [size] in pages of its own, in large ones where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
