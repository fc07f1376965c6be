"""What a drafter proposes is checked here, before anything relies on it.

A draft that passes is a copy of plain values: whatever its drafter does later, it stays.
"""

from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from runtime.values import Draft, Request


def checked_drafts(drafts: Any, asked: list[tuple[Request, int]], vocab_size: int) -> list[Draft]:
    """A copy of each draft, if all can be verified. Raises TypeError or ValueError if not.

    `asked` has each one's request, and how many tokens were asked for.
    """
    if not isinstance(drafts, list) or len(drafts) != len(asked):
        raise ValueError("propose_batch has to return a list of one Draft for each state")
    pairs = zip(drafts, asked, strict=True)
    return [checked_draft(draft, *each, vocab_size) for draft, each in pairs]


def checked_draft(draft: Any, request: Request, limit: int, vocab_size: int) -> Draft:
    """A copy of a draft that can be verified. Raises TypeError or ValueError, saying what is wrong.

    Where `probs` are only shown, those that are no distributions are left out.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose returned a {type(draft).__name__}: write return Draft(tokens)")
    tokens = checked_ids(draft.tokens, limit + 1, vocab_size)
    if (count := len(tokens)) > limit:
        raise ValueError(f"more tokens proposed than the {limit} asked for")
    confidence, parents, probs = draft.confidence, draft.parents, draft.probs  # read once
    if confidence is not None:
        fits = isinstance(confidence, (list, tuple))
        confidence = [*map(float, islice(confidence, count + 1))] if fits else [-1.0]
        if len(confidence) not in (0, count) or not all(0 <= chance <= 1 for chance in confidence):
            raise ValueError("confidence is not a list of one number from 0 to 1 for each token")
    if parents is not None:
        places = [*islice(parents, count + 1)] if isinstance(parents, list) else []
        is_tree = all(type(place) is int and -1 <= place < i for i, place in enumerate(places))
        if not is_tree or len(places) != count:
            raise ValueError(f"parents {parents!r:.100} for {count} tokens")
        parents = places
    q, is_judged = None, not request.sampling.is_coupled
    if probs is not None and count and (is_judged or request.trace):
        if is_judged and parents is not None:
            raise ValueError("drawn tokens that branch cannot be judged by rejection")
        with nullcontext() if is_judged else suppress(ValueError):
            q = checked_probs(probs, tokens, vocab_size)
    return Draft(tokens, q, parents, confidence or [], int(draft.num_forwards or 0))


def checked_ids(tokens: Any, most: int, vocab_size: int) -> list[int]:
    """The first `most` of these tokens, in a list of its own.

    Raises TypeError or ValueError unless they are a list of ids below `vocab_size`.
    """
    if not isinstance(tokens, list):
        kind = type(tokens).__name__
        raise TypeError(f"proposed a {kind}, not a list of tokens: write Draft([1, 2, 3])")
    ids = [*islice(tokens, most)]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            kind = type(token).__name__
            how = "" if kind == "int" else f" (a {kind}: write int(token))"
            raise ValueError(f"proposed {token!r:.100}, which is no id below {vocab_size}{how}")
    return ids


def checked_probs(probs: Any, tokens: list[int], vocab_size: int) -> Tensor:
    """A copy [n, V] float32 of what tokens were drawn from. Raises ValueError if it cannot be."""
    if not isinstance(probs, Tensor):
        raise ValueError(f"probs are a {type(probs).__name__}: write a torch.Tensor, or None")
    with torch.no_grad(), torch._C.DisableTorchFunction():  # a subclass may do anything in each
        if probs.layout != torch.strided or probs.is_meta or not probs.is_floating_point():
            kind = f"{probs.dtype}, {probs.layout}, on {probs.device}"
            raise ValueError(f"probs are a tensor of {kind}: write a dense one of floating point")
        if probs.shape != (len(tokens), vocab_size):
            raise ValueError(f"probs of shape {[*probs.shape]} for {len(tokens)} tokens")
        q = torch.empty(probs.shape, dtype=torch.float32, device=probs.device).copy_(probs)
        drawn, off = q[range(len(tokens)), tokens], (q.sum(-1) - 1).abs().max()
        if not (q.min() >= 0 and drawn.min() > 0 and off < 1e-3):  # nor with NaN
            raise ValueError("probs are no distributions that the tokens can be drawn from")
    return q
