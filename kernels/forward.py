"""The forward of a cached model whose decoder is ours: all that is fed is one flat batch of rows.

    texts   a b c │ d │ e f      rows   a b c d e f     each with its slot, position and place

A row's bits depend on the row and on the keys that it sees, so nothing is padded, cut to shapes or
searched for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from messages import Output

from . import library
from .decoder import MOST_ROWS, Decoder, Rows

Trees = Mapping[int, list[int]]
NO_TREES: Trees = MappingProxyType({})


@dataclass(frozen=True)
class Report:
    """Why the bits of a token do not depend on how it is computed, for /health."""

    doubt: str | None
    num_threads: int
    instructions: str
    reason: str = (
        "by construction: every sum has one order, whatever the number of rows, the threads, the "
        "place and the neighbours"
    )

    @property
    def is_exact(self) -> bool:
        return self.doubt is None

    def as_dict(self) -> dict[str, Any]:
        """For /health."""
        return {"is_exact": self.is_exact} | vars(self)

    def __str__(self) -> str:
        return self.reason if self.is_exact else f"not exact ({self.doubt})"


class KernelForward:
    """Stands in for `forward` of the core's CachedModel."""

    is_compiled, could_be_bfloat16 = True, False

    def __init__(self, model: Any, decoder: Decoder) -> None:
        self._model, self.decoder = model, decoder

    @torch.inference_mode()
    def __call__(
        self,
        rows: list[int],
        tokens: list[list[int]],
        num_logits: list[int],
        layers: tuple[int, ...] = (),
        trees: Trees = NO_TREES,
    ) -> Output:
        """Feed tokens[b] to rows[b]; see CachedModel.forward.

        The last tokens of a text b in `trees` branch; trees[b] are their parents (see `lines_of`).
        """
        cache, counts = self._model.cache, [len(fed) for fed in tokens]
        place = cache.place(rows, counts)
        self.decoder.follow(cache)
        where, wanted = Rows(), list[int]()
        for b, (slot, row, count) in enumerate(zip(place.slots, rows, counts, strict=True)):
            begin = cache.lengths[row]
            if trees:
                where.tree(slot, begin, lines_of(trees.get(b, []), count))
            else:
                where.chain(slot, begin, count)
            end = len(where.slots)
            wanted += range(end - num_logits[b], end)
        ids = torch.tensor([token for fed in tokens for token in fed])
        logits, states = self._run(*where.tensors(), torch.tensor(wanted), ids, layers)
        cache.advance(place)
        dtype = self._model.model.dtype
        return Output(
            list(logits.split(num_logits)),
            {layer: list(found.to(dtype).split(counts)) for layer, found in states.items()},
        )

    def _run(
        self, rows: Tensor, lines: Tensor, wanted: Tensor, ids: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As many rows at a time as have memory; what follows sees what came before."""
        count = len(ids)
        if count <= MOST_ROWS:
            return self.decoder(rows, lines, wanted, ids, layers=layers)
        parts = []
        for begin in range(0, count, MOST_ROWS):
            own = slice(begin, min(begin + MOST_ROWS, count))
            here = wanted[(wanted >= own.start) & (wanted < own.stop)] - own.start
            parts.append(self.decoder(rows[:, own], lines[own], here, ids[own], layers=layers))
        logits, states = zip(*parts, strict=True)
        return torch.cat(logits), {i: torch.cat([own[i] for own in states]) for i in layers}

    def quantise(self, has_own_embedding: bool = True) -> None:
        """Make integers of the model's weights."""
        self.decoder.quantise(has_own_embedding)

    @property
    def way(self) -> str:
        """How the model is computed, in few words."""
        return f"whole forwards in C ({library.instructions()})"

    def report(self) -> Report:
        """What is to be said of exactness, after a try that the construction has to stand."""
        model, count = self._model, min(6, self._model.max_length - 1)
        row, ids = model.cache.open_row(), list(range(count))
        try:
            together = self([row], [ids], [count]).logits[0]
            model.cache.truncate(row, 0)
            apart = [self([row], [[token]], [1]).logits[0] for token in ids]
        finally:
            model.cache.close_row(row)
        doubt = None if torch.equal(together, torch.cat(apart)) else "decoding and verifying differ"
        return Report(doubt, self.decoder.num_threads, library.instructions())


def lines_of(parents: list[int], count: int) -> list[list[int]]:
    """Which of the `count` tokens that a text is fed each of them sees: its ancestors and itself.

    The last tokens are a draft; `parents` are the indexes, in the draft, of those that they follow.
    -1 is the token before the draft.

    Example: [-1, -1, 0], 4 -> [[0], [0, 1], [0, 2], [0, 1, 3]].
    """
    lines, first = list[list[int]](), count - len(parents)
    for i in range(count):
        before = i - 1 if i < first else first + parents[i - first]
        lines.append([*lines[before], i] if i else [i])
    return lines
