"""How a token is chosen: bias, penalties, masks, temperature, cuts, noise, draw.

    logits [V] ─ penalise → scores ─ survivors → weights, ids ─ race → token   choose()
                                                      └─ share of all → p      truncated_softmax()

`penalise` turns a token's logit into its score, in this order:

    logit_bias          adds the token's bias
    repetition_penalty  divides by it, or multiplies where the score is negative, if the token
                        occurs in the prompt or was generated before
    presence_penalty    is taken away, if the token was generated before
    frequency_penalty   is taken away as many times as the token was generated before
    masks               −inf to all but allowed_token_ids; to a token that would complete one of
                        bad_words; to end_ids, until min_tokens are generated
    typical_p           −inf to all but the tokens whose surprise −log p is nearest to its mean,
                        which together weigh at least typical_p of all; p is after the temperature

Weights are exp((score − largest score) / temperature). Tokens are ordered by falling score, and of
equal scores the lower id comes first. Each cut keeps the first tokens of this order:

    top-k    the first k tokens stay, and all others with the score of the k-th
    top-p    a token stays if those before it weigh less than top_p of all that top-k left
    min-p    a token stays if it weighs at least min_p (the first one weighs 1)

A draw is a race. Each token takes the time e / weight, and the fastest token is chosen:

    choice = argmin over tokens of e / weight        e = −log(1 − v), v uniform in (0, 1)

The choice is distributed as the weights. (This is the Gumbel-max trick: log weight − log e is
largest for this token.) v is a hash of (seed, position, token), so a position has one noise, no
matter how often and in which order tokens are drawn. The target always finds the same token there.
A drafter whose weights are close to the target's mostly finds that token, too.

A seed draws the same on every machine. Hashes are integers. exp and log are written out here as
sums and products of float64. top-p adds whole multiples of 2⁻⁴⁰: their order does not change the
sum. kernels/c/sampling.c gives the same bits in a hundredth of the time, if there is a compiler.

Sources: the transforms are those of transformers' RepetitionPenaltyLogitsProcessor,
TypicalLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, in that order; masks
are vLLM's; bias, frequency and presence are those of OpenAI's API; the race is from Daliri, Musco
and Suresh, arXiv 2408.07978; the keys are splitmix64's.
"""

from collections import Counter
from collections.abc import Sequence
from math import factorial, inf, isfinite, log2, nextafter, sqrt

import numpy as np
import torch
from torch import Tensor

from runtime import kernels
from runtime.values import Draft, RequestError, Sampling

NO_NUMBERS = "the model gave no probabilities to draw from (NaN in its logits?)"
_WORD = (1 << 64) - 1
_WHOLE = 2.0**40  # units in the largest weight; top-p adds whole units
_NEAR = -5.0, -12.0  # a typical token mostly weighs more than exp(the first)

_HIGH, _LOW = range(4, 6)  # the upper and the lower half of a token's v


class NothingLeft(RequestError, ValueError):
    """No token may be generated: a request's masks, or they and its grammar, leave none."""


def no_draw(largest: float) -> ValueError:
    """Why no token can be drawn where this is the largest score, or logarithm of a weight."""
    if largest == -inf:
        what = "no probabilities to draw from: the request's fields together allow no token"
        return NothingLeft(what)
    return ValueError(NO_NUMBERS)


# ---------------------------------------------------------------------------------- transforms
def penalise(logits: Tensor, sampling: Sampling, text: list[int], draft: Draft) -> Tensor:
    """The scores of logits [n + 1, V] after `text` and each of the n drafted tokens behind it.

    A row is changed as in plain decoding: by `text` and the drafted tokens on the path to it. A
    small model's logits may lack the last tokens of the vocabulary, which `text` does not have.
    """
    if not (penalties := sampling.penalties):
        return logits
    scores = logits.clone()
    biases = penalties.pop("logit_bias", ())
    if biases := [entry for entry in biases if entry[0] < logits.shape[-1]]:
        biased, more = zip(*biases, strict=True)
        scores[:, list(biased)] += scores.new_tensor(more)
    if any(name.endswith("_penalty") for name in penalties):
        _penalise_repeated(scores, sampling, text, draft)
    _mask(scores, sampling, text, draft)
    if sampling.typical_p < 1 and not sampling.is_greedy:
        for row in scores:
            row.masked_fill_(torch.from_numpy(_untypical(row, sampling)).to(row.device), -inf)
    return scores


