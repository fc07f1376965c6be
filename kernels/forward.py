"""The forward of a cached model whose decoder is ours: all that is fed is one flat batch of rows.

    texts   a b c │ d │ e f      rows   a b c d e f     each with its slot, position and place

A row's bits depend on the row and on the keys that it sees, so nothing is padded, cut to shapes or
searched for.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from messages import Model, Output

from . import library
from .decoder import MOST_ROWS, Decoder, Rows, sharpen
from .modules import Modules
from .parts import is_same
from .weights import panels_in

Trees = Mapping[int, list[int]]
NO_TREES: Trees = MappingProxyType({})


@dataclass(frozen=True)
class Report:
    """Why the bits of a token do not depend on how it is computed, for /health."""

    doubt: str | None
    num_threads: int
    seconds: float  # that a try took
    instructions: str | None
    reason: str | None  # why it is exact, if it is

    @property
    def is_exact(self) -> bool:
        return self.doubt is None

    def as_dict(self) -> dict[str, Any]:
        """For /health."""
        return {"is_exact": self.is_exact} | vars(self)

    def __str__(self) -> str:
        return str(self.reason) if self.is_exact else f"not exact ({self.doubt})"


class _Text(NamedTuple):
    """What a text is fed in one call."""

    row: int
    length: int  # before the call
    tokens: list[int]
    first_wanted: int  # the first token whose logits are asked for
    lines: list[list[int]] | None  # of all tokens of the call, if any text's tokens branch


class KernelForward:
    """Stands in for `forward` of the core's CachedModel."""

    is_compiled = True
    reason = (
        "by construction: every sum has one order, whatever the number of rows, the threads, the "
        "place and the neighbours"
    )

    def __init__(self, model: Model, decoder: Decoder | Modules) -> None:
        self._model, self.decoder = model, decoder

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
        cache, counts, texts = self._model.cache, [len(fed) for fed in tokens], list[_Text]()
        self.decoder.follow(cache)
        for layer in cache.recurrent:
            layer.begin(rows)
        for b, (row, count, wanted) in enumerate(zip(rows, counts, num_logits, strict=True)):
            lines = lines_of(trees.get(b, []), count) if trees else None
            texts.append(_Text(row, cache.lengths[row], tokens[b], count - wanted, lines))
        found = [
            ([b for b, *_ in pieces], self._run([(texts[b], i, j) for b, i, j in pieces], layers))
            for pieces in pieces_of(counts)
        ]
        if len(found) == 1:
            return found[0][1]
        logits: list[list[Tensor]] = [[] for _ in rows]
        hidden: dict[int, list[list[Tensor]]] = {layer: [[] for _ in rows] for layer in layers}
        for which, output in found:
            for i, b in enumerate(which):
                logits[b].append(output.logits[i])
                for layer, states in output.hidden.items():
                    hidden[layer][b].append(states[i])
        return Output(
            list(map(torch.cat, logits)),
            {layer: list(map(torch.cat, states)) for layer, states in hidden.items()},
        )

    def _run(self, pieces: list[tuple[_Text, int, int]], layers: tuple[int, ...]) -> Output:
        """One forward over tokens begin … end - 1 of each text."""
        cache, counts = self._model.cache, [end - begin for _, begin, end in pieces]
        rows, fed, wanted = [text.row for text, _, _ in pieces], Rows(), list[int]()
        place = cache.place(rows, counts)
        for slot, (text, begin, end) in zip(place.slots, pieces, strict=True):
            if text.lines is None:
                fed.chain(slot, text.length + begin, end - begin)
            else:
                fed.tree(slot, text.length, begin, text.lines[begin:end])
            fed.ids += text.tokens[begin:end]
            wanted.append(max(0, end - max(begin, text.first_wanted)))
            fed.wanted += range(len(fed.ids) - wanted[-1], len(fed.ids))
        recurrent = cache.recurrent if self.decoder.nets else ()  # else modules see to it
        passed = [layer.passed(rows, counts) for layer in recurrent]
        logits, states = self.decoder(fed, layers=layers, counts=counts, passed=passed)
        for layer, left in zip(recurrent, passed, strict=True):
            layer.note(rows, counts, left)
        cache.advance(place)
        hidden = {i: split(found.to(self._dtype), counts) for i, found in states.items()}
        return Output(split(logits, wanted), hidden)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return self._model.model.dtype  # which transformers looks for among all weights

    def sharpen(self) -> None:
        """Let rotations have the same bits on every machine, once all has been compared."""
        sharpen(getattr(self._model.model.get_decoder(), "rotary_emb", None), self.decoder.ropes)

    def quantise(self, has_own_embedding: bool = True) -> None:
        """Make integers of the model's weights."""
        self.decoder.quantise(has_own_embedding)

    @property
    def can_branch(self) -> bool:
        """Whether drafts may branch: a state cannot."""
        return not self._model.cache.recurrent

    @property
    def num_bytes(self) -> int:
        """Of the matrices that a pass reads; of another one with embeddings it reads a few rows."""
        own, embedding = self.decoder, self.decoder.embedding
        is_apart = embedding is not None and embedding is not own.output
        return own.num_bytes - (embedding.num_bytes if is_apart else 0)

    @property
    def way(self) -> str:
        """How the model is computed, in few words."""
        return f"whole forwards in C ({library.instructions()})"

    def report(self) -> Report:
        """What is to be said of exactness, after a try that the construction has to stand."""
        began = time.perf_counter()
        row = self._model.cache.open_row()
        try:
            doubt = self._doubt(row)
        finally:
            self._model.cache.close_row(row)
        seconds = time.perf_counter() - began
        threads = self.decoder.num_threads
        return Report(doubt, threads, seconds, library.instructions(), self.reason)

    def _doubt(self, row: int) -> str | None:
        """What differed, if anything did; the row is empty."""
        ids = list(range(min(6, self._model.max_length - 1)))
        together = self([row], [ids], [len(ids)]).logits[0]
        self._model.cache.truncate(row, 0)
        apart = [self([row], [[token]], [1]).logits[0] for token in ids]
        return None if torch.equal(together, torch.cat(apart)) else "decoding and verifying differ"


