"""The forwards of a cached model, in few shapes and without pads: what `speed_up` puts in.

The core feeds all texts of a batch in one forward, padded to one length. Here a batch is cut into
forwards whose shapes are known to give equal bits (exact.py), and where the model allows it several
texts stand one behind the other, so that pads cost next to nothing:

    padded   [B, T]   · · a b      ragged   [1, N]   a b c d e f g h ·
                      c d e f
                      · · g h

Rows to spare fill the number of rows up to one of the checked shapes.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import library, sampling
from kernels.decoder import decoder_of
from kernels.forward import KernelForward, joined
from kernels.parts import is_same
from messages import Output

from .attention import NAME, Ragged
from .decoder import quantise_modules, speed_up_modules
from .exact import Shapes
from .int8 import why_not
from .linear import computes_bfloat16, pack

MOST_SHARED = 32  # tokens of a text that shares its forward with others: more than any draft has


class Piece(NamedTuple):
    """Some of the tokens that one row is fed in a call."""

    index: int  # of the row, among those of the call
    begin: int
    end: int


class FastPlace:
    """A padded place (the core's Place) that is written to and read in fewer operations."""

    def __init__(self, padded: Any) -> None:
        self.padded, self.slots, self.counts = padded, padded.slots, padded.counts
        self.positions, self.end, self.kv_length = padded.positions, padded.end, padded.kv_length
        first, last = self.slots[0], self.slots[-1]
        is_compact = self.slots == list(range(first, last + 1))
        self._rows = slice(first, last + 1) if is_compact else self.slots

    def arrange(self, rows: list[Tensor]) -> Tensor:
        """Ids [t] of each text -> [B, T], or states [t, D] -> [B, T, D]."""
        has_pads = self.counts != [self.positions.shape[1]]
        return self.padded.arrange(rows) if has_pads else rows[0][None]

    def part(self, result: Tensor) -> list[Tensor]:
        """A forward's result [B, T, D] -> [t, D] of each text."""
        return self.padded.part(result)

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Additive mask [B, 1, T, kv_length]."""
        return self.padded.mask(dtype, window)

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write keys or values [B, H, T, width], and return all that the texts have by now."""
        if len(self.slots) > 1:
            slots, positions = self.padded.written
            buffer[slots, :, positions] = new.transpose(1, 2)[self.padded.real]
            return self.view(buffer)
        count, row = self.counts[0], buffer.narrow(0, self.slots[0], 1)
        if count < new.shape[2]:
            new = new.narrow(2, new.shape[2] - count, count)
        row.narrow(2, self.end - count, count).copy_(new)
        return row.narrow(2, 0, self.kv_length)

    def view(self, buffer: Tensor) -> Tensor:
        """The texts' rows [B, H, kv_length, width] of a buffer; a copy only if they lie apart."""
        return buffer[self._rows, :, : self.kv_length]


class RaggedPlace(FastPlace):
    """A place whose tokens stand one behind the other."""

    def __init__(self, padded: Any, num_rows: int) -> None:
        """`num_rows` is the forward's number of rows, at least the number of tokens."""
        super().__init__(padded)
        flat, self._num_spare = padded.real.flatten(), num_rows - sum(padded.counts)
        pad = torch.nn.functional.pad
        self.positions = pad(padded.written[1], (0, self._num_spare))[None]  # [1, N], as ids are
        self.ragged = Ragged(
            (flat.cumsum(0) - 1).clamp_(min=0).view_as(padded.real),
            pad(flat.nonzero()[:, 0], (0, self._num_spare)),
            padded.positions,
        )

    def arrange(self, rows: list[Tensor]) -> Tensor:
        """Ids [t] of each text -> [1, N], or states [t, D] -> [1, N, D]."""
        spare = rows[0].new_zeros(self._num_spare, *rows[0].shape[1:])
        return torch.cat([*rows, spare])[None]

    def part(self, result: Tensor) -> list[Tensor]:
        """A forward's result [1, N, D] -> [t, D] of each text."""
        return list(result[0, : sum(self.counts)].split(self.counts))

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The padded place's mask [B, 1, T, kv_length]; `attend` reads from it how rows lie."""
        mask = super().mask(dtype, window)
        mask.ragged = self.ragged  # for attention_forward
        return mask

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write keys or values, [1, H, N, width] or [N, H, width], and return all of the texts."""
        slots, positions = self.padded.written
        new = new if new.dim() == 3 else new[0].transpose(0, 1)
        buffer[slots, :, positions] = new[: len(slots)]
        return self.view(buffer)


class Runs:
    """Cuts what is fed into forwards; a function of the texts' lengths and of nobody's company."""

    def __init__(self, cache: Any, shapes: Shapes, can_share: bool) -> None:
        """`can_share` says whether texts may stand one behind the other in a forward."""
        self._cache, self._shapes, self.can_share = cache, shapes, can_share

    def __call__(self, rows: list[int], counts: list[int]) -> Iterator[tuple[list[Piece], Any]]:
        """How to feed counts[b] tokens to rows[b]: forwards, one after the other, and their places.

        Rows of few tokens share a forward. Longer ones have forwards to themselves, as all others
        would be padded to their length where they attend. Each forward is to be run, and the cache
        advanced, before the next one is asked for.
        """
        alone, shared, most = [], [], self._shapes.rows[-1]
        for b in sorted(range(len(rows)), key=lambda b: self._cache.slot(rows[b])):
            begin = 0
            held, prompt = self._cache.lengths[rows[b]], self._cache.prompt_lengths[rows[b]]
            for count, num_rows in self._shapes.pieces(held, counts[b], prompt):
                piece = Piece(b, begin, begin + count)
                begin = piece.end
                if num_rows or begin < counts[b] or count > MOST_SHARED:
                    alone.append(([piece], num_rows))
                elif shared and sum(p.end - p.begin for p in shared[-1][0]) + count <= most:
                    shared[-1][0].append(piece)
                else:
                    shared.append(([piece], 0))
        for pieces, num_rows in alone + shared:
            fed = [piece.end - piece.begin for piece in pieces]
            yield pieces, self._place([rows[p.index] for p in pieces], fed, num_rows)

    def _place(self, rows: list[int], counts: list[int], num_rows: int) -> Any:
        """Room in the cache for a forward of `num_rows` rows, 0 = as many as the shapes ask for."""
        cache, shapes = self._cache, self._shapes
        num_rows = num_rows or shapes.run_rows(sum(counts))
        end = max(cache.lengths[row] + count for row, count in zip(rows, counts, strict=True))
        width = num_rows if len(rows) == 1 else max(counts)
        if len(rows) > 1 and not self.can_share:
            width = -(-width // 4) * 4  # few numbers of rows: see ROWS
        # Never fewer keys than rows: GPT-Neo places its own mask by how many more keys there are.
        padded = cache.place(rows, counts, width, max(shapes.kv_length(end), width))
        is_ragged = len(rows) > 1 and self.can_share
        cache.current = RaggedPlace(padded, num_rows) if is_ragged else FastPlace(padded)
        return cache.current


def whole(cache: Any, rows: list[int], counts: list[int]) -> Iterator[tuple[list[Piece], Any]]:
    """What Runs gives, without the fast path: one forward of all, padded."""
    yield [Piece(b, 0, count) for b, count in enumerate(counts)], cache.place(rows, counts)


class FastForward:
    """Stands in for `forward` of the core's CachedModel."""

    is_compiled = can_branch = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self.runs = Runs(model.cache, model.shapes, can_share=False)

    @torch.inference_mode()
    def __call__(
        self,
        rows: list[int],
        tokens: list[list[int]],
        num_logits: list[int],
        layers: tuple[int, ...] = (),
    ) -> Output:
        """Feed tokens[b] to rows[b], in as many forwards as it takes; see CachedModel.forward."""
        for layer in self._model.cache.recurrent:
            layer.begin(rows)
        logits: list[list[Tensor]] = [[] for _ in rows]
        hidden: dict[int, list[list[Tensor]]] = {layer: [[] for _ in rows] for layer in layers}
        for pieces, place in self.runs(rows, [len(fed) for fed in tokens]):
            fed = [tokens[p.index][p.begin : p.end] for p in pieces]
            # Of the tokens whose logits are wanted, those in here: the last ones of a piece.
            first = [len(tokens[p.index]) - num_logits[p.index] for p in pieces]
            wanted = [max(0, p.end - max(p.begin, i)) for p, i in zip(pieces, first, strict=True)]
            scores, states = self._run(place, fed, wanted, layers)
            self._model.cache.advance(place)
            for i, piece in enumerate(pieces):
                logits[piece.index].append(scores[i].float())
                for layer in layers:
                    hidden[layer][piece.index].append(states[layer][i])
        return Output(
            list(map(joined, logits)),
            {layer: list(map(joined, found)) for layer, found in hidden.items()},
        )

    def _run(
        self, place: Any, tokens: list[list[int]], wanted: list[int], layers: tuple[int, ...]
    ) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
        """One forward; logits [wanted[b], V] of each text, and its hidden states [t, D] by layer.

        The output layer runs in one of the checked numbers of rows, too.
        """
        device = place.positions.device
        ids = place.arrange([torch.tensor(fed, device=device) for fed in tokens])
        model, is_ragged = self._model, isinstance(place, RaggedPlace)
        if len(tokens) > 1 and not is_ragged:
            padded, states = model.run(ids, place, max(1, *wanted), layers)
            scores = [row[len(row) - n :] for row, n in zip(padded, wanted, strict=True)]
        else:
            ends = accumulate(place.counts) if is_ragged else [ids.shape[1]]
            at = [i for end, n in zip(ends, wanted, strict=True) for i in range(end - n, end)]
            at += [0] * (model.shapes.run_rows(len(at)) - len(at))
            rows = torch.tensor(at, device=device)
            flat, states = model.run(ids, place, rows, layers)
            scores = list(flat[0, : sum(wanted)].split(wanted))
        return scores, {layer: place.part(found) for layer, found in states.items()}

    @property
    def num_bytes(self) -> int:
        """Of the matrices that are packed."""
        packed = {getattr(part, "panels", None) for part in self._model.model.modules()} - {None}
        return sum(panels.num_bytes for panels in packed)

    @property
    def way(self) -> str:
        """How the model is computed, in few words."""
        return "transformers' modules, its linear layers packed where they can be"

    @property
    def could_be_bfloat16(self) -> bool:
        """Whether floats of half the size would be read in half the time."""
        model = self._model.model
        is_wide = model.device.type == "cpu" and model.dtype == torch.float32
        return is_wide and computes_bfloat16()

    def reason_not_to_share(self) -> str | None:
        """Why this model's forwards cannot keep to few shapes; None if they can."""
        return None if self.runs.can_share else "its sequences are padded to one length in a batch"


def get_ready(quantize: str | None, device: str, is_compiled: bool | None) -> None:
    """Before weights are read. Raises ValueError, with a sentence, for what cannot be had.

    `is_compiled`: whether forwards are to run in C; None: where they can.
    """
    on_cpu = device == "cpu" or device == "auto" and not torch.cuda.is_available()
    if quantize and (reason := why_not("cpu" if on_cpu else device)):
        raise ValueError(reason)
    library.use(is_compiled if on_cpu else False)
    sampling.is_wanted = is_compiled is not False


def check_quantized(quantize: str | None, model: Any) -> None:
    """Raises ValueError, with a sentence, if a cached model is to be quantised and cannot be."""
    if quantize and model.has_experts:
        raise ValueError(
            f"--quantize int8 does not go with {model.name}: its experts would stay floats"
        )


def speed_up(
    model: Any,
    quantize: str | None = None,
    check: Callable[[Any], None] = lambda model: None,
    has_own_embedding: bool = True,
) -> None:
    """Make a CachedModel compute the same, sooner, where it and this machine allow it.

    `quantize`: None, or "int8" for another model of a quarter of the bytes (int8.py). All is
    compared, also by `check` of the whole, while the weights are floats: in integers a rounding may
    be a jump, and what is wrong would hide among the jumps. A draft of the model itself leaves the
    embedding, which is shared, as it is.
    """
    if library.is_used:
        # A draft of the model itself shares the model's weights.
        given = model.model, model.cache.capacity, model.windows, has_own_embedding
        if found := decoder_of(*given):
            model.fast = model.forward = KernelForward(model, found)
            found.release(model.model)
            if quantize:
                check(model)
                model.fast.quantise(has_own_embedding)
                found.release(model.model)
            return
    speed_up_modules(model.model)
    if not quantize:
        pack(model.model)
    model.fast = model.forward = FastForward(model)
    model.fast.runs.can_share = _can_be_ragged(model)
    if quantize:
        check(model)
        quantise_modules(model.model, quantize, has_own_embedding)


def _can_be_ragged(model: Any) -> bool:
    """Whether all of this model's attention goes through ours: texts do not mix then."""
    if model.model.config._attn_implementation != NAME or model.cache.num_rows < 2:
        return False
    rows = [model.cache.open_row() for _ in range(2)]
    texts = [[1, 2, 3, 4, 5], [3, 2, 1]]
    apart = [
        model.forward([row], [text], [2]).logits[0] for row, text in zip(rows, texts, strict=True)
    ]
    for row in rows:
        model.cache.truncate(row, 0)
    model.fast.runs.can_share = True
    try:
        together = model.forward(rows, texts, [2, 2]).logits
        return all(map(is_same, together, apart))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False  # a family with its own ideas of a batch
    finally:
        model.fast.runs.can_share = False
        for row in rows:
            model.cache.close_row(row)


def lazy_zeros(like: Tensor, num_rows: int, capacity: int) -> Tensor:
    """Zeros [num_rows, H, capacity, width], with H and width of `like` [B, H, T, width].

    They take memory only where something is written: most requests are short. (A forked process
    shares them. Memory of its own would be slower to write to.)
    """
    shape = num_rows, like.shape[1], capacity, like.shape[-1]
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    memory = mmap(-1, prod(shape) * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def scrub(buffers: list[Tensor], slot: int, length: int) -> None:
    """Zero a cache's slot if a NaN is in it: one that stays spoils attention even where masked.

    `length` tokens were written. What breaks a model shows in its last layer.
    """
    if length and not all(b[slot, :, :length].isfinite().all() for b in buffers[-2:]):
        for buffer in buffers:
            buffer[slot] = 0
