"""Choosing tokens in C: what runtime/sampling.py does, with the same bits.

`confidence` alone adds in float32; it and `score_rows` choose nothing.
"""

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import library
from .library import address, checked
from .structs import STRUCTS

Transforms = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
is_wanted = True  # for models on any device
_MOST_TOKENS = 1 << 23  # of a vocabulary: sums of more might not fit 64 bits


def choice_of(transforms: Transforms, seed: int = 0) -> ctypes.Structure:
    """sampling.h's `choice`; `seed` is that of a Noise."""
    temperature, top_k, top_p, min_p = transforms
    return STRUCTS["choice"](temperature, top_p, min_p, seed, max(0, min(top_k, _MOST_TOKENS)))


def can_choose() -> bool:
    """Whether tokens are chosen in C: that is wanted, and can be compiled here."""
    return is_wanted and _is_compiled()


@cache
def _is_compiled() -> bool:
    try:
        return bool(library.load())
    except ValueError:
        return False


def choose(scores: Tensor, transforms: Transforms, seed: int, position: int, row: int = 0) -> int:
    """The token after `position` tokens, by a row of scores [n, V]; [V] are their only row.

    Raises ValueError for no numbers, and IndexError for a row that is not there.
    """
    scores, at = _row_of(scores, row)
    how, place = _how(transforms, seed), ctypes.c_int64(position)
    return checked(_function("choose")(how, at, scores.shape[-1], place))


def survivors(scores: Tensor, transforms: Transforms) -> tuple[np.ndarray, np.ndarray]:
    """The weights [c] float64 of the tokens that stay, and their ids [c], rising."""
    row = _row(scores)
    weights, ids = np.empty(len(row)), np.empty(len(row), np.int64)
    how = ctypes.byref(choice_of(transforms))
    count = checked(_function("survivors")(how, address(row), len(row), _data(weights), _data(ids)))
    return weights[:count], ids[:count]


def leaders(
    scores: Tensor, transforms: Transforms, most: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Weights and ids of the first `most` tokens in order, and the weight of all, cut or not."""
    row = _row(scores)
    most = min(most, len(row))
    weights, ids, total = np.empty(most), np.empty(most, np.int64), ctypes.c_double()
    how, at = ctypes.byref(choice_of(transforms)), ctypes.byref(total)
    code = _function("leaders")(how, address(row), len(row), most, _data(weights), _data(ids), at)
    count = checked(code)
    return weights[:count], ids[:count], total.value


def score_rows(
    scores: Tensor, tokens: list[int], most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A token's log-probability in each row of scores [n, V], and those of the `most` likeliest.

    Returns logprobs [n] float32, ranks [n] from 1 on, ids [n, most] in order, and their logprobs.
    Raises ValueError for no numbers.
    """
    scores = _numbers(scores)
    (count, vocab), most = scores.shape, min(most, scores.shape[1])
    if len(tokens) != count or not all(0 <= token < vocab for token in tokens):
        raise IndexError(f"a token from 0 to {vocab - 1} is needed for each of {count} rows")
    asked, integers = torch.tensor(tokens), partial(torch.empty, dtype=torch.int64, device="cpu")
    logprobs, tops = library.empty_f32(count), library.empty_f32(count, most)
    ranks, ids = integers(count), integers(count, most)
    at, threads = partial(address, dtype=torch.int64), 1 if count == 1 else None
    rest = at(asked), most, address(logprobs), at(ranks), at(ids), address(tops)
    library.compute("score_rows", address(scores), count, vocab, *rest, threads=threads)
    return logprobs, ranks, ids, tops


def confidence(scores: Tensor, token: int, row: int = 0) -> float:
    """How likely a token is by a row of scores alone; 0 where they are no numbers."""
    scores, at = _row_of(scores, row)
    if not 0 <= token < (vocab := scores.shape[-1]):
        raise IndexError(f"tokens are from 0 to {vocab - 1}")
    return _function("confidence", ctypes.c_double)(at, vocab, token)


def _row(scores: Tensor) -> Tensor:
    """Scores [V] that C can read; the caller holds them until C has read them."""
    if scores.dim() != 1:
        raise ValueError("scores must be a row of numbers")
    return _numbers(scores)


def _row_of(scores: Tensor, row: int) -> tuple[Tensor, ctypes.c_void_p]:
    """Scores [n, V] or [V] that C can read, to be held until it has, and where one row begins."""
    if scores.dim() > 1 and not scores.is_cpu:
        scores, row = scores[row], 0  # no others are fetched
    # Here a view of the row would cost more than the choice: torch's code is cold after a pass.
    scores = _numbers(scores)
    if not 0 <= row < scores.numel() // scores.shape[-1]:
        raise IndexError(f"there is no row {row} in scores {list(scores.shape)}")
    return scores, ctypes.c_void_p(scores.data_ptr() + row * 4 * scores.shape[-1])


def _numbers(scores: Tensor) -> Tensor:
    """Scores [n, V] or [V] as contiguous float32 numbers on the CPU."""
    if not (scores.is_cpu and scores.dtype is torch.float32 and scores.is_contiguous()):
        scores = scores.detach().to("cpu", torch.float32).contiguous()
    if not 0 < scores.shape[-1] <= _MOST_TOKENS:
        raise ValueError(f"a row of scores must have 1 to {_MOST_TOKENS} numbers")
    return scores


def _data(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@lru_cache(maxsize=64)  # a request asks for each of its tokens
def _how(transforms: Transforms, seed: int) -> Any:
    return ctypes.byref(choice_of(transforms, seed))


@cache
def _function(name: str, returns: Any = ctypes.c_int64) -> Callable[..., Any]:
    function: Any = getattr(library.load(), name)
    function.restype = returns
    return function
