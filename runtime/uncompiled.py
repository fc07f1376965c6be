"""Stands in for kernels/ where that is deleted: transformers' modules compute all, by torch alone.

These are the names of kernels/ that the rest asks for without knowing whether it is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from runtime.values import Model


def setup(quantize: str | None, device: str, is_wanted: bool) -> None:
    """Call this before weights are read. Raises ValueError for int8, which torch alone has not."""
    if quantize:
        raise ValueError(f"--dtype {quantize} needs runtime/kernels/")


def speed_up(model: Model, *_: Any, **__: Any) -> None:
    """Leave the model as it is."""


def speed_up_head(*_: Any, **__: Any) -> list[Any]:
    """A head's layers in C: there are none."""
    return []


def report_of(model: Model) -> None:
    """Nothing was checked, so nothing is said of how exact the model is."""


@contextmanager
def exclusive() -> Iterator[None]:
    """Within it torch computes as everywhere."""
    yield


def are_used(*_: Any) -> bool:
    """Whether kernels compute, and so whether they can: never."""
    return False


can_choose = can_chain = are_used


def num_weights(model: nn.Module) -> int:
    """How many weights a model has."""
    return sum(weight.numel() for weight in model.parameters())
