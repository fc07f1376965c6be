"""Softmax cut to top-k, top-p and min-p without sorting the vocabulary.

The result is that of transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper in that
order, but those sort all V logits of every position. Here only the few largest are picked out:

    scores [V] ─ largest() → c of them, falling ─ top-k, top-p, min-p → weights ─ scatter → p [V]

A nucleus that does not end among them (a flat distribution) is found by bisecting the probability
at which it ends, at the cost of a dozen passes over all V.

`python -m benchmarks.sampling` times it beside transformers' own.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import threshold, threshold_
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

_COLUMNS = 256  # so many largest hold the nucleus of nearly every position of a trained model
_TIES = 32  # places to spare for logits equal to the k-th (bfloat16 has many)
_CHUNK = 64


def penalise(logits: Tensor, penalty: float, text: list[int], draft: list[int]) -> Tensor:
    """Apply the repetition penalty to logits [n + 1, V]; 1 = off.

    Row i is penalised as in plain decoding: for `text` and the first i drafts.
    """
    if penalty == 1:
        return logits
    # An id counts once however often it is read. Rows must read equally many ids, so in place of
    # the drafts that it must not know yet a row reads an id of the text again.
    rows = [draft[:i] + text[:1] * (len(draft) - i) for i in range(len(draft) + 1)]
    known = torch.tensor(list(set(text))).expand(len(rows), -1)
    ids = torch.cat([known, torch.tensor(rows, dtype=torch.long)], dim=1)
    return RepetitionPenaltyLogitsProcessor(float(penalty))(ids.to(logits.device), logits)


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
    rows = []
    for row in scores:  # by itself: a sum over the vocabulary has other bits beside other rows
        weights, ids = survivors(row, temperature, top_k, top_p, min_p)
        probs = _normalise(weights)
        rows.append(probs if ids is None else torch.zeros_like(row).scatter_(0, ids, probs))
    return torch.stack(rows)


def survivors(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor | None]:
    """The weights [c] of the tokens that stay, and their ids [c]; None: all V, some of weight 0.

    Of scores [V] float32; weights are probabilities but for a common factor.
    """
    vocab, ids = len(scores), None
    if 0 < top_k < vocab:
        scores, ids = _top_k(scores, top_k)
    # Exponents of at most 0: nothing overflows.
    weights = (scores - scores.amax()).div_(temperature).exp_()
    if top_p < 1:
        probs = everything = _normalise(weights)
        if ids is None:
            probs, ids = largest(probs, min(_COLUMNS, vocab))
        stays = probs.cumsum(-1) - probs < top_p
        if len(ids) < vocab and not 0 < top_k < vocab and stays[-1]:  # more may stay beyond them
            weights, ids = _nucleus(everything, top_p), None
        else:
            weights = probs.where(stays, 0.0)
    return _min_p(weights, min_p), ids


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of values [V], falling, and their ids; [count] both.

    The largest c values lie in the c chunks with the largest maxima, so only those are searched.
    """
    vocab = len(values)
    if vocab % _CHUNK or count * 4 > vocab // _CHUNK:
        found, ids = values.topk(count)
        return found, ids
    chunks = values.view(-1, _CHUNK)
    best = chunks.amax(-1).topk(count).indices  # [count]
    found, at = chunks[best].flatten().topk(count)
    return found, best[at // _CHUNK] * _CHUNK + at % _CHUNK


def _top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of scores [V] with all that equal the k-th; -inf in places to spare."""
    vocab = len(scores)
    for width in (min(k + _TIES, vocab), vocab):
        values, ids = largest(scores, width)
        kth = values[k - 1]
        if values[-1] < kth:
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


def _min_p(weights: Tensor, min_p: float) -> Tensor:
    """Without what is less likely than min_p times the likeliest."""
    if not min_p:
        return weights
    floor = min_p * weights.amax()
    below = float(floor.nextafter(torch.zeros_like(floor)))  # threshold() keeps what is above
    return threshold(weights, below, 0.0)


def _normalise(weights: Tensor) -> Tensor:
    """In place: a new [V] costs more to allocate than to divide.

    Over 150 000 tokens torch's own softmax sums to 1 + 5e-6: dozens of tokens at top-p's border.
    """
    return weights.div_(weights.sum())
