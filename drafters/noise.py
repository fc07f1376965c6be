"""Chance that belongs to a seed, a position and a token, and to nothing else.

Tokens run a race: each of them takes the time e / weight, and the first one is chosen.

    choice = argmin over tokens of e / weight        e = −log(1 − v), v uniform in [0, 1)

It is distributed as the weights (the Gumbel-max identity: log weight − log e is largest there).
Here v is a hash of (seed, position, token). So whoever draws at a position draws with the same
noise, in whatever order and as often as it likes: the target always finds the same token there, and
a drafter whose weights are close to the target's mostly finds that token, too.

Source of the rule: Daliri, Musco and Suresh, arXiv 2408.07978. Keys are made by splitmix64, v by
multiplications and shifts of 32 bits: integers, which are the same on every machine.
"""

from functools import cache
from math import inf, nextafter

import numpy as np
import torch
from torch import Tensor

from fastpath.sampling import largest, penalise, survivors, truncated_softmax
from messages import Sampling

NO_NUMBERS = "the model gave no probabilities to draw from (NaN in its logits?)"
_WORD = (1 << 64) - 1
_FIRST = 32  # tokens that may be among the first ones to be drawn
_FEW = 2048  # tokens; of more, only those that can still win are looked at closely

# Numbers of their own for each use at one position. The rule of rejection draws a token with DRAW,
# judges it with ACCEPT and replaces it with RECOVER. What follows a rejected token is forgotten
# unseen, so its numbers may be used again.
DRAW, ACCEPT, RECOVER = range(1, 4)
_HIGH, _LOW = range(4, 6)  # the upper and the lower half of a token's v


class Noise:
    """The noise of one request. It holds no state, so that any thread may ask at any time."""

    def __init__(self, seed: int) -> None:
        """`seed`: any integer of up to 64 bits; -1 and 2**64 - 1 give different noise."""
        self._seed = _scrambled(_scrambled(seed & _WORD) + (seed < 0))

    def uniform(self, position: int, use: int) -> float:
        """A number from [0, 1) of 53 bits."""
        return (self._key(position, use) >> 11) * 2.0**-53

    def exponentials(self, position: int, tokens: np.ndarray) -> np.ndarray:
        """e [n] float64, exponentially distributed, of token ids [n]."""
        ids = tokens.astype(np.uint32)
        high, low = (_hash(ids, self._key(position, use)) for use in (_HIGH, _LOW))
        return -np.log1p(-(high * 2.0**-32 + (low + 0.5) * 2.0**-64))

    def choose(self, weights: Tensor, tokens: Tensor | None, position: int) -> int:
        """The token drawn from weights [n] float32, which need not sum to 1.

        `tokens` [n] are the ids that the weights belong to; None: 0, 1, 2 and so on. Raises
        ValueError where no weight is larger than 0 or one of them is no number.
        """
        w = weights.numpy(force=True)
        best = int(w.argmax())  # a NaN counts as the largest
        if not 0 < w[best] < np.inf:
            raise ValueError(NO_NUMBERS)
        ids = _ids(len(w)) if tokens is None else tokens.numpy(force=True).astype(np.uint32)
        if len(w) > _FEW:
            able = self._able_to_win(w, ids, best, position)
            w, ids = w[able], ids[able]
        with np.errstate(divide="ignore"):  # without weight a token takes for ever
            times = self.exponentials(position, ids) / w.astype(np.float64)
        return int(ids[times.argmin()])

    def _able_to_win(
        self, weights: np.ndarray, ids: np.ndarray, best: int, position: int
    ) -> np.ndarray:
        """The places of the tokens that could still beat the likeliest one, and of that one.

        Another token is faster only if its e is below its weight times the time of the likeliest
        one. As e is at least v, the upper half of v nearly tells.
        """
        time = self.exponentials(position, ids[best : best + 1])[0] / np.float64(weights[best])
        upper = _hash(ids, self._key(position, _HIGH)).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # then every weight may win
            limit = np.float32(time * 2.0**32 * (1 + 1e-5))  # a little more, as float32 rounds
            return np.flatnonzero(upper <= weights * limit)

    def _key(self, position: int, use: int) -> int:
        return _scrambled(_scrambled(self._seed ^ position) + use)


def _scrambled(x: int) -> int:
    """A word of 64 bits in which every bit of x counts (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _hash(ids: np.ndarray, key: int) -> np.ndarray:
    """[n] uint32 of ids [n]; its upper bits are the good ones. One key gives no number twice."""
    x = ids ^ np.uint32(key & 0xFFFFFFFF)
    shifted = np.empty_like(x)  # one buffer: new ones would take longer than the arithmetic
    x *= np.uint32(0x7FEB352D)
    x ^= np.right_shift(x, 15, out=shifted)
    x += np.uint32(key >> 32)
    x *= np.uint32(0x846CA68B)
    x ^= np.right_shift(x, 16, out=shifted)
    x *= np.uint32(0x9E3779B1)
    return x


@cache
def _ids(count: int) -> np.ndarray:
    """0, 1, … count - 1: a model's whole vocabulary."""
    return np.arange(count, dtype=np.uint32)


def draw(weights: Tensor, u: float) -> int:
    """The token drawn by u from weights [V], which need not sum to 1. Raises ValueError for none.

    Example: weights [.2, 0, .6], u = .5 -> 2: of the total .8, u points at .4.
    """
    cumulated = weights.cumsum(0, dtype=torch.float64)
    total = float(cumulated[-1])
    if not 0 < total < inf:  # as NaN is not
        raise ValueError(NO_NUMBERS)
    # Below the total whatever the rounding: then a token without weight is never found.
    return int(torch.searchsorted(cumulated, min(u * total, nextafter(total, 0)), right=True))


def log_probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """log p [n, V] float64 of penalised logits [n, V]: temperature, then top-k, top-p, min-p."""
    return truncated_softmax(scores, *sampling.transforms).double().log()


def ranked(
    logits: Tensor, text: list[int], sampling: Sampling, noise: Noise, count: int
) -> list[tuple[int, float]]:
    """The `count` tokens that a model would choose first after `text`, and how sure it is of each.

    Of logits [V]. Where tokens are drawn they come as they end their race, and are the likelier the
    larger their lead is.
    """
    scores = penalise(logits[None], sampling.repetition_penalty, text, [])[0]
    if sampling.is_greedy:
        found, ids = largest(scores, count)
        chances = (found - scores.logsumexp(0)).exp()
    else:
        weights, able = survivors(scores, *sampling.transforms)
        weights, ids = weights.topk(min(_FIRST, len(weights)))
        ids = ids if able is None else able[ids]
        speeds = weights.double() / torch.from_numpy(noise.exponentials(len(text), ids.numpy()))
        found, order = (speeds / speeds.sum()).topk(min(count, len(speeds)))
        ids, chances = ids[order], found
    if not 0 < float(chances[0]) <= 1 + 1e-6:  # NaN neither
        raise ValueError(NO_NUMBERS)
    return list(zip(ids.tolist(), chances.tolist(), strict=True))