def _mask(scores: Tensor, sampling: Sampling, text: list[int], draft: Draft) -> None:
    """Give −inf to tokens [n + 1, V] that may not come, in place."""
    size, least, words = scores.shape[-1], sampling.min_tokens, sampling.bad_words
    if allowed := [token for token in sampling.allowed_token_ids if token < size]:
        columns = torch.tensor(allowed, device=scores.device)
        kept = scores[:, columns]
        scores.fill_(-inf)
        scores[:, columns] = kept
    if not words and not least:
        return
    masked = list[tuple[int, int]]()
    generated = len(text) - sampling.prompt_length
    tail = text[len(text) - min(generated, max(map(len, words), default=0)) :]
    for row, path in enumerate([[], *draft.paths()]):
        end = (*tail, *(draft.tokens[i] for i in path))
        ids = [word[-1] for word in words if end[len(end) + 1 - len(word) :] == word[:-1]]
        ids += sampling.end_ids if generated + len(path) < least else ()
        masked += [(row, token) for token in ids if token < size]
    if masked:
        rows, columns = zip(*masked, strict=True)
        scores[list(rows), list(columns)] = -inf


def _untypical(scores: Tensor, sampling: Sampling) -> np.ndarray:
    """Whether each token of scores [V] is cut by typical_p, [V].

    With x = log weight, a token's surprise less the mean of all surprises is (mean of x) − x. Few
    tokens are typical. So those of some weight are put in order first, which mostly suffices.
    """
    try:  # none that weighs nothing in whole units
        weights, ids = survivors(scores, sampling.temperature, 0, 1.0, 0.5 / _WHOLE)
    except ValueError:  # no error: the row may never be used
        return np.zeros(len(scores), bool)
    s = scores.numpy(force=True)[ids].astype(np.float64)
    x = (s - s.max()) * (1 / sampling.temperature)
    whole = np.rint(weights * _WHOLE).astype(np.int64)
    mean, limit = total(weights * x) / total(weights), sampling.typical_p * float(whole.sum())
    strange, is_cut = np.abs(mean - x), np.ones(len(scores), bool)
    for floor in (*_NEAR, -inf):
        near = np.flatnonzero(x >= floor)
        near = near[np.argsort(strange[near])]  # equal ones stay or go together
        at = np.searchsorted(np.cumsum(whole[near]), limit)
        last = strange[near[min(at, len(near) - 1)]]
        if at < len(near) and mean - last >= floor:
            break
    is_cut[ids[strange <= last]] = False
    return is_cut


def _penalise_repeated(scores: Tensor, sampling: Sampling, text: list[int], draft: Draft) -> None:
    """Lower the scores [n + 1, V] of tokens that occurred, in place."""
    factor, generated = sampling.repetition_penalty, text[sampling.prompt_length :]
    ids = list(dict.fromkeys([*draft.tokens, *(generated if factor == 1 else text)]))
    if not ids:
        return
    drafted = np.zeros((len(draft.tokens) + 1, len(ids)), int)  # how often on the path to a row
    for row, path in enumerate(draft.paths(), 1):
        for i in path:
            drafted[row, ids.index(draft.tokens[i])] += 1
    counted, is_known = Counter(generated), np.ones(len(ids), bool)
    is_known[: len(draft.tokens)] = [i in text for i in ids[: len(draft.tokens)]]
    counts = drafted + [counted.get(i, 0) for i in ids]
    lowered = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
    columns = torch.tensor(ids, device=scores.device)
    before, occurs = scores[:, columns], torch.from_numpy(is_known | (drafted > 0))
    repeated = torch.where(before < 0, before * factor, before / factor)
    after = torch.where(occurs.to(before.device), repeated, before)
    scores[:, columns] = after - torch.from_numpy(lowered).to(before)


