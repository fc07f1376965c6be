"""Which shapes give the same bits: found out at load, by running every one that will be used.

Sums of floats depend on their order, and a kernel's order on the shapes it is given. So a token
that is verified among six could get other logits than the same token decoded alone. `calibrate`
takes that away by running few shapes and checking all of them, on this machine, with this model, in
this thread:

    linear layers   the numbers of rows (1, 2, 4, … 256) at which each weight matrix gives a row
                    the same bits, in whatever place and company
    attention       the numbers of keys at which a query gets the same bits, however many queries,
                    sequences and unseen keys there are
    the model       whole forwards: decoded one by one, verified, in a batch, in a prompt's pieces

Where one kernel serves prompts and another one decoding, nothing is lost: then the whole blocks of
a prompt always run in blocks, and all other tokens never do. What a position runs in depends on the
position and the prompt's length alone.

Not covered: experts of a mixture, whose rows depend on the batch. The check then says so.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Generator, Tensor, nn

from . import attention
from .activation import ROWS
from .attention import KEY_BLOCK
from .linear import LARGE, PackedLinear, Weights

LOG = logging.getLogger("serving.exact")
PROGRESS = logging.getLogger("serving.progress")

KEY_STEPS = (64, 128, 192, 256, 320, 384, 448)  # what a last block may be filled up to, if not full

_REFERENCE = 8  # rows; all others are compared with it
_DECODING = 64  # rows up to which every matrix is checked; above one of each shape
_VERIFYING = 32  # rows up to which whole forwards are checked
_BUDGET_S = 1.0  # for matrices whose shape was checked already
_DRAFT, _PROMPT, _SHORTEST = 6, 140, 32  # tokens of the draft and prompt; a context to check
_LENGTHS = (20, 382, 509, 1022)  # of texts, so that the draft crosses a border of keys
_KNOWN = 32  # rows of each trial whose result is known
_NEAR = 1  # keys before and behind each border
_ROUNDINGS = 2**30  # makes scores near 1 of the roundings of float32
_MOST_TEXTS = 8  # texts that are attended to at once
_NUM_DRAFTED = 7  # of ROWS, those that a draft may have


@dataclass(slots=True)
class Shapes:
    """What the shapes of forwards keep to."""

    rows: tuple[int, ...] = ROWS  # numbers of rows that a forward may have, rising
    min_rows: int = 1  # a single token runs in so many rows, where that is faster
    prompt_rows: int | None = None  # a prompt's whole blocks run in so many, if in another kernel
    key_steps: tuple[int, ...] = ()  # a last block of keys is filled up to one of these; () = never

    def run_rows(self, count: int) -> int:
        """How many rows to run for `count`, the others being pads.

        Example: rows (2, 4, 8, 16), count 5 -> 8.
        """
        wanted = max(count, self.min_rows)
        return next((rows for rows in self.rows if rows >= wanted), wanted)

    def kv_length(self, end: int) -> int:
        """How many keys to attend to for `end` of them.

        Example: steps (192, 512), 530 keys -> 512 + 192.
        """
        whole = (end - 1) // KEY_BLOCK * KEY_BLOCK
        return whole + next((step for step in self.key_steps if step >= end - whole), end - whole)

    def pieces(self, begin: int, count: int, prompt_length: int) -> list[tuple[int, int]]:
        """How a run of tokens is cut into forwards: (tokens, rows of the forward; 0 = any).

        A function of positions and of the prompt's length alone.

        Example: prompt_rows 256, rows up to 32, a prompt of 300 -> [(256, 256), (32, 0), (12, 0)].
        """
        pieces, most = [], self.rows[-1]
        whole = prompt_length // self.prompt_rows * self.prompt_rows if self.prompt_rows else 0
        while count:
            in_blocks = min(count, whole - begin)
            rows = self.prompt_rows if in_blocks > 0 else 0
            taken = min(in_blocks, rows) if rows else min(count, most)
            pieces.append((taken, rows))
            begin, count = begin + taken, count - taken
        return pieces


@dataclass(frozen=True)
class Report:
    """What `calibrate` found; `doubt` says what differed, if anything did."""

    doubt: str | None
    rows: tuple[int, ...]
    prompt_rows: int | None
    key_steps: tuple[int, ...]
    num_matrices: int
    num_matrices_checked: int
    num_logits_compared: int
    num_threads: int
    seconds: float

    @property
    def is_exact(self) -> bool:
        return self.doubt is None

    def as_dict(self) -> dict[str, Any]:
        """For /health."""
        return {"is_exact": self.is_exact} | {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }

    def __str__(self) -> str:
        found = "equal bits" if self.is_exact else f"not exact ({self.doubt})"
        return (
            f"{found}: checked {self.num_matrices_checked} of {self.num_matrices} weight matrices "
            f"at {len(self.rows)} numbers of rows, {self.num_logits_compared} rows of logits, "
            f"{self.num_threads} threads, in {self.seconds:.1f} s"
        )


def calibrate(model: Any, most_rows: int = 64, bitwise: bool = True) -> Report | None:
    """Set model.shapes (the core's CachedModel) to the cheapest shapes with equal bits.

    Batches of up to `most_rows` tokens are tried. Where no shapes are exact the ones that came
    nearest stay. Runs in the thread that will serve: the number of threads decides how sums are
    split. Without `bitwise` only the clock decides, and there is no report.
    """
    if model.fast and model.fast.is_compiled:
        return model.fast.report()
    if not bitwise:
        model.shapes.min_rows = by_speed(model)[0] if model.fast else 1
        return None
    PROGRESS.info("checking which shapes give equal bits")
    began = time.perf_counter()
    weights = list(weights_of(model.model))
    shapes, checked = model.shapes, 0
    shapes.rows, shapes.key_steps = ROWS, (KEY_BLOCK,)
    doubt = reason_not_to_check(model)
    if doubt is None and not weights:
        doubt = "it has no linear layers that could be checked"
    if doubt is None:
        with attention.recording() as calls:
            _short_forward(model)
        shapes.rows, shapes.prompt_rows, checked = equal_rows(weights)
        shapes.key_steps, doubt = equal_keys(calls, model.model.dtype, model.cache.num_rows)
    if model.fast:
        shapes.min_rows = by_speed(model)[0]
    else:  # forwards keep to no shapes
        shapes.rows, shapes.key_steps = ROWS, ()
    compared = 0
    if doubt is None:
        compared, doubt = _compare_forwards(model, most_rows)
    report = Report(
        doubt, shapes.rows, shapes.prompt_rows, shapes.key_steps, len(weights), checked, compared,
        torch.get_num_threads(), time.perf_counter() - began,
    )  # fmt: skip
    LOG.info("%s: %s", model.name, report)
    return report


def reason_not_to_check(model: Any) -> str | None:
    """Why this model's forwards cannot keep to few shapes; None if they can."""
    if model.has_experts:
        return "an expert computes as many rows as choose it, which depends on the batch"
    if model.fast is None:
        return "without the fast path the sequences of a batch are padded to one length"
    return model.fast.reason_not_to_share()


# --------------------------------------------------------------------------- linear layers


def weights_of(module: nn.Module) -> Iterator[Weights]:
    """Every linear layer in there, packed or not."""
    for part in module.modules():
        if isinstance(part, PackedLinear) and isinstance(part.compute, Weights):
            yield part.compute
        elif type(part) is nn.Linear:
            yield Weights(part.weight, part.bias)


@torch.inference_mode()
def equal_rows(
    weights: list[Weights], is_apart: bool = False
) -> tuple[tuple[int, ...], int | None, int]:
    """(numbers of rows at which all weights give the same bits, prompts' blocks, weights checked).

    The second is None where a prompt's blocks belong to the first; `is_apart` says that they do not
    in any case, as another attention reads them. One matrix of each shape is
    checked first, at every number; the others, which run the same code, at those that decode, for
    as long as the time allows it.
    """
    firsts = {matrix.signature: matrix for matrix in weights}
    others = [matrix for matrix in weights if matrix is not firsts[matrix.signature]]
    equal, is_block_steady, num_checked = dict.fromkeys(ROWS, True), True, 0
    inputs: dict[tuple[int, torch.dtype], Tensor] = {}
    deadline = None
    for matrix in [*firsts.values(), *others]:
        is_first = num_checked < len(firsts)
        if not is_first:
            deadline = deadline or time.perf_counter() + _BUDGET_S
            if time.perf_counter() > deadline:
                break
        key = matrix.in_features, matrix.dtype
        if key not in inputs:
            random = Generator().manual_seed(matrix.in_features)
            inputs[key] = torch.randn(ROWS[-1], key[0], generator=random).to(key[1])
        trial = _RowTrial(matrix, inputs[key])
        most = matrix.most_rows or (ROWS[-1] if is_first else _DECODING)
        for rows in [rows for rows in ROWS if rows <= most and equal[rows]]:
            equal[rows] = trial.is_equal(rows)
        if is_first and not equal[ROWS[-1]]:
            is_block_steady &= trial.is_steady(ROWS[-1])
        num_checked += 1
    for most in {matrix.most_rows for matrix in weights} - {None}:
        for rows in (rows for rows in ROWS if rows > most):  # computed as several calls of these
            equal[rows] &= equal[most] and equal.get(rows % most, True)
    is_apart = (is_apart or not equal[ROWS[-1]]) and is_block_steady
    rows = tuple(rows for rows in ROWS if equal[rows] and not (is_apart and rows == ROWS[-1]))
    return rows or (_REFERENCE,), ROWS[-1] if is_apart else None, num_checked


class _RowTrial:
    """One matrix at several numbers of rows, compared with calls of _REFERENCE rows.

    Compared are the results themselves, and what is left of them when the expected result is taken
    away before it is rounded: a small remainder shows an order of summing that rounding to bfloat16
    would hide. An output layer in float32, which hides nothing, does without.
    """

    def __init__(self, matrix: Weights, inputs: Tensor) -> None:
        self._matrix, self._inputs = matrix, inputs
        tiles = inputs[:_KNOWN].split(_REFERENCE)
        self._results = torch.cat([matrix(tile) for tile in tiles])
        self._remainders = None
        if matrix.dtype != torch.float32 or matrix.out_features <= LARGE:
            pairs = zip(tiles, self._results.neg().split(_REFERENCE), strict=True)
            self._remainders = torch.cat([matrix(*pair) for pair in pairs])

    def is_equal(self, rows: int) -> bool:
        """Whether rows keep their bits in calls of so many, first and last places included."""
        known = torch.arange(_KNOWN)
        if rows <= _REFERENCE:  # in other places than before
            calls = known[1 : 1 + max(rows, 4)].split(rows)
        elif rows < _KNOWN:
            calls = [known[:rows], known[-rows:]]
        else:
            between = torch.arange(_KNOWN, rows)
            calls = [torch.cat([known[: _KNOWN // 2], between, known[_KNOWN // 2 :]])]
        return all(self._is_equal_in(call) for call in calls if len(call) == rows)

    def _is_equal_in(self, order: Tensor) -> bool:
        given, is_known = self._inputs[order], order < _KNOWN
        known = order[is_known]
        if not torch.equal(self._matrix(given)[is_known], self._results[known]):
            return False
        if self._remainders is None:
            return True
        subtrahend = torch.zeros(len(order), self._results.shape[1], dtype=given.dtype)
        subtrahend[is_known] = -self._results[known]
        remainders = self._matrix(given, subtrahend)[is_known]
        return torch.equal(remainders, self._remainders[known])

    def is_steady(self, rows: int) -> bool:
        """Whether rows have the same bits in any place of a call of so many."""
        there = self._matrix(self._inputs[:rows])
        moved = self._matrix(self._inputs[:rows].roll(7, 0))
        return torch.equal(moved, there.roll(7, 0))


# ------------------------------------------------------------------------------- attention


@torch.inference_mode()
def equal_keys(
    calls: set[attention.Call], dtype: torch.dtype, num_rows: int, least: int = 1
) -> tuple[tuple[int, ...], str | None]:
    """(numbers of keys that a last block may be filled up to, what is wrong with whole blocks).

    For every kind of attention in `calls`, with up to `num_rows` sequences. Calls have at least
    `least` queries, and never fewer keys than queries.
    """
    steps = [step for step in KEY_STEPS if step >= least]
    for call in calls:
        trial = _KeyTrial(call, dtype, least)
        ends = sorted({end for step in (20, *KEY_STEPS, KEY_BLOCK) for end in _around(step)})
        for begin in (0, KEY_BLOCK):  # in the first block of keys, and behind a whole one
            for end in (end for end in ends if end <= KEY_BLOCK):
                whole = begin + KEY_BLOCK
                expected = trial.run(begin + end, whole)
                if not torch.equal(trial.run(begin + end, whole + KEY_BLOCK), expected):
                    return (KEY_BLOCK,), f"attention to {whole + KEY_BLOCK} keys"
                steps = [
                    step
                    for step in steps
                    if step < end or torch.equal(trial.run(begin + end, begin + step), expected)
                ]
        steps = [step for step in steps if trial.queries_that_differ(step, num_rows) is None]
        if (wrong := trial.queries_that_differ(KEY_BLOCK, num_rows)) is not None:
            return (KEY_BLOCK,), f"attention of {wrong} queries"
    return (*steps, KEY_BLOCK), None


def _around(border: int) -> range:
    return range(border - _NEAR, border + _NEAR + 1)


class _KeyTrial:
    """One kind of attention on numbers that cancel out: what is left is rounding.

    Half the components of a query's product with a key take away what the other half adds, so that
    a score is nothing but the rounding of its sum, made large. And every key has a twin with the
    opposite value, at a random distance.
    """

    def __init__(self, call: attention.Call, dtype: torch.dtype, least: int) -> None:
        self._call, self._dtype, self._least = call, dtype, least
        self._random = Generator().manual_seed(call.key_width)
        shape = 1, call.kv_heads, 3 * KEY_BLOCK
        width, half = call.key_width, call.key_width // 2
        order = torch.randperm(width, generator=self._random)
        self._added, self._taken = order[:half], order[half : 2 * half]
        scaling = width**-0.5 if call.scaling is None else call.scaling
        self._size = (_ROUNDINGS / (width * scaling)) ** 0.5
        self._keys = self._draw(*shape, width) * self._size
        self._keys[..., self._taken] = -self._keys[..., self._added]
        self._values = self._draw(*shape, call.value_width)
        self._query = self._queries(1, 1)
        self._others = self._queries(_MOST_TEXTS, ROWS[-1])
        self._of_end: tuple[int, Tensor, Tensor] | None = None

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self._dtype)

    def _queries(self, batch: int, count: int) -> Tensor:
        queries = self._draw(batch, count, self._call.heads, self._call.key_width) * self._size
        queries[..., self._taken] = queries[..., self._added]
        return queries

    def _cancelling(self, end: int) -> tuple[Tensor, Tensor]:
        if self._of_end is None or self._of_end[0] != end:
            keys, values = self._keys.clone(), self._values.clone()
            order = torch.randperm(end, generator=Generator().manual_seed(end))
            ones, twins = order[: end // 2], order[end // 2 : end // 2 * 2]
            keys[:, :, twins], values[:, :, twins] = keys[:, :, ones], -values[:, :, ones]
            self._of_end = end, keys, values
        return self._of_end[1:]

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, end: int) -> Tensor:
        """query [B, T, H, D], all of them at position end - 1."""
        mask = query.new_zeros(len(query), 1, query.shape[1], keys.shape[2])
        mask[..., end:] = torch.finfo(self._dtype).min
        call = self._call
        grouped = attention.grouped_mask(mask, call.heads // call.kv_heads)
        sinks = torch.linspace(-1, 1, call.heads) if call.has_sinks else None
        return attention.attend(
            query, keys, values, grouped, call.scaling, softcap=call.softcap, sinks=sinks
        )

    def run(self, end: int, length: int) -> Tensor:
        """The attention of the one query, `least` times, to `end` keys among `length`."""
        keys, values = self._cancelling(end)
        query = self._query.repeat(1, self._least, 1, 1)
        return self._attend(query, keys[:, :, :length], values[:, :, :length], end)

    def queries_that_differ(self, step: int, num_rows: int) -> int | None:
        """The number of queries, if any, at which a query's bits depend on the others.

        With `step` keys, and with a whole block of keys more.
        """
        most = min(num_rows, _MOST_TEXTS)
        for length in (step, KEY_BLOCK + step):
            end = length - 9
            others = self._keys, self._values  # of the other sequences
            given = [
                torch.cat([own, *[other] * (most - 1)])[:, :, :length]
                for own, other in zip(self._cancelling(end), others, strict=True)
            ]
            expected = self.run(end, length)[0, 0]
            counts = ROWS if length <= KEY_BLOCK else ROWS[:_NUM_DRAFTED]
            for count in [n for n in counts if n >= self._least] or [self._least]:
                for batch in {1, 2, most} if count in ROWS[:_NUM_DRAFTED] else {1}:
                    query = self._others[:batch, :count].clone()
                    places = [0, count // 2, count - 1]
                    query[0, places] = self._query[0, 0]
                    found = self._attend(query, *(part[:batch] for part in given), end)
                    if any(not torch.equal(other, expected) for other in found[0, places]):
                        return count
        return None


# --------------------------------------------------------------------------- whole forwards


def by_speed(model: Any) -> list[int]:
    """How many rows to decode one token in, the others being pads, the fastest number first.

    On some machines one row takes longer to read packed weights than four do. All of them give the
    same bits, so the clock may choose.
    """
    shapes = model.shapes
    few = [rows for rows in shapes.rows if rows in (1, 2, 4, 8)] or [shapes.rows[0]]
    times: dict[int, list[float]] = {rows: [] for rows in few}
    if model.max_length < _SHORTEST:  # too short to find out
        return few
    row, text = model.cache.open_row(), [0] * 15
    model.forward([row], [text], [1])
    for _ in range(4):
        for rows, measured in times.items():
            shapes.min_rows = rows
            began = time.perf_counter()
            model.forward([row], [[0]], [1]).logits[0].argmax().item()
            measured.append(time.perf_counter() - began)
            model.cache.truncate(row, len(text))
    model.cache.close_row(row)
    # Each doubling has to be worth 5 %: attention pays for all rows, and clocks are not exact.
    return sorted(times, key=lambda rows: min(times[rows]) * 1.05 ** log2(rows))


def _short_forward(model: Any) -> None:
    row = model.cache.open_row()
    model.forward([row], [[0] * min(8, model.max_length - 1)], [1])
    model.cache.close_row(row)


@torch.inference_mode()
def _compare_forwards(model: Any, most_rows: int) -> tuple[int, str | None]:
    """(rows of logits that were compared, what differed if anything did)."""
    if model.max_length < _SHORTEST:
        return 0, f"a context of {model.max_length} tokens is too short to check"
    trial = _ForwardTrial(model, most_rows)
    try:
        for check in (trial.lengths, trial.numbers_of_rows, trial.prompts):
            if doubt := check():
                return trial.num_compared, doubt
        return trial.num_compared, None
    finally:
        trial.close()


class _ForwardTrial:
    """Feeds one text in every way that serving may feed it, and compares the bits of the logits."""

    def __init__(self, model: Any, most_rows: int) -> None:
        self._model, self._cache, self.num_compared = model, model.cache, 0
        random = Generator().manual_seed(0)
        # Longer than a block of prompts, where these run in another kernel.
        length = _PROMPT + (model.shapes.prompt_rows or 0)
        text = torch.randint(model.vocab_size, (length,), generator=random).tolist()
        self._draft, self._text = text[:_DRAFT], text[: model.max_length - 1]
        num_rows = max(1, min(self._cache.num_rows, most_rows // _DRAFT))
        self._rows = [self._cache.open_row() for _ in range(num_rows)]
        known = self._text[: min(64, model.max_length // 2)]
        model.forward(self._rows[:1], [known], [1])
        self._num_known = len(known)

    def close(self) -> None:
        for row in self._rows:
            self._cache.close_row(row)

    def _hold(self, row: int, length: int) -> None:
        """Let a row hold `length` tokens: the keys and values of the text, over and over."""
        source, slot = self._cache.slot(self._rows[0]), self._cache.slot(row)
        for layer in (layer for layer in self._cache.layers if layer.is_initialized):
            for buffer in (layer.keys, layer.values):
                copies = buffer[source, :, : self._num_known]
                copies = copies.repeat(1, -(-length // self._num_known), 1)
                buffer[slot, :, :length] = copies[:, :length]
        for layer in self._cache.recurrent:
            layer.hold(row, length, self._rows[0])
        self._cache.lengths[row] = length

    def _feed(self, rows: list[int], tokens: list[list[int]]) -> Tensor:
        """The first row's logits [at most 6, V]; nothing stays cached."""
        held = [self._cache.lengths[row] for row in rows]
        found = self._run(rows, tokens, [min(len(fed), _DRAFT) for fed in tokens])
        for row, length in zip(rows, held, strict=True):
            self._cache.truncate(row, length)
        return found

    def _run(self, rows: list[int], tokens: list[list[int]], num_logits: list[int]) -> Tensor:
        return self._model.forward(rows, tokens, num_logits).logits[0]

    def _differs(self, actual: Tensor, expected: Tensor) -> bool:
        self.num_compared += len(actual)
        return not torch.equal(actual, expected[-len(actual) :])

    def lengths(self) -> str | None:
        """Decoded, verified and in batches, behind texts that end around a border of keys."""
        one, *others = self._rows
        lengths = [n for n in _LENGTHS if n + _DRAFT <= self._model.max_length]
        for i, length in enumerate(lengths):
            for at, row in enumerate(self._rows[::-1]):  # the first row last: it is copied from
                self._hold(row, length if row == one else lengths[(i + at) % len(lengths)])
            verified = self._feed([one], [self._draft])
            for j in range(2):
                alone = self._run([one], [self._draft[j : j + 1]], [1])
                if self._differs(alone, verified[j : j + 1]):
                    return f"decoding and verifying token {length + j}"
                normed = verified.log_softmax(-1)[j : j + 1]
                if not torch.equal(alone.log_softmax(-1), normed):
                    return "log-probabilities of one position and of several"
            self._cache.truncate(one, length)
            ragged = [self._draft[: 1 + k % _DRAFT] for k in range(len(others))]
            # The whole batch once: it takes as long as all else at one length.
            for neighbours in (
                (ragged[:2], [self._draft] * len(others)) if i == 1 else (ragged[1:4],)
            ):
                batch = self._rows[: 1 + len(neighbours)]
                if self._differs(self._feed(batch, [self._draft, *neighbours]), verified):
                    return f"verifying alone and in a batch, at token {length}"
        return None

    def numbers_of_rows(self) -> str | None:
        """The same draft among every number of pads."""
        shapes, one = self._model.shapes, self._rows[0]
        usual, expected = shapes.min_rows, self._feed(self._rows[:1], [self._draft])
        try:
            for rows in (rows for rows in shapes.rows if rows <= _VERIFYING):
                shapes.min_rows = rows
                if self._differs(self._feed([one], [self._draft]), expected):
                    return f"a forward of {rows} rows"
        finally:
            shapes.min_rows = usual
        return None

    def prompts(self) -> str | None:
        """A prompt read at once and in pieces."""
        one, text = self._rows[0], self._text
        self._cache.close_row(one)
        self._rows[0] = one = self._cache.open_row(len(text))
        expected = self._feed([one], [text])
        size = len(text) * 2 // 5
        self._model.forward([one], [text[:size]], [1])
        if self._differs(self._feed([one], [text[size:]]), expected):
            return f"a prompt read at once and in pieces of {size} tokens"
        return None
