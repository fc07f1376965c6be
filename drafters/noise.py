"""Chance that belongs to a seed, a position and a token, and to nothing else.

A token that is drawn as the winner of a race,

    winner = argmin over tokens of e / weight        e = −log u, u uniform in (0, 1)

is distributed as the weights (the Gumbel-max identity: log weight − log e is largest there). Here u
is a hash of (seed, position, token). So whoever draws at a position draws with the same noise, in
whatever order and as often as it likes: the target always finds the same token there, and a drafter
whose weights are close to the target's mostly finds that token, too.

Source of the rule: Daliri, Musco and Suresh, arXiv 2408.07978. The hashes are of the splitmix and
lowbias32 kind; integers alone decide what u is, so that it is the same on every machine.
"""

from functools import cache

import numpy as np
from torch import Tensor

NO_NUMBERS = "the model gave no probabilities to draw from (NaN in its logits?)"
_WORD = (1 << 64) - 1
_FEW = 2048  # tokens; of more only those that can win are looked at closely
DRAW, ACCEPT, RECOVER = range(1, 4)  # uses of `uniform`, each with numbers of its own
_HIGH, _LOW = range(4, 6)  # uses of a token's hash: the upper and the lower half of its bits


class Noise:
    """The noise of one request. It holds no state, so that any thread may ask at any time."""

    def __init__(self, seed: int) -> None:
        """`seed`: any integer of up to 64 bits, with or without sign."""
        self._seed = _scrambled(_scrambled(seed & _WORD) + (seed < 0))

    def uniform(self, position: int, use: int) -> float:
        """A number from [0, 1) of 53 bits."""
        return (self._key(position, use) >> 11) * 2.0**-53

    def exponentials(self, position: int, tokens: np.ndarray) -> np.ndarray:
        """e [n] float64, exponentially distributed, of token ids [n]."""
        scrambled = _scrambled_ids(int(tokens.max(initial=0)) + 1)[tokens]
        high, low = (_hash(scrambled, self._key(position, use)) for use in (_HIGH, _LOW))
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
        ids = None if tokens is None else tokens.numpy(force=True)
        if len(w) > _FEW:
            able = self._able_to_win(w, ids, best, position)
            w, ids = w[able], able if ids is None else ids[able]
        elif ids is None:
            ids = np.arange(len(w))
        with np.errstate(divide="ignore"):  # a weight of 0 never arrives
            times = self.exponentials(position, ids) / w.astype(np.float64)
        return int(ids[times.argmin()])

    def _able_to_win(
        self, weights: np.ndarray, ids: np.ndarray | None, best: int, position: int
    ) -> np.ndarray:
        """Where the tokens are that may be faster than that of the largest weight, and itself.

        It takes e / weight; a token is faster if its e is small enough. The upper half of its bits
        v tells nearly enough, as e = -log(1 - v) is at least v.
        """
        first = np.array([best]) if ids is None else ids[best : best + 1]
        time = float(self.exponentials(position, first)[0]) / float(weights[best])
        if ids is None:
            scrambled = _scrambled_ids(len(weights))[: len(weights)]
        else:
            scrambled = _scrambled_ids(int(ids.max()) + 1)[ids]
        upper = _hash(scrambled, self._key(position, _HIGH)).astype(np.float32)
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


def _hash(scrambled: np.ndarray, key: int) -> np.ndarray:
    """[n] uint32 of scrambled ids [n]; under one key no two ids have the same."""
    x = scrambled ^ np.uint32(key & 0xFFFFFFFF)
    shifted = np.empty_like(x)  # one buffer: new ones would take longer than the arithmetic
    x *= np.uint32(0x7FEB352D)
    x ^= np.right_shift(x, 15, out=shifted)
    x += np.uint32(key >> 32)
    x *= np.uint32(0x846CA68B)
    x ^= np.right_shift(x, 16, out=shifted)
    return x


@cache
def _scrambled_ids(count: int) -> np.ndarray:
    """The hash of 0, 1, … count - 1 or more: a table, as it is the same at every position."""
    rounded = 1 << (count - 1).bit_length()
    if rounded != count:
        return _scrambled_ids(rounded)
    x = np.arange(count, dtype=np.uint32)
    return _hash(_hash(x, _scrambled(1)), _scrambled(2))
