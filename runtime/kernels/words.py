"""The words among which a draft model's drafts choose: those of an output layer that are read."""

import ctypes
from collections.abc import Sequence
from typing import Any

from runtime.values import Model

from .chain import vocabulary_of

_FEWEST, _MOST = 16_384, 49_152  # frequent words
_NUM_RECENT, _MOST_RARE = 64, 0.2  # tokens of a text; a share
_LOOKED_AT = 1024  # latest tokens of a text, whose rare words may come again


class FrequentWords:
    """The frequent words of a draft model, while texts keep to those, and the texts' own rare ones.

    The output layer is a large part of a small model, so fewer words make a step faster. Ids are in
    the order in which the tokenizer's training added the words: the most frequent first.
    """

    def __init__(self, model: Model, num_words: int) -> None:
        """`num_words` of the model may be drafted: those that its target has, too."""
        width = model.model.get_input_embeddings().weight.shape[-1]
        self.num_words = num_words
        self.num_frequent = num_frequent(model.num_weights, width, num_words)

    def of(self, states: Sequence[Any]) -> tuple[ctypes.Structure, list[int]]:
        """What draft_chain takes for the drafter's states of some texts: `words` and `rarer`."""
        recent = [token for state in states for token in state.text[-_NUM_RECENT:]]
        num_rare = sum(token >= self.num_frequent for token in recent)
        is_usual = num_rare <= _MOST_RARE * len(recent)
        count = self.num_frequent if is_usual else self.num_words
        own = {token for s in states for token in (*s.text[-_LOOKED_AT:], *s.forced)}
        return vocabulary_of(count), sorted(i for i in own if count <= i < self.num_words)


def num_frequent(num_weights: int, width: int, num_words: int) -> int:
    """Among how many words a model drafts a usual text; `width` is that of its embeddings.

    A step reads as many numbers for each word as an embedding has. Of a large model words are a
    small part, so it can choose among more of them.
    """
    num_others = num_weights // width - num_words
    return min(num_words, max(_FEWEST, min(_MOST, num_others // 2)))
