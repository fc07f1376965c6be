"""A model's draft in one call (chain.c): a forward and a choice for each token, without Python."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .decoder import MOST_ROWS, Rows
from .sampling import Choice, Doubts, Transforms


class _Draft(ctypes.Structure):
    _fields_ = (
        ("how", Choice),
        ("may_stop", ctypes.c_void_p),
        ("limit", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("position", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("sure", ctypes.c_void_p),
    )


@dataclass
class Text:
    """One text of a chain: what it is fed, and how its draft is drawn."""

    row: int
    fed: list[int]  # what the model has not read yet
    limit: int  # of tokens, at least 1
    transforms: Transforms
    seed: int  # of its Noise
    doubts: tuple[list[float], float, float] | None  # what decides whether a draft goes on
    tokens: list[int] = field(default_factory=list)  # the draft
    confidence: list[float] = field(default_factory=list)


def can_chain(model: Any, texts: Sequence[Text]) -> bool:
    """Whether a cached model's drafts of these texts can be one call."""
    cache = model.cache
    ends = [cache.lengths[text.row] + len(text.fed) + text.limit - 1 for text in texts]
    return (
        bool(model.fast and model.fast.is_compiled)
        and not cache.recurrent
        and sum(len(text.fed) for text in texts) <= MOST_ROWS
        and max(ends) <= cache.max_length
    )


def draft(model: Any, texts: Sequence[Text], num_words: int) -> None:
    """Draw each text's draft, among the first `num_words` tokens, by a cached model.

    What was fed is cached then. Raises ValueError where logits are no numbers.
    """
    cache, decoder, flat = model.cache, model.fast.decoder, Rows()
    rows, limits = [text.row for text in texts], [text.limit for text in texts]
    counts = [len(text.fed) for text in texts]
    # Room for the whole draft; how much of it was used is known afterwards.
    place = cache.place(rows, [n + limit - 1 for n, limit in zip(counts, limits, strict=True)])
    decoder.follow(cache)
    drafts, wanted, kept = (_Draft * len(texts))(), list[int](), list[Any]()
    tokens = torch.empty(len(texts), max(limits), dtype=torch.int64)
    sure = torch.empty(len(texts), max(limits), dtype=torch.float64)
    for i, (slot, text) in enumerate(zip(place.slots, texts, strict=True)):
        begin = cache.lengths[text.row]
        flat.chain(slot, begin, len(text.fed))
        wanted.append(len(flat.slots) - 1)
        may_stop = None
        if text.doubts:
            chances, mean, least = text.doubts
            kept.append(Doubts((ctypes.c_double * 10)(*chances), mean, least))
            may_stop = ctypes.addressof(kept[-1])
        how = Choice.of(text.transforms, text.seed)
        drafts[i] = _Draft(
            how, may_stop, text.limit, 0, begin + len(text.fed),
            tokens[i].data_ptr(), sure[i].data_ptr(),
        )  # fmt: skip
    where, _ = flat.tensors()
    ids = torch.tensor([i for text in texts for i in text.fed])
    decoder.chain(where, torch.tensor(wanted), ids, drafts, num_words)
    place.counts = [n + own.count - 1 for n, own in zip(counts, drafts, strict=True)]
    cache.advance(place)
    for i, text in enumerate(texts):
        text.tokens = tokens[i, : drafts[i].count].tolist()
        text.confidence = sure[i, : drafts[i].count].tolist() if text.doubts else []
