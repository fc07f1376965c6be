"""A model's draft in one call (chain.c): a forward and a choice for each token, without Python.

A head of another model drafts so, too: then what it is fed are pairs of a token and a state.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from runtime.values import Draft, KeyCache

from .decoder import MOST_ROWS, Decoder, Rows
from .library import address
from .sampling import choice_of
from .structs import STRUCTS

_LOOKED_AT = 8192  # of a text's latest tokens: a guess is what followed the same words there
_GUESSED = 8  # rows of a forward that are chosen from, at most, where tokens are guessed
_MANY = 1 << 25  # bytes of weights: reading fewer takes no longer than arithmetic of a further row


def vocabulary_of(num_words: int, ids: Tensor | None = None) -> ctypes.Structure:
    """chain.h's `vocabulary`, of `num_words` tokens.

    `ids` are the tokens of the model's outputs, which the caller holds; None: 0, 1, 2, …
    """
    return STRUCTS["vocabulary"](num_words, address(ids, dtype=torch.int64))


def can_chain(
    cache: KeyCache, states: Sequence[Any], fed: list[list[int]], limits: list[int]
) -> bool:
    """Whether `draft` can draft for these drafters' states, at least one of which wants tokens.

    It cannot where Python has a say in how a token is drawn, where the model has recurrent layers,
    nor where a forward would have too many rows, or a row of the cache too many tokens.
    """
    texts = [text for text in zip(states, fed, limits, strict=True) if text[2] > 0]
    ends = [cache.lengths[state.row] + len(ids) + limit - 1 for state, ids, limit in texts]
    samplings = [state.sampling for state in states]
    return (
        bool(texts)
        and all(s.is_coupled and not s.needs_q and not s.penalties for s in samplings)
        and not cache.recurrent
        and sum(len(ids) for _, ids, _ in texts) <= MOST_ROWS
        and max(ends) <= cache.max_length
    )


def draft_chain(
    decoder: Decoder, cache: KeyCache, states: Sequence[Any], fed: list[list[int]],
    limits: list[int], words: ctypes.Structure, hidden: Tensor | None = None, shift: int = 0,
    layer: int = -1, rarer: Sequence[int] = (),
) -> list[Draft]:  # fmt: skip
    """Draw up to limits[i] tokens for each drafter's state, if `can_chain`.

    They are drawn among `words`, and `rarer` ones whose ids are above all of these.

    The model's keys and values are in `cache`. fed[i] are the tokens that it has not read of text
    i. They are cached then, and all of the draft but its last token. Of a text with limit 0 nothing
    is read.

    A model that reads states reads `hidden` [N, D] for the N tokens fed, and for the next token
    what comes out behind `layer`. A token is rotated as if it stood `shift` positions further
    on. Raises ValueError where logits are no numbers.
    """
    is_asked, flat = [limit > 0 for limit in limits], Rows()
    states, fed, limits = (list(compress(each, is_asked)) for each in (states, fed, limits))
    # Room for the whole draft; how much of it was used is known afterwards.
    most = [len(ids) + limit - 1 for ids, limit in zip(fed, limits, strict=True)]
    place = cache.place([state.row for state in states], most)
    decoder.follow(cache)
    drafts, memory = (STRUCTS["draft"] * len(states))(), list[Any]()
    can_guess = hidden is None and decoder.num_bytes >= _MANY
    for i, (slot, state, each) in enumerate(zip(place.slots, states, drafts, strict=True)):
        begin = cache.lengths[state.row]
        flat.chain(slot, begin, len(fed[i]))
        flat.ids += fed[i]
        flat.wanted.append(len(flat.ids) - 1)
        each.position = begin + len(fed[i]) + (hidden is not None)  # a pair's token stands behind
        # The end of the text, with what a grammar puts before the draft, is what a guess may copy.
        before = [*state.text[-_LOOKED_AT:], *state.forced] if can_guess else []
        memory.append(_fill(each, state, limits[i], before))
    decoder.chain(flat, drafts, words, hidden, shift, layer, _GUESSED if can_guess else 0, rarer)
    place.counts = [len(ids) + each.count - 1 for ids, each in zip(fed, drafts, strict=True)]
    cache.advance(place)
    drawn = iter(
        Draft(
            tokens[each.before : each.before + each.count].tolist(),
            confidence=sure[: each.count] if each.least_confidence else [],
            num_forwards=each.forwards,
        )
        for each, (tokens, sure) in zip(drafts, memory, strict=True)
    )
    return [next(drawn) if asked else Draft() for asked in is_asked]


def _fill(each: ctypes.Structure, state: Any, limit: int, before: list[int]) -> tuple[Any, ...]:
    """Say in chain.h's `draft` how a text's tokens are drawn; `before` are those it may copy.

    Returns what it points to: the tokens, and their confidence.
    """
    tokens, sure = array("q", [*before, *[0] * limit]), (ctypes.c_double * limit)()
    seed = 0 if state.sampling.is_greedy else state.noise.seed
    each.how, each.limit = choice_of(state.sampling.transforms, seed), limit
    each.before, each.sure = len(before), ctypes.addressof(sure)
    each.tokens = tokens.buffer_info()[0] + 8 * len(before)
    each.least_confidence = state.least_confidence
    return tokens, sure