def survivors(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that stay of scores [V]: their weights [c] float64, and their ids [c], rising.

    top_k <= 0, top_p >= 1 and min_p = 0 cut nothing. The token with the largest score always stays.
    Raises ValueError if a score is NaN, or if the largest one is infinite.
    """
    if kernels.can_choose():
        return kernels.survivors(scores, (temperature, top_k, top_p, min_p))
    s = scores.float().numpy(force=True)
    if not isfinite(largest := float(s.max())):
        raise no_draw(largest)
    weights = exp((s.astype(np.float64) - largest) * (1 / temperature))
    stays = weights >= min_p
    if 0 < top_k < len(s) or top_p < 1:
        order = np.argsort(-s, kind="stable")
        if 0 < top_k < len(s):
            order = order[: np.count_nonzero(s >= s[order[top_k - 1]])]
        if top_p < 1:
            whole = np.rint(weights[order] * _WHOLE).astype(np.int64)
            before = np.cumsum(whole) - whole
            order = order[(before < top_p * float(whole.sum())) | (before == 0)]
        beginning = np.zeros_like(stays)
        beginning[order] = True
        stays &= beginning
    ids = np.flatnonzero(stays)
    return weights[ids], ids


def truncated_softmax(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """The probabilities [n, V] by which `choose` draws from scores [n, V] float32.

    A row whose scores are no numbers is NaN, and one that is −inf throughout is 0. Example: scores
    log([.5, .3, .2]), temperature 1, top_p .6 -> [.625, .375, 0]: .3 stays because .5 before it is
    less than .6.
    """
    result = np.zeros(scores.shape, np.float32)
    for row, probs in zip(scores, result, strict=True):
        try:
            weights, ids = survivors(row, temperature, top_k, top_p, min_p)
            probs[ids] = weights / total(weights)
        except ValueError:  # no error: the row may never be used
            probs[:] = 0.0 if float(row.max()) == -inf else np.nan
    return torch.from_numpy(result).to(scores.device)


def total(weights: np.ndarray) -> float:
    """The sum of weights, the largest of which is 1. It does not depend on their order."""
    return float(np.rint(weights * _WHOLE).astype(np.int64).sum()) / _WHOLE


def exp(x: np.ndarray) -> np.ndarray:
    """exp(x) of x [n] float64 <= 0, to a relative 3e-13; 1 for x = 0, and 0 for x <= -700."""
    r = np.maximum(x, -700.0)
    n = np.rint(r * log2(np.e))
    r = r - n * 0.693147180369123816490  # log 2 in two parts: products with the first are exact
    r = r - n * 1.90821492927058770002e-10
    result = np.full_like(r, 1 / factorial(10))
    for k in range(9, -1, -1):
        result = result * r + 1 / factorial(k)
    return np.where(x > -700.0, np.ldexp(result, n.astype(np.int32)), 0.0)


# --------------------------------------------------------------------------------------- noise
class Noise:
    """The noise of one request. It holds no state, so any thread may use it at any time."""

    # At one position each use has another number. Rejection sampling draws a token with DRAW,
    # judges it with ACCEPT and replaces it with RECOVER. Positions after a rejected token use their
    # numbers again, because nobody has seen what these gave.
    DRAW, ACCEPT, RECOVER = range(1, 4)

    def __init__(self, seed: int, tokens: Sequence[int] = ()) -> None:
        """`seed`: any integer of up to 64 bits; -1 and 2**64 - 1 give different noise.

        With other `tokens` a seed gives other noise. By it a draft of these tokens may be judged,
        also where they were chosen by the seed's noise before.
        """
        self.seed = _scrambled(_scrambled(seed & _WORD) + (seed < 0))
        for token in tokens:
            self.seed = _scrambled(self.seed ^ token)

    def uniform(self, position: int, use: int) -> float:
        """A number of 53 bits in [0, 1); `use` is DRAW, ACCEPT or RECOVER."""
        return (self._key(position, use) >> 11) * 2.0**-53

    def exponentials(self, position: int, tokens: np.ndarray) -> np.ndarray:
        """The numbers e [n] float64 of token ids [n]; they are exponentially distributed."""
        ids = tokens.astype(np.uint32)
        high, low = (_hash(ids, self._key(position, use)) for use in (_HIGH, _LOW))
        return _minus_log(high * 2.0**-32 + (low + 0.5) * 2.0**-64)

    def choose(self, weights: Tensor, tokens: Tensor | None, position: int) -> int:
        """Draw a token from weights [n], which need not sum to 1.

        `tokens` [n] are the ids that the weights belong to; None: 0, 1, 2 and so on. Raises
        ValueError if no weight is larger than 0, or if one is NaN or infinite.
        """
        w = weights.numpy(force=True).astype(np.float64)
        ids = np.arange(len(w)) if tokens is None else tokens.numpy(force=True)
        if not 0 < w.max() < np.inf:  # a NaN counts as the largest
            raise ValueError(NO_NUMBERS)
        return self.race(w, ids, position)

    def race(self, weights: np.ndarray, ids: np.ndarray, position: int) -> int:
        """`choose` for float64 weights that are checked; of equal times the lower id wins."""
        with np.errstate(divide="ignore"):  # a token of weight 0 takes for ever
            times = self.exponentials(position, ids) / weights
        return int(ids[times == times.min()].min())

    def _key(self, position: int, use: int) -> int:
        return _scrambled(_scrambled(self.seed ^ position) + use)


def _scrambled(x: int) -> int:
    """A hash of x in 64 bits, which depends on every bit of x (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _hash(ids: np.ndarray, key: int) -> np.ndarray:
    """Hashes [n] uint32 of ids [n]: under one key all differ. Their upper bits mix best."""
    x = (ids ^ np.uint32(key & 0xFFFFFFFF)) * np.uint32(0x7FEB352D)
    x = ((x ^ x >> np.uint32(15)) + np.uint32(key >> 32)) * np.uint32(0x846CA68B)
    return (x ^ x >> np.uint32(16)) * np.uint32(0x9E3779B1)


def _minus_log(v: np.ndarray) -> np.ndarray:
    """−log(1 − v) of v [n] in (0, 1], to a relative 1e-15; v = 1 counts as 1 − 2⁻⁵⁴.

    1 − v is m · 2ᵏ with m from √½ to √2; log m = 2 (s + s³/3 + s⁵/5 + …), s = (m − 1) / (m + 1).
    """
    rest = np.maximum(1 - v, 2.0**-54)
    m, k = np.frexp(rest)
    k = np.where(m < sqrt(0.5), k - 1, k)
    f = np.where(k == 0, -v, np.ldexp(rest, -k) - 1)  # m − 1, exact for small v
    s = f / (2 + f)
    square, series = s * s, np.full_like(s, 2 / 19)
    for i in range(17, 0, -2):
        series = series * square + 2 / i
    return -(k * 0.693147180559945309417 + s * series)


# ---------------------------------------------------------------------------------------- draw
def choose(
    scores: Tensor, sampling: Sampling, noise: Noise, position: int, row: int = 0,
    is_behind_draft: bool = False,
) -> int | None:  # fmt: skip
    """Choose the token after a text of `position` tokens, by a row of penalised scores [n, V].

    Scores [V] are their only row. Greedy takes the first of the largest scores. Raises ValueError
    if the scores are no numbers, and NothingLeft if all are -inf; but behind a drafted token, which
    may end the text, returns None then.
    """
    try:
        return _choose(scores, sampling, noise, position, row)
    except NothingLeft:
        if is_behind_draft:
            return None
        raise


def _choose(scores: Tensor, sampling: Sampling, noise: Noise, position: int, row: int) -> int:
    if kernels.can_choose() and (scores.is_cpu or not sampling.is_greedy):
        seed = 0 if sampling.is_greedy else noise.seed  # greedy choices have no noise
        try:
            return kernels.choose(scores, sampling.transforms, seed, position, row)
        except ValueError:
            largest = scores.view(-1, scores.shape[-1])[row].max()
            raise no_draw(float(largest)) from None
    scores = scores.view(-1, scores.shape[-1])[row]
    if not sampling.is_greedy:
        return noise.race(*survivors(scores, *sampling.transforms), position)
    score, token = scores.max(0)
    if not abs(float(score)) < inf:  # NaN counts as the largest
        raise no_draw(float(score))
    return int(token)


@torch.inference_mode()
def sample(
    logits: Tensor, text: list[int], sampling: Sampling, noise: Noise
) -> tuple[int, Tensor | None]:
    """Choose the token after `text` by logits [V], in plain decoding and in model drafters.

    Returns the token, and q [V], the distribution that it was drawn from, or None (see needs_q).
    """
    scores = penalise(logits[None], sampling, text, Draft())  # no draft follows
    q = truncated_softmax(scores, *sampling.transforms)[0] if sampling.needs_q else None
    if sampling.is_coupled:
        return choose(scores, sampling, noise, len(text)), q
    return draw(q, noise.uniform(len(text), noise.DRAW)), q


def confidence(logits: Tensor, token: int, row: int = 0) -> float:
    """The probability of a token by a row of logits [n, V], without any transform.

    It is 0 if they are no numbers; [V] are their only row. A drafter tells by it how sure it is of
    a drafted token, and the controller how certain the target is of its own.
    """
    if kernels.can_choose():
        return kernels.confidence(logits, token, row)
    try:
        logits = logits.view(-1, logits.shape[-1])[row]
        weights, _ = survivors(logits, 1.0, 0, 1.0, 0.0)
    except ValueError:
        return 0.0
    return float(weights[token]) / total(weights)


def draw(weights: Tensor, u: float) -> int:
    """Draw a token from weights [V], which need not sum to 1, by a number u from [0, 1).

    Raises ValueError if the sum is 0 or no number. Example: weights [.2, 0, .6], u = .5 -> 2,
    because u points at .4 of the total .8.
    """
    cumulated = weights.cumsum(0, dtype=torch.float64)
    total = float(cumulated[-1])
    if not 0 < total < inf:  # NaN is not, either
        raise no_draw(-inf if total == 0 else total)
    # A product rounded up to the total could find a token of weight 0 at the end.
    return int(torch.searchsorted(cumulated, min(u * total, nextafter(total, 0)), right=True))