class ModuleForward(KernelForward):
    """The same of a model that runs in transformers' modules (modules.py)."""

    is_compiled = False
    reason = (
        "linear layers, experts and attention have one order of every sum; what lies between them "
        "goes row by row, and whole forwards were compared"
    )

    @property
    def way(self) -> str:
        """How the model is computed, in few words."""
        what = "transformers' modules, with linear layers and attention in C"
        return f"{what} ({library.instructions()})"

    @property
    def num_bytes(self) -> int:
        """Of the matrices in panels."""
        return sum(panels.num_bytes for panels in panels_in(self._model.model))

    def sharpen(self) -> None:
        """Their rotations are transformers' own."""

    def shares(self, rows: list[int]) -> bool:
        """Whether texts in these empty rows do not mix. The rows are empty again afterwards."""
        cache, texts = self._model.cache, ([1, 2, 3, 4, 5], [3, 2, 1])[: len(rows)]
        found = []
        apart = [([row], [text]) for row, text in zip(rows, texts, strict=True)]
        for used, fed in (*apart, (rows, list(texts))):
            found += self(used, fed, [2] * len(used)).logits
            for row in used:
                cache.truncate(row, 0)
        return all(map(is_same, found[: len(rows)], found[len(rows) :]))

    def _doubt(self, row: int) -> str | None:
        cache, count = self._model.cache, min(24, self._model.max_length - 7)
        if count < 24:
            return f"a context of {self._model.max_length} tokens is too short to check"
        ids = torch.randint(self._model.vocab_size, (count,), generator=_random()).tolist()
        whole = self([row], [ids], [count]).logits[0]
        if names := ", ".join(sorted(self.decoder.unsteady)):
            return f"bits of torch's own functions depend on the number of rows ({names})"
        cache.truncate(row, 0)
        parts, begin = [], 0
        for size in (1, 2, 3, 5, count - 11):
            parts += self([row], [ids[begin : begin + size]], [size]).logits
            begin += size
        if not torch.equal(torch.cat(parts), whole):
            return "a text read at once and in pieces differs"
        others = [cache.open_row() for _ in range(min(2, cache.num_rows - len(cache.rows)))]
        try:
            cache.truncate(row, count - 6)
            texts = [ids[-6:], ids[:5], ids[:1]][: 1 + len(others)]
            batch = self([row, *others], texts, [len(fed) for fed in texts]).logits
        finally:
            for other in others:
                cache.close_row(other)
        expected = whole[-6:], whole[:5], whole[:1]
        if not all(map(torch.equal, batch, expected)):
            return "a text alone and in a batch differs"
        cache.truncate(row, count - 6)
        for i in range(count - 6, count - 4):
            if not torch.equal(self([row], [ids[i : i + 1]], [1]).logits[0], whole[i : i + 1]):
                return "decoding and verifying differ"
        return None


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


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


def pieces_of(counts: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """How texts of so many tokens go through forwards of at most MOST_ROWS: (text, begin, end).

    Example: MOST_ROWS 256, counts 200 and 100 -> (0, 0, 200), (1, 0, 56), and (1, 56, 100).
    """
    pieces, room = list[tuple[int, int, int]](), MOST_ROWS
    for b, count in enumerate(counts):
        begin = 0
        while begin < count:
            end = min(count, begin + room)
            pieces.append((b, begin, end))
            room, begin = room - (end - begin), end
            if not room:
                yield pieces
                pieces, room = [], MOST_ROWS
    if pieces:
        yield pieces


def split(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """Rows [n, …] text by text; a single text has them all."""
    return list(rows.split(counts)) if len(counts) > 1 else [rows]
