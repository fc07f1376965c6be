"""What models and heads from files have in common: memory for weights, and why it failed."""

import ctypes
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import nn

from runtime.values import in_short


def is_gguf(name: str) -> bool:
    """Whether --model names a GGUF file."""
    return name.lower().endswith(".gguf")


def why_not_loaded(error: Exception) -> str:
    """What an error of transformers' says, with the weight that it names in its (silent) log only.

    Example: "lm_head.weight: [95, 64] instead of [96, 64]".
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    report = frame.f_locals.get("loading_info")
    for weight, lines in sorted(getattr(report, "conversion_errors", {}).items()):
        if lines.strip():
            return f"{weight}: {lines.splitlines()[-2:][0][:300]}"
    for weight, shape, wanted in sorted(getattr(report, "mismatched_keys", ())):
        return f"{weight}: {list(shape)} instead of {list(wanted)}"
    return in_short(error)


@contextmanager
def returned_pages() -> Iterator[None]:
    """Within it blocks beyond 256 KiB get pages of memory that go back to the system when freed.

    A model would lie in memory twice while it is packed, since glibc's heap keeps what is freed.
    """
    try:
        _set_heap(most=1 << 18)
        yield
    finally:
        _set_heap(most=1 << 25)


def _set_heap(most: int) -> None:
    """The size from which on a block is no part of glibc's heap."""
    with suppress(OSError, AttributeError, TypeError):  # elsewhere than on Linux with glibc
        mmap_threshold, trim_threshold = -3, -1
        ctypes.CDLL(None).mallopt(mmap_threshold, most)
        ctypes.CDLL(None).mallopt(trim_threshold, 2 * most)


@returned_pages()
def unmap_weights(module: nn.Module) -> None:
    """Copy the weights that lie in a mapped file into memory of this process, one by one.

    Tied weights stay tied, as each parameter stays the same object.
    """

    # As Module.to does. Only what torch allocated can be resized.
    module._apply(lambda w: w if w.untyped_storage().resizable() else w.clone())
