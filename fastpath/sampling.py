"""Softmax cut to top-k, top-p and min-p without sorting the vocabulary.

The result is that of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper in that
order, but those sort all V logits of every position. Here only the few largest are picked out:

    scores [n, V] ─ largest() → columns [n, c], falling ─ top-k, top-p, min-p → probs ─ scatter → p

A nucleus that does not end among the columns (a flat distribution) is found by bisecting the
probability at which it ends, at the cost of a dozen passes over that row.

`python -m benchmarks.sampling` times it beside transformers' own.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import threshold, threshold_

_COLUMNS = 256  # holds the nucleus of nearly every position of a trained model
_TIES = 32  # columns to spare for logits equal to the k-th (bfloat16 has many)
_CHUNK = 64


def truncated_softmax(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Probabilities [n, V] of scores [n, V] float32, cut and renormalised after each cut.

    top_k <= 0, top_p >= 1 and min_p = 0 cut nothing. A logit equal to the k-th largest stays too;
    which of several equal ones stays at the border of top-p is arbitrary, as in transformers. One
    token always stays.

    Example: scores log([.5, .3, .2]), temperature 1, top_p .6 -> [.625, .375, 0]: .3 still begins
    within .6.
    """
    vocab = scores.shape[-1]
    if 0 < top_k < vocab:
        values, ids = _top_k(scores, top_k)
        probs = _softmax(values, temperature)
    else:
        everything = _softmax(scores, temperature)
        if top_p >= 1:
            return _min_p(everything, min_p)
        probs, ids = largest(everything, min(_COLUMNS, vocab))

    flat: list[int] = []
    if top_p < 1:
        stays = probs.cumsum(-1) - probs < top_p
        if ids.shape[-1] < vocab and not 0 < top_k < vocab:
            flat = stays[:, -1].nonzero()[:, 0].tolist()  # more may stay beyond the columns
        probs = _normalise(probs.where(stays, 0.0))
    result = torch.zeros_like(scores).scatter_(1, ids, _min_p(probs, min_p))
    for row in flat:
        result[row] = _min_p(_nucleus(everything[row], top_p)[None], min_p)[0]
    return result


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, falling, and their ids; [n, count] both.

    The largest c values lie in the c chunks with the largest maxima, so only those are searched.
    """
    rows, vocab = values.shape
    if vocab % _CHUNK or count * 4 > vocab // _CHUNK:
        found, ids = values.topk(count)
        return found, ids
    chunks = values.view(rows, -1, _CHUNK)
    best = chunks.amax(-1).topk(count).indices  # [n, count]
    candidates = chunks.gather(1, best[..., None].expand(-1, -1, _CHUNK)).flatten(1)
    found, at = candidates.topk(count)
    return found, best.gather(1, at // _CHUNK) * _CHUNK + at % _CHUNK


def _top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row with all that equal the k-th; -inf in columns to spare."""
    vocab = scores.shape[-1]
    for width in (min(k + _TIES, vocab), vocab):
        values, ids = largest(scores, width)
        kth = values[:, k - 1, None]
        if (values[:, -1:] < kth).all():
            break
    return values.masked_fill(values < kth, -math.inf), ids


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """probs [V] cut to its likeliest tokens, as few as reach top_p together, and renormalised."""
    # What lies above `high` has less mass than top_p, what lies above `low` has enough: all tokens
    # below (1 - top_p) / V together cannot make the difference.
    low, high = (1 - top_p) / len(probs), float(probs.max())
    scratch = torch.empty_like(probs)  # a new one each time costs more than the arithmetic
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        if float(threshold_(scratch.copy_(probs), middle, 0.0).sum()) < top_p:
            high = middle
        else:
            low = middle
    result = threshold(probs, high, 0.0)
    border = threshold_(scratch.copy_(probs), low, 0.0).sub_(result).nonzero()[:, 0]
    falling, order = probs[border].sort(descending=True)
    stays = float(result.sum()) + falling.cumsum(0) - falling < top_p
    result[border[order[stays]]] = falling[stays]
    return _normalise(result)


def _min_p(probs: Tensor, min_p: float) -> Tensor:
    """Without what is less likely than min_p times the likeliest."""
    if not min_p:
        return probs
    floors = min_p * probs.amax(-1)
    below = floors.nextafter(torch.zeros_like(floors)).tolist()  # threshold() keeps what is above
    rows = [threshold(row, floor, 0.0) for row, floor in zip(probs, below, strict=True)]
    return _normalise(torch.stack(rows))


def _softmax(scores: Tensor, temperature: float) -> Tensor:
    """Softmax of scores / temperature, whose exponents are at most 0: nothing overflows.

    Over 150 000 tokens torch's own sums to 1 + 5e-6, which is dozens of tokens at top-p's border.
    """
    shifted = scores - scores.amax(-1, keepdim=True)
    return _normalise(shifted.div_(temperature).exp_())


def _normalise(probs: Tensor) -> Tensor:
    """In place: a new [n, V] costs more to allocate than to divide."""
    return probs.div_(probs.sum(-1, keepdim=True))
