"""A model's draft in one call (chain.c): a forward and a choice for each token, without Python.

A head of another model drafts so, too: then what it is fed are pairs of a token and a state.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from messages import Draft, KeyCache

from .decoder import MOST_ROWS, Decoder, Rows
from .sampling import Transforms, choice_of, doubts_of
from .structs import STRUCTS

_LOOKED_AT = 8192  # of a text's latest tokens: a guess is what followed the same words there
_GUESSED = 8  # rows of a forward that are chosen from, at most, where tokens are guessed
_MANY = 1 << 25  # bytes of weights: reading fewer takes no longer than arithmetic of a further row


def vocabulary_of(num_words: int, ids: Tensor | None = None) -> ctypes.Structure:
    """forward.h's `vocabulary`, of `num_words` tokens.

    `ids`, of the model's outputs, are to stay; None: they rise.
    """
    return STRUCTS["vocabulary"](num_words, None if ids is None else ids.data_ptr())


@dataclass
class Text:
    """One text of a chain: what it is fed, and how its draft is drawn."""

    row: int
    text: list[int]  # all tokens before the draft
    fed: list[int]  # those that the model has not read yet
    limit: int  # of tokens, at least 1
    transforms: Transforms
    seed: int  # of its Noise
    doubts: tuple[list[float], float, float] | None  # what decides whether a draft goes on
    states: Tensor | None = None  # [fed, D], if the model reads such
    tokens: list[int] = field(default_factory=list)  # the draft
    confidence: list[float] = field(default_factory=list)
    num_forwards: int = 0  # fewer than tokens, where guesses were right

    @classmethod
    def of(cls, state: Any, fed: list[int], limit: int) -> "Text | None":
        """Of a drafter's state; None where Python has a say in how its tokens are drawn."""
        sampling, doubts = state.sampling, getattr(state.goes_on, "numbers", None)
        is_plain = sampling.is_coupled and not sampling.needs_q
        if not is_plain or sampling.repetition_penalty != 1 or (state.goes_on and not doubts):
            return None
        seed = 0 if sampling.is_greedy else state.noise.seed
        return cls(state.row, state.text, fed, limit, sampling.transforms, seed, doubts)


def texts_of(
    cache: KeyCache, states: Sequence[Any], fed: list[list[int]], limits: list[int]
) -> dict[int, Text]:
    """What a chain is fed by drafters' states, by number, of those that want tokens.

    Nothing where Python has a say in one, or where one call of a model with this cache cannot be.
    """
    texts = {}
    for i, (state, own, limit) in enumerate(zip(states, fed, limits, strict=True)):
        text = Text.of(state, own, limit)
        if text is None:
            return {}
        if limit > 0:
            texts[i] = text
    return texts if texts and can_chain(cache, list(texts.values())) else {}


def can_chain(cache: KeyCache, texts: Sequence[Text]) -> bool:
    """Whether drafts of these texts, by a model with this cache, can be one call."""
    ends = [cache.lengths[text.row] + len(text.fed) + text.limit - 1 for text in texts]
    return (
        not cache.recurrent
        and sum(len(text.fed) for text in texts) <= MOST_ROWS
        and max(ends) <= cache.max_length
    )


def drafts_of(texts: dict[int, Text], count: int) -> list[Draft]:
    """Of `count` states; those that wanted no tokens have none."""
    found = (texts.get(i) for i in range(count))
    return [
        Draft(t.tokens, confidence=t.confidence, num_forwards=t.num_forwards) if t else Draft()
        for t in found
    ]


def draft(
    decoder: Decoder,
    cache: KeyCache,
    texts: Sequence[Text],
    words: ctypes.Structure,
    shift: int = 0,
    layer: int = -1,
) -> None:
    """Draw each text's draft by a model whose keys and values are in `cache`, among these words.

    Of one that reads states, what comes out behind `layer` is the next token's. A token is rotated
    as if it stood `shift` positions further on. What was fed is cached then, and all of the draft
    but its last token. Raises ValueError where logits are no numbers.
    """
    flat = Rows()
    rows, limits = [text.row for text in texts], [text.limit for text in texts]
    counts = [len(text.fed) for text in texts]
    # Room for the whole draft; how much of it was used is known afterwards.
    place = cache.place(rows, [n + limit - 1 for n, limit in zip(counts, limits, strict=True)])
    decoder.follow(cache)
    drafts, kept, tokens = (STRUCTS["draft"] * len(texts))(), list[Any](), list[Any]()
    states = [text.states for text in texts if text.states is not None]
    given = torch.cat(states) if states else None
    can_guess = given is None and decoder.num_bytes >= _MANY
    sure = [(ctypes.c_double * limit)() for limit in limits]
    for i, (slot, text) in enumerate(zip(place.slots, texts, strict=True)):
        begin = cache.lengths[text.row]
        flat.chain(slot, begin, len(text.fed))
        flat.ids += text.fed
        flat.wanted.append(len(flat.ids) - 1)
        own = drafts[i]
        own.how, own.limit = choice_of(text.transforms, text.seed), text.limit
        # A pair stands one position before its token.
        own.position = begin + len(text.fed) + (text.states is not None)
        before = text.text[-_LOOKED_AT:] if can_guess else []
        tokens.append(array("q", [*before, *[0] * text.limit]))
        own.before, own.sure = len(before), ctypes.addressof(sure[i])
        own.tokens = tokens[i].buffer_info()[0] + 8 * len(before)
        if text.doubts:
            kept.append(doubts_of(*text.doubts))
            own.may_stop = ctypes.pointer(kept[-1])
    decoder.chain(flat, drafts, words, given, shift, layer, _GUESSED if can_guess else 0)
    place.counts = [n + own.count - 1 for n, own in zip(counts, drafts, strict=True)]
    cache.advance(place)
    for i, text in enumerate(texts):
        begin = drafts[i].before
        text.tokens = tokens[i][begin : begin + drafts[i].count].tolist()
        text.confidence = sure[i][: drafts[i].count] if text.doubts else []
        text.num_forwards = drafts[i].forwards
