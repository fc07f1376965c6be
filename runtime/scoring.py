"""Log-probabilities of a text's tokens, as requests ask for them: logprobs, prompt_logprobs."""

from typing import NamedTuple

import torch
from torch import Tensor

from runtime import kernels
from runtime.sampling import NO_NUMBERS

_AT_ONCE = 16  # rows of logits that are scored together: their softmax is in memory


class TokenScores(NamedTuple):
    """Log-probabilities of n tokens where they stand, and of `count` likeliest ones beside each."""

    logprobs: Tensor  # [n] float32
    ranks: Tensor  # [n]: 1 is the likeliest
    top: Tensor  # [n, count]: the likeliest ids, by falling probability
    top_logprobs: Tensor  # [n, count] float32


@torch.inference_mode()
def scores_of(logits: Tensor, tokens: list[int], count: int) -> TokenScores:
    """Score `tokens`, each by a row of raw logits [at least n, V], before every transform.

    A row's numbers depend on that row alone. Raises ValueError if they are none.
    """
    logits = logits[: len(tokens)]
    if kernels.can_choose() and logits.is_cpu:
        return TokenScores(*kernels.score_rows(logits, tokens, count))
    parts = list[TokenScores]()
    for begin in range(0, len(tokens), _AT_ONCE):
        part = tokens[begin : begin + _AT_ONCE]
        rows = logits[begin : begin + len(part)].float()
        scores, ids = rows.log_softmax(-1), torch.tensor(part, device=rows.device)[:, None]
        own = scores.gather(1, ids)
        if own.isnan().any():
            raise ValueError(NO_NUMBERS)
        # By the logits: logarithms round, and would make two of them equal.
        top = _largest(rows, count)
        ranks = 1 + (rows > rows.gather(1, ids)).sum(-1)
        parts.append(TokenScores(own[:, 0], ranks, top, scores.gather(1, top)))
    return TokenScores(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))


def _largest(rows: Tensor, count: int) -> Tensor:
    """The ids of each row's `count` largest numbers; of equal ones the first come first."""
    least = rows.topk(min(max(1, count), rows.shape[-1])).values[:, -1:]
    result = list[Tensor]()
    for row, is_near in zip(rows, rows >= least, strict=True):
        ids = is_near.nonzero()[:, 0]  # a few more, if they are equal: topk takes any of those
        result.append(ids[row[ids].sort(dim=0, descending=True, stable=True).indices][:count])
    return torch.stack(result)
