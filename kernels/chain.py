"""A model's draft in one call (chain.c): a forward and a choice for each token, without Python.

A head of another model drafts so, too: then what it is fed are pairs of a token and a state.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from messages import Draft, KeyCache

from .decoder import MOST_ROWS, Decoder, Rows
from .library import address
from .sampling import choice_of, doubts_of
from .structs import STRUCTS

_LOOKED_AT = 8192  # of a text's latest tokens: a guess is what followed the same words there
_GUESSED = 8  # rows of a forward that are chosen from, at most, where tokens are guessed
_MANY = 1 << 25  # bytes of weights: reading fewer takes no longer than arithmetic of a further row


def vocabulary_of(num_words: int, ids: Tensor | None = None) -> ctypes.Structure:
    """forward.h's `vocabulary`, of `num_words` tokens.

    `ids`, of the model's outputs, are to stay; None: they rise.
    """
    return STRUCTS["vocabulary"](num_words, address(ids, dtype=torch.int64))


@dataclass
class Text:
    """One text of a chain: what it is fed, and how long its draft may be."""

    state: Any  # a drafter's, of the text
    fed: list[int]  # tokens that the model has not read yet
    limit: int  # of tokens, at least 1
    states: Tensor | None = None  # [fed, D], if the model reads such

    @property
    def is_plain(self) -> bool:
        """Whether Python has no say in how its tokens are drawn."""
        sampling, goes_on = self.state.sampling, self.state.goes_on
        is_plain = sampling.is_coupled and not sampling.needs_q and sampling.repetition_penalty == 1
        return is_plain and (not goes_on or hasattr(type(goes_on), "numbers"))


def texts_of(
    cache: KeyCache, states: Sequence[Any], fed: list[list[int]], limits: list[int]
) -> dict[int, Text]:
    """What a chain is fed by drafters' states, by number, of those that want tokens.

    Nothing where Python has a say in one, or where one call of a model with this cache cannot be.
    """
    every = list(map(Text, states, fed, limits))
    texts = {i: text for i, text in enumerate(every) if text.limit > 0}
    is_plain = bool(texts) and all(text.is_plain for text in every)
    return texts if is_plain and can_chain(cache, list(texts.values())) else {}


def can_chain(cache: KeyCache, texts: Sequence[Text]) -> bool:
    """Whether drafts of these texts, by a model with this cache, can be one call."""
    ends = [cache.lengths[text.state.row] + len(text.fed) + text.limit - 1 for text in texts]
    return (
        not cache.recurrent
        and sum(len(text.fed) for text in texts) <= MOST_ROWS
        and max(ends) <= cache.max_length
    )


def in_order(texts: dict[int, Text], drafts: Sequence[Draft], count: int) -> list[Draft]:
    """Of `count` states, the drafts of these texts; those that wanted no tokens have none."""
    found = dict(zip(texts, drafts, strict=True))
    return [found.get(i, Draft()) for i in range(count)]


def draft_chain(
    decoder: Decoder,
    cache: KeyCache,
    texts: Sequence[Text],
    words: ctypes.Structure,
    shift: int = 0,
    layer: int = -1,
) -> list[Draft]:
    """Draw each text's draft by a model whose keys and values are in `cache`, among these words.

    Of one that reads states, what comes out behind `layer` is the next token's. A token is rotated
    as if it stood `shift` positions further on. What was fed is cached then, and all of the draft
    but its last token. Raises ValueError where logits are no numbers.
    """
    flat = Rows()
    rows, limits = [text.state.row for text in texts], [text.limit for text in texts]
    counts = [len(text.fed) for text in texts]
    # Room for the whole draft; how much of it was used is known afterwards.
    place = cache.place(rows, [n + limit - 1 for n, limit in zip(counts, limits, strict=True)])
    decoder.follow(cache)
    drafts, kept, tokens = (STRUCTS["draft"] * len(texts))(), list[Any](), list[Any]()
    states = [text.states for text in texts if text.states is not None]
    given = torch.cat(states) if states else None
    can_guess = given is None and decoder.num_bytes >= _MANY
    sure = [(ctypes.c_double * limit)() for limit in limits]
    for i, (slot, text, own) in enumerate(zip(place.slots, texts, drafts, strict=True)):
        begin, state = cache.lengths[text.state.row], text.state
        flat.chain(slot, begin, len(text.fed))
        flat.ids += text.fed
        flat.wanted.append(len(flat.ids) - 1)
        seed = 0 if state.sampling.is_greedy else state.noise.seed
        own.how, own.limit = choice_of(state.sampling.transforms, seed), text.limit
        # A pair stands one position before its token.
        own.position = begin + len(text.fed) + (text.states is not None)
        before = state.text[-_LOOKED_AT:] if can_guess else []
        tokens.append(array("q", [*before, *[0] * text.limit]))
        own.before, own.sure = len(before), ctypes.addressof(sure[i])
        own.tokens = tokens[i].buffer_info()[0] + 8 * len(before)
        if state.goes_on:
            kept.append(doubts_of(*state.goes_on.numbers))
            own.may_stop = ctypes.pointer(kept[-1])
    decoder.chain(flat, drafts, words, given, shift, layer, _GUESSED if can_guess else 0)
    place.counts = [n + own.count - 1 for n, own in zip(counts, drafts, strict=True)]
    cache.advance(place)
    found = []
    for text, own, ids, chances in zip(texts, drafts, tokens, sure, strict=True):
        ids = ids[own.before : own.before + own.count].tolist()
        chances = chances[: own.count] if text.state.goes_on else []
        found.append(Draft(ids, confidence=chances, num_forwards=own.forwards))
    return found
