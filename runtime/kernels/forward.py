"""The forward of a cached model whose decoder is ours: all that is fed is one flat batch of rows.

    texts   a b c │ d │ e f      rows   a b c d e f     each with its slot, position and place

A row's bits depend on the row and on the keys that it sees, so nothing is padded, cut to shapes or
searched for.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from runtime.values import Model, Output

from . import library
from .decoder import Decoder, Rows
from .modules import Modules
from .parts import is_same
from .reading import recompute_rope_tables
from .weights import PackedMatrix

_TRIED_BYTES = 2 << 30  # of weights, read at a start for rows that are computed one by one
_ROUNDED = (
    "this CPU's own product of bfloat16 numbers rounds in its own way, so another CPU's may differ"
)


@dataclass(frozen=True)
class Report:
    """Why the bits of a token do not depend on how it is computed, for /health."""

    doubt: str | None
    num_threads: int
    seconds: float  # that a try took
    instructions: str | None
    reason: str | None  # why it is exact, if it is
    exception: str | None = None  # what may have other bits on another CPU

    @property
    def is_exact(self) -> bool:
        return self.doubt is None

    def as_dict(self) -> dict[str, Any]:
        """For /health."""
        return {"is_exact": self.is_exact} | vars(self)

    def __str__(self) -> str:
        return str(self.reason) if self.is_exact else f"not exact ({self.doubt})"


class KernelForward:
    """What `CachedModel.forward` calls where whole forwards run in C: `model.compiled`."""

    is_compiled = True
    what = "in C"
    reason = (
        "by construction: every sum has one order, whatever the number of rows, the threads, the "
        "place and the neighbours"
    )

    def __init__(self, model: Model, decoder: Decoder | Modules) -> None:
        self._model, self.decoder = model, decoder

    def __call__(
        self, rows: list[int], tokens: list[list[int]], num_logits: list[int],
        layers: tuple[int, ...] = (), parents: Sequence[list[int] | None] | None = None,
    ) -> Output:  # fmt: skip
        """Feed tokens[b] to rows[b]; see CachedModel.forward.

        The last tokens of a text b branch if parents[b] says so (see `lines_of`).
        """
        cache, counts, fed = self._model.cache, [len(text) for text in tokens], Rows()
        self.decoder.follow(cache)
        for layer in cache.recurrent:
            layer.begin(rows)
        for b, (row, text, wanted) in enumerate(zip(rows, tokens, num_logits, strict=True)):
            slot, length = cache.slot(row), cache.lengths[row]
            if not text or wanted > len(text):
                raise ValueError(f"{wanted} logits of {len(text)} tokens")
            if parents and any(parents):
                fed.tree(slot, length, lines_of(parents[b] or [], len(text)))
            else:
                fed.chain(slot, length, len(text))
            fed.ids += text
            fed.wanted += range(len(fed.ids) - wanted, len(fed.ids))
        outputs = [self._run(part, layers) for part in fed.parts()]
        logits = split([part for part, _ in outputs], num_logits)
        return Output(logits, {i: split([part[i] for _, part in outputs], counts) for i in layers})

    def _run(self, fed: Rows, layers: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
        """One forward over rows, text behind text."""
        cache, lengths = self._model.cache, Counter(fed.slots)
        rows, counts = [cache.rows[slot] for slot in lengths], list(lengths.values())
        place = cache.place(rows, counts)
        recurrent = cache.recurrent if self.decoder.nets else ()  # else modules see to it
        passed = [layer.passed(rows, counts) for layer in recurrent]
        logits, states = self.decoder(fed, layers=layers, counts=counts, passed=passed)
        for layer, left in zip(recurrent, passed, strict=True):
            layer.note(rows, counts, left)
        cache.advance(place)
        return logits, {i: state.to(self._dtype) for i, state in states.items()}

    @cached_property
    def _dtype(self) -> torch.dtype:
        return self._model.model.dtype  # which transformers looks for among all weights

    def recompute_rope_tables(self) -> None:
        """Let rotations have the same bits on every machine, once all has been compared."""
        rotary = getattr(self._model.model.get_decoder(), "rotary_emb", None)
        recompute_rope_tables(rotary, self.decoder.ropes)

    @property
    def can_branch(self) -> bool:
        """Whether drafts may branch: a state cannot."""
        return not self._model.cache.recurrent

    @property
    def panels(self) -> set[PackedMatrix]:
        """The matrices that a pass reads; a separate embedding gives only a few rows."""
        return self.decoder.panels - ({self.decoder.embedding} - {self.decoder.output})

    @property
    def num_bytes(self) -> int:
        """The bytes of these matrices."""
        return sum(panels.num_bytes for panels in self.panels)

    @property
    def description(self) -> str:
        """How the model is computed, in few words."""
        return f"{self.what} ({library.instructions()} instructions)"

    def report(self) -> Report:
        """Report how exact the model is, after a trial that compares rows alone and together."""
        began = time.perf_counter()
        row = self._model.cache.open_row()
        try:
            doubt = self._doubt(row)
        finally:
            self._model.cache.close_row(row)
        seconds, cpu = time.perf_counter() - began, library.instructions()
        threads = self.decoder.num_threads
        forms = {panels.reads for panels in self.decoder.panels}
        is_rounded = cpu.endswith(("AMX", "BF16")) and "bfloat16" in forms
        return Report(doubt, threads, seconds, cpu, self.reason, _ROUNDED if is_rounded else None)

    def _doubt(self, row: int) -> str | None:
        """What differed, if anything did; the row is empty. A large model is tried on 2 rows."""
        ids = list(range(min(6, self._model.max_length - 1)))
        together = self([row], [ids], [len(ids)]).logits[0]
        self._model.cache.truncate(row, 0)
        tried = ids[: max(2, _TRIED_BYTES // self.num_bytes)]
        apart = torch.cat([self([row], [[token]], [1]).logits[0] for token in tried])
        same = torch.equal(together[: len(tried)], apart)
        return None if same else "decoding and verifying differ"


class ModuleForward(KernelForward):
    """The forward of a model that runs in transformers' modules (modules.py)."""

    is_compiled = False
    what = "in transformers' modules, with linear layers and attention in C"
    reason = (
        "linear layers, experts and attention have one order of every sum; what lies between them "
        "goes row by row, and whole forwards were compared"
    )

    @property
    def panels(self) -> set[PackedMatrix]:
        return self.decoder.panels

    def shares(self, rows: list[int]) -> bool:
        """Whether texts in these empty rows do not mix. The rows are empty again afterwards."""
        cache, texts = self._model.cache, ([1, 2, 3, 4, 5], [3, 2, 1])[: len(rows)]
        logits = []
        apart = [([row], [text]) for row, text in zip(rows, texts, strict=True)]
        for used, fed in (*apart, (rows, list(texts))):
            logits += self(used, fed, [2] * len(used)).logits
            for row in used:
                cache.truncate(row, 0)
        return all(map(is_same, logits[: len(rows)], logits[len(rows) :]))

    def _doubt(self, row: int) -> str | None:
        cache, count = self._model.cache, min(24, self._model.max_length - 7)
        if count < 24:
            return f"a context of {self._model.max_length} tokens is too short to check"
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(self._model.vocab_size, (count,), generator=random).tolist()
        whole = self([row], [ids], [count]).logits[0]
        if names := ", ".join(sorted(self.decoder.unsteady)):
            return f"bits of torch's own functions depend on the number of rows ({names})"
        cache.truncate(row, 0)
        parts, begin = [], 0
        for size in (1, 2, 3, 5, 1, 1, count - 13):
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
        same = all(map(torch.equal, batch, expected))
        return None if same else "a text alone and in a batch differs"


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


def split(parts: list[Tensor], counts: list[int]) -> list[Tensor]:
    """Rows [n, …], in one tensor or several, text by text; a single text has them all."""
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return list(rows.split(counts)) if len(counts) > 1 else [rows]
