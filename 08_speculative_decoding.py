"""Speculative decoding in one file: a cheap drafter proposes, the target verifies, nothing is lost.

A language model reads all its weights to produce one token. Verifying four tokens reads them once,
too. So guess, then check; one cycle is draft → verify → accept → truncate:

    cached  │ pending  draft
    The cat │ sat      on     a      mat      one target forward over [pending, d1, d2, d3]
            │  ↓       ↓      ↓      ↓
            │  on ✓    the ✗  …      …        the target's own choice after each of them
            │
    The cat   sat      on │ the               d1 accepted; d2 refused, "the" recovered in its place;
                          │  └ pending        the KV cache is truncated to "The cat sat on", in O(1)

One pass, two tokens, and the text is the one that the target alone would have written. Where tokens
are sampled the target's choice is made with noise that belongs to the seed and the position, so it
is the same with and without a draft.

Read on in this order: KV cache and truncation · cached model · probabilities · verify · request ·
engine step · plain decoding · loading · Flask app · demo · command line. The drafters live in
drafters/; the controller of K, statistics, text, options, request parsing and the worker thread in
serving/; packed layers, fused blocks and top-p without sorting in fastpath/.

    python 08_speculative_decoding.py --demo
    python 08_speculative_decoding.py --prompt "def fib(n):" --drafter ngram
    python 08_speculative_decoding.py --port 5000

Sources: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; Daliri et al., arXiv
2408.07978; transformers' cache interface. Not covered yet: hybrid (recurrent) targets.
"""

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from math import inf, isfinite, nextafter, prod
from mmap import mmap
from typing import Any, NamedTuple

import huggingface_hub
import numpy as np
import torch
import transformers
from flask import Flask, Response, g
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import drafters
from control.controller import Acceptance, Controller, Decision, Seat
from control.statistics import Statistics, ratio
from drafters import Context, Drafter, Noise
from drafters.auto import AutoDrafter
from drafters.noise import ACCEPT, DRAW, NO_NUMBERS, RECOVER
from fastpath.attention import NAME as GROUPED
from fastpath.attention import Ragged
from fastpath.decoder import FusedDecoder, is_same, speed_up
from fastpath.exact import KEY_BLOCK, Report, Shapes, by_speed, calibrate
from fastpath.sampling import survivors, truncated_softmax
from messages import Draft, Judgement, Request, Sampling, Verdict
from serving import terminal
from serving.answers import PLAIN, answer, health, stream_answer, token_logprobs
from serving.comparison import demo_run, demo_totals, timed
from serving.gpt_neo import follow_masks
from serving.http import finish, guard, read_body, register_errors, serve
from serving.loading import StartError, load_pretrained
from serving.log import name_requests
from serving.metrics import CONTENT_TYPE, metrics
from serving.openai import register_openai
from serving.options import ROOT, Options, parse_arguments
from serving.page import register_page
from serving.parsing import SAMPLING_FIELDS, RequestError, in_short, parse_fields
from serving.reference import Reference, refusal
from serving.structure import Structure, examine, has_experts
from serving.text import TextStream
from serving.worker import Job, Worker

LOG = logging.getLogger("serving.engine")

# ------------------------------------------------------------------- KV cache and truncation


@dataclass(frozen=True, slots=True)
class Place:
    """Where one forward's tokens go: counts[b] of them to slots[b] of the cache.

    A forward runs `num_rows` rows, more than there are tokens where its shape asks for it; the
    others are pads, and pads are never written to the cache. Three arrangements:

    one sequence      [1, num_rows], the tokens from `offset` on, positions one after the other
    several, ragged   [1, num_rows], one sequence behind the other, then the pads; queries are
                      gathered to [B, T] where they attend
    several, padded   [B, T], padded on the left, for models that cannot have it ragged
    """

    slots: list[int]  # rising
    counts: list[int]
    num_rows: int
    positions: Tensor  # [B, T], of the queries
    end: int  # one more than the last position of all rows
    kv_length: int  # keys that are attended to, unseen ones included
    # One sequence:
    start: int | None = None  # the first row's position
    offset: int = 0
    # Several:
    targets: tuple[Tensor, Tensor] | None = None  # (slot, position) of every token
    real: Tensor | None = None  # [B, T] bool: False on pads
    ragged: Ragged | None = None

    def arrange(self, tokens: list[list[int]]) -> Tensor:
        """Lists of token ids -> ids as the forward takes them, [1, num_rows] or [B, T]."""
        if self.start is not None or self.ragged:
            flat = [0] * self.offset + list(chain.from_iterable(tokens))
            flat += [0] * (self.num_rows - len(flat))
            return torch.tensor([flat], device=self.positions.device)
        width = self.positions.shape[1]
        padded = [[0] * (width - len(row)) + row for row in tokens]
        return torch.tensor(padded, device=self.positions.device)

    def arrange_states(self, states: list[Tensor]) -> Tensor:
        """The same for states [t, D] -> [1, num_rows, D] or [B, T, D]."""
        pad = torch.nn.functional.pad
        if self.start is not None or self.ragged:
            flat = torch.cat(states)
            return pad(flat, (0, 0, self.offset, self.num_rows - self.offset - len(flat)))[None]
        width = self.positions.shape[1]
        return torch.stack([pad(s, (0, 0, width - len(s), 0)) for s in states])

    def part(self, result: Tensor) -> list[Tensor]:
        """A forward's result, [1, num_rows, D] or [B, T, D] -> [t, D] of each sequence."""
        if self.start is not None or self.ragged:
            flat = result[0, self.offset : self.offset + sum(self.counts)]
            return list(flat.split(self.counts))
        return [row[len(row) - n :] for row, n in zip(result, self.counts, strict=True)]

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Additive mask [B, 1, T, kv_length]: each token's past and itself, at most `window`."""
        keys = torch.arange(self.kv_length, device=self.positions.device)
        queries = self.positions[:, None, :, None]
        unseen = keys > queries
        if window is not None:
            unseen |= keys <= queries - window
        # Floats and not bools: transformers' eager attention adds the mask to the scores.
        mask = torch.zeros(unseen.shape, dtype=dtype, device=keys.device)
        mask = mask.masked_fill_(unseen, torch.finfo(dtype).min)
        mask.ragged = self.ragged  # for attention_forward
        return mask


class Piece(NamedTuple):
    """Some of the tokens that one row is fed in a call."""

    index: int  # of the row, among those of the call
    begin: int
    end: int


class Run(NamedTuple):
    """One forward of some tokens."""

    pieces: list[Piece]
    num_rows: int  # 0 = as many as the shapes ask for


def lazy_zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros that take memory only where something is written: most requests are short."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.frombuffer(mmap(-1, prod(shape) * like.element_size()), dtype=like.dtype).view(
        shape
    )


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, preallocated [rows, heads, capacity, width]."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Sizes come from the states: the config knows nothing of sharded heads or of MLA's widths.
        # Zeros, not empty: a masked slot still enters 0 · value, and 0 · NaN would be NaN.
        shape = self._cache.num_rows, key_states.shape[1], self._cache.capacity
        self.keys = lazy_zeros(key_states, *shape, key_states.shape[-1])
        self.values = lazy_zeros(value_states, *shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write [B, H, T, width] at the current place; returns all keys and values up to there.

        Ragged ones may also come as [num_rows, H, width].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = self._write_rows if self._cache.current.start is None else self._write_row
        return write(self.keys, key_states), write(self.values, value_states)

    def _write_row(self, buffer: Tensor, new: Tensor) -> Tensor:
        place = self._cache.current
        slot, count = place.slots[0], place.counts[0]
        row = buffer.narrow(0, slot, 1)
        new = new if count == place.num_rows else new.narrow(2, place.offset, count)
        row.narrow(2, place.end - count, count).copy_(new)
        return row.narrow(2, 0, place.kv_length)

    def _write_rows(self, buffer: Tensor, new: Tensor) -> Tensor:
        place = self._cache.current
        slots, positions = place.targets
        if place.ragged:
            new = new if new.dim() == 3 else new[0].transpose(0, 1)
            new = new[: len(slots)]
        else:
            new = new.transpose(1, 2)[place.real]
        buffer[slots, :, positions] = new
        first, last = place.slots[0], place.slots[-1]
        is_compact = last - first + 1 == len(place.slots)  # then a view will do
        return buffer[slice(first, last + 1) if is_compact else place.slots, :, : place.kv_length]

    @torch.inference_mode()
    def scrub(self, slot: int) -> None:
        """Forget even the bits: 0 · NaN is NaN, behind the mask, too."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[slot] = 0

    def is_sound(self, slot: int, length: int) -> bool:
        """Whether what was written to the first `length` places are numbers."""
        written = [buffer[slot, :, :length] for buffer in (self.keys, self.values)]
        return all(bool(states.isfinite().all()) for states in written)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot into another."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[target, :, :length] = buffer[source, :, :length]

    @torch.inference_mode()
    def repeat(self, source: int, target: int, length: int, wanted: int) -> None:
        """Fill a slot up to `wanted` tokens with the first `length` of another, over and over."""
        for buffer in (self.keys, self.values) if self.is_initialized else ():
            copies = buffer[source, :, :length].repeat(1, -(-wanted // length), 1)
            buffer[target, :, :wanted] = copies[:, :wanted]

    def get_seq_length(self) -> int:
        return self._cache.current.end - max(self._cache.current.counts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.current.kv_length, 0

    def get_max_length(self) -> int:
        return self._cache.max_length


class SlotCache(Cache):
    """A KV cache whose rows have lengths of their own; truncating a row lowers its length.

    One forward is: `place` its tokens, run the model with this cache, `advance`. Open rows lie in
    the first slots of the buffers, without gaps, so that a batch of them is a view: when a row is
    closed, the row in the last slot moves into its place.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        max_length: int,
        device: torch.device,
        shapes: Shapes,
    ) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.num_rows, self.max_length, self.device = num_rows, max_length, device
        self.shapes = shapes
        self.capacity = -(-max_length // KEY_BLOCK) * KEY_BLOCK
        self.lengths = [0] * num_rows
        self.prompt_lengths = [0] * num_rows  # decides which forwards read it (see Shapes.pieces)
        self.current: Place  # of the forward under way
        self._free = list(range(num_rows))[::-1]
        self._rows: list[int] = []  # the open ones, by slot
        self._written = [0] * num_rows  # how far each slot was, since it was empty

    def open_row(self, prompt_length: int = 0) -> int:
        """An empty row for a new request. Raises ValueError when all are taken."""
        if not self._free:
            raise ValueError(f"all {self.num_rows} rows of the KV cache are in use")
        row = self._free.pop()
        self._rows.append(row)
        self.prompt_lengths[row] = prompt_length
        return row

    def close_row(self, row: int) -> None:
        """Give the row back; costs a copy of the row in the last slot, if that is another."""
        assert row not in self._free, f"row {row} closed twice"
        slot, last = self._rows.index(row), self._rows.pop()
        self._clean(slot)
        if last != row:
            source = len(self._rows)
            for layer in self.layers:
                layer.move(source, slot, self.lengths[last])
            self._rows[slot], self._written[slot] = last, self.lengths[last]
            self._clean(source)
        self.lengths[row] = 0
        self._free.append(row)

    def _clean(self, slot: int) -> None:
        """Leave no NaN to the next request; what breaks a model shows in its last layer."""
        written, self._written[slot] = self._written[slot], 0
        used = [layer for layer in self.layers if layer.is_initialized]  # some share another's
        if written and used and not used[-1].is_sound(slot, written):
            for layer in self.layers:
                layer.scrub(slot)

    def repeat(self, source: int, row: int, length: int, wanted: int) -> None:
        """Let `row` hold the first `length` tokens of `source` over and over, `wanted` in all."""
        for layer in self.layers:
            layer.repeat(self._rows.index(source), self._rows.index(row), length, wanted)
        self.lengths[row] = wanted

    def runs(self, rows: list[int], counts: list[int], most_shared: int) -> list[Run]:
        """How to feed counts[b] tokens to rows[b]: forwards, one after the other.

        Rows of few tokens, at most `most_shared`, share a forward; longer ones have forwards to
        themselves, as all the others would be padded to their length where they attend.
        """
        alone, shared, most = [], [], self.shapes.rows[-1]
        for b in sorted(range(len(rows)), key=lambda b: self._rows.index(rows[b])):
            row, begin = rows[b], 0
            held, prompt = self.lengths[row], self.prompt_lengths[row]
            for count, num_rows in self.shapes.pieces(held, counts[b], prompt):
                piece = Piece(b, begin, begin + count)
                begin = piece.end
                if num_rows or begin < counts[b] or count > most_shared:
                    alone.append(Run([piece], num_rows))
                elif shared and sum(p.end - p.begin for p in shared[-1].pieces) + count <= most:
                    shared[-1].pieces.append(piece)
                else:
                    shared.append(Run([piece], 0))
        return alone + shared

    def place(
        self, rows: list[int], counts: list[int], num_rows: int = 0, is_ragged: bool = True
    ) -> Place:
        """Make room for counts[b] >= 1 tokens behind what rows[b] holds.

        The forward has `num_rows` rows, 0 = as many as the shapes ask for. Raises ValueError if a
        row would outgrow `max_length`.
        """
        ends = [self.lengths[row] + count for row, count in zip(rows, counts, strict=True)]
        end = max(ends)
        if end > self.max_length:
            raise ValueError(f"{end} tokens do not fit a KV cache of {self.max_length}")
        slots = [self._rows.index(row) for row in rows]
        for slot, last in zip(slots, ends, strict=True):  # also where the forward then fails
            self._written[slot] = max(self._written[slot], last)
        assert slots == sorted(slots), "rows must come in the order of their slots"
        num_rows = num_rows or self.shapes.run_rows(sum(counts))
        if len(rows) == 1:
            # Pads stand before the tokens, at positions that are known to have a rotation, or
            # behind them, where nothing is before.
            start = max(end - num_rows, 0)
            positions = torch.arange(start, start + num_rows, device=self.device)[None]
            offset = end - counts[0] - start
            kv_length = self.shapes.kv_length(end)
            self.current = Place(slots, counts, num_rows, positions, end, kv_length, start, offset)
        else:
            self.current = self._place_several(slots, counts, ends, num_rows, is_ragged)
        return self.current

    def _place_several(
        self, slots: list[int], counts: list[int], ends: list[int], num_rows: int, is_ragged: bool
    ) -> Place:
        width = max(counts)
        if not is_ragged:  # in few numbers of rows: see ROWS
            width = -(-width // 4) * 4
        at = torch.arange(width, device=self.device)
        given = torch.tensor([counts, ends, slots], device=self.device)
        count_of, end_of, slot_of = given[..., None]
        real = at >= width - count_of  # [B, T]
        positions = (end_of - width + at).clamp_(min=0)
        targets = slot_of.expand_as(real)[real], positions[real]
        ragged = None
        if is_ragged:
            flat, num_pads = real.flatten(), num_rows - sum(counts)
            pad = torch.nn.functional.pad
            ragged = Ragged(
                (flat.cumsum(0) - 1).clamp_(min=0).view_as(real),
                pad(flat.nonzero()[:, 0], (0, num_pads)),
                pad(targets[1], (0, num_pads))[None],
            )
        end = max(ends)
        return Place(
            slots, counts, num_rows if is_ragged else real.numel(), positions, end,
            self.shapes.kv_length(end), targets=targets, real=real, ragged=ragged,
        )  # fmt: skip

    def advance(self, place: Place) -> None:
        """The placed tokens are cached now."""
        for slot, count in zip(place.slots, place.counts, strict=True):
            self.lengths[self._rows[slot]] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget row's tokens from `length` on. O(1): stale slots are masked, then overwritten.

        Example: 9 cached after verifying [pending, d1, d2, d3] with 1 accepted -> truncate(row, 7).
        Raises ValueError unless 0 <= length <= lengths[row].
        """
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot truncate {self.lengths[row]} cached tokens to {length}")
        self.lengths[row] = length


# ------------------------------------------------------------------------------ cached model


@dataclass(frozen=True, slots=True)
class Output:
    """What one forward gives, row by row."""

    logits: list[Tensor]  # [num_logits, V] float32
    hidden: list[Tensor] | None  # [tokens fed, D], behind the final norm


class CachedModel:
    """A causal language model with a SlotCache: the target, and a draft model alike."""

    max_shared = 32  # tokens of a row that shares its forward with others: more than any draft has

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        num_rows: int,
        max_length: int,
        structure: Structure | None = None,
    ):
        structure = structure or examine(model, max_length)
        config = model.config.get_text_config()
        self.model, self.tokenizer, self.name, self.max_length = model, tokenizer, name, max_length
        self.vocab_size: int = config.vocab_size
        self.num_weights = sum(weight.numel() for weight in model.parameters())
        self.shapes = Shapes()
        self.report: Report | None = None  # of make_exact
        self.reference: Reference | None = None  # of transformers' own modules
        self.cache = self.new_cache(structure.num_cache_layers, num_rows)
        self._fused: FusedDecoder | None = None
        self.is_fast = False  # whether speed_up was called
        self._can_share = False  # whether sequences may stand behind each other in one forward
        self._windows = structure.windows

    def speed_up(self) -> None:
        """Compute the same, faster, where this model and this machine allow it."""
        self.is_fast = True
        self._fused = speed_up(self.model, self.cache.capacity, self._windows)
        self._can_share = bool(self._fused) or self._can_be_ragged()

    def _can_be_ragged(self) -> bool:
        """Whether all of this model's attention goes through ours: sequences do not mix then."""
        if self.model.config._attn_implementation != GROUPED or self.cache.num_rows < 2:
            return False
        rows = [self.cache.open_row() for _ in range(2)]
        texts = [[1, 2, 3, 4, 5], [3, 2, 1]]
        apart = [
            self.forward([row], [t], [2]).logits[0] for row, t in zip(rows, texts, strict=True)
        ]
        for row in rows:
            self.cache.truncate(row, 0)
        self._can_share = True
        try:
            together = self.forward(rows, texts, [2, 2]).logits
            return all(map(is_same, together, apart))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return False  # a family with its own ideas of a batch
        finally:
            self._can_share = False
            for row in rows:
                self.cache.close_row(row)

    def reason_not_to_share(self) -> str | None:
        """Why this model's forwards cannot keep to few shapes; None if they can."""
        if has_experts(self.model):
            return "an expert computes as many rows as choose it, which depends on the batch"
        return None if self._can_share else "its sequences are padded to one length in a batch"

    def make_exact(self, most_rows: int = 64) -> bool:
        """Find the cheapest shapes that make logits the same bits in whatever company.

        Up to `most_rows` tokens share a forward.
        """
        self.report = calibrate(self, most_rows)
        return self.report.is_exact

    def new_cache(self, num_layers: int, num_rows: int) -> SlotCache:
        """An empty cache as long as this model's own, for a head that runs beside it."""
        return SlotCache(num_layers, num_rows, self.max_length, self.model.device, self.shapes)

    def _mask(self, place: Place) -> Tensor | dict[str, Tensor]:
        """The window is in the mask; a family with layers of two kinds takes one mask per kind."""
        dtype, windows = self.model.dtype, self._windows
        if len(set(windows.values())) == 1:
            return place.mask(dtype, next(iter(windows.values())))
        return {kind: place.mask(dtype, window) for kind, window in windows.items()}

    @torch.inference_mode()
    def forward(
        self,
        rows: list[int],
        tokens: list[list[int]],
        num_logits: list[int],
        want_hidden: bool = False,
    ) -> Output:
        """Feed tokens[b] behind what cache row rows[b] holds.

        Prefill (a long run of tokens), decoding (one) and verifying (n + 1) differ only in what is
        fed. Returns the logits of each row's last num_logits[b] tokens. Raises ValueError if a row
        outgrows the cache.
        """
        logits: list[list[Tensor]] = [[] for _ in rows]
        hidden: list[list[Tensor]] = [[] for _ in rows]
        for pieces, num_rows in self.cache.runs(rows, [len(t) for t in tokens], self.max_shared):
            place = self.cache.place(
                [rows[p.index] for p in pieces],
                [p.end - p.begin for p in pieces],
                num_rows,
                self._can_share,
            )
            fed = [tokens[p.index][p.begin : p.end] for p in pieces]
            # Of the tokens whose logits are wanted, those in here: the last ones of a piece.
            wanted = [
                p.end - max(p.begin, min(p.end, len(tokens[p.index]) - num_logits[p.index]))
                for p in pieces
            ]
            scores, states = self._run(place, fed, wanted, want_hidden)
            self.cache.advance(place)
            for piece, score, state in zip(pieces, scores, states, strict=True):
                logits[piece.index].append(score.float())
                hidden[piece.index].append(state)
        return Output(
            [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in logits],
            [torch.cat(p) if len(p) > 1 else p[0] for p in hidden] if want_hidden else None,
        )

    def _run(
        self, place: Place, tokens: list[list[int]], wanted: list[int], want_hidden: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One forward; logits [wanted[b], V] and hidden states [t, D] of each sequence."""
        ids = place.arrange(tokens)
        if place.start is None and not place.ragged:
            scores, hidden = self._run_modules(ids, place, max(1, *wanted), want_hidden)
            pairs = zip(scores, wanted, strict=True)
            return [row[len(row) - n :] for row, n in pairs], place.part(hidden)
        at = self._rows_wanted(place, wanted)
        if self._fused:
            scores, hidden = self._fused(ids, place, self.cache, at)
        else:
            scores, hidden = self._run_modules(ids, place, at, want_hidden)
        return list(scores[0, : sum(wanted)].split(wanted)), place.part(hidden)

    def _rows_wanted(self, place: Place, wanted: list[int]) -> Tensor:
        """The rows whose logits are wanted, and more to fill up what the output layer runs in."""
        ends = accumulate(place.counts, initial=place.offset)
        next(ends)
        at = [i for end, n in zip(ends, wanted, strict=True) for i in range(end - n, end)]
        at += [0] * (self.shapes.run_rows(len(at)) - len(at))
        return torch.tensor(at, device=place.positions.device)

    def _run_modules(
        self, ids: Tensor, place: Place, logits_to_keep: Tensor | int, want_hidden: bool
    ) -> tuple[Tensor, Tensor]:
        """The forward of transformers' own modules: logits and hidden states as ids are."""
        positions = place.positions if place.ragged is None else place.ragged.positions
        result = self.model(
            input_ids=ids,
            attention_mask=self._mask(place),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=-1 if want_hidden else False,  # an index: the last one alone
        )
        # Where nobody asked for hidden states, anything with a row for each token will do.
        hidden = result.hidden_states[-1] if want_hidden else ids[..., None]
        return result.logits, hidden


# ----------------------------------------------------------------------------- probabilities


def penalise(logits: Tensor, penalty: float, text: list[int], draft: list[int]) -> Tensor:
    """Apply the repetition penalty to logits [n + 1, V].

    Row i is judged as plain decoding would judge it: behind `text` and the first i drafts. 1 = off.
    """
    if penalty == 1:
        return logits
    # An id counts once however often it is read. Rows must read equally many ids, so in place of
    # the drafts that it must not know yet a row reads an id of the text again.
    rows = [draft[:i] + text[:1] * (len(draft) - i) for i in range(len(draft) + 1)]
    known = torch.tensor(list(set(text))).expand(len(rows), -1)
    ids = torch.cat([known, torch.tensor(rows, dtype=torch.long)], dim=1)
    return RepetitionPenaltyLogitsProcessor(float(penalty))(ids.to(logits.device), logits)


def probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """p (or q) [n, V] of penalised logits [n, V]: temperature, then top-k, top-p and min-p.

    Greedy is the limit of low temperature: one-hot at the largest score.
    """
    if sampling.is_greedy:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    return truncated_softmax(scores, *sampling.transforms)


def own_choices(scores: Tensor, sampling: Sampling, noise: Noise, position: int) -> Iterator[int]:
    """The model's own token for each row of penalised logits [n, V], one after the other.

    Row i is where the token at `position` + i of the text is chosen. The choice depends on nothing
    but the row, the request's sampling, and the noise that belongs to its seed and that position:
    not on who drafted what, nor on how the text came about.
    """
    if sampling.is_greedy:
        best = scores.max(-1)
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if not isfinite(value):  # NaN counts as the largest
                raise ValueError(NO_NUMBERS)
            yield token
    else:
        for i, row in enumerate(scores):
            weights, ids = survivors(row, *sampling.transforms)
            yield noise.choose(weights, ids, position + i)


@torch.inference_mode()
def sample(
    logits: Tensor, text: list[int], sampling: Sampling, noise: Noise
) -> tuple[int, Tensor | None]:
    """How plain decoding and model drafters choose behind `text`: a token, and q or None.

    q [V] is the distribution that the token was drawn from. It is made for the rule of rejection
    only.
    """
    scores = penalise(logits[None], sampling.repetition_penalty, text, [])
    if sampling.is_coupled:
        return next(own_choices(scores, sampling, noise, len(text))), None
    q = probabilities(scores, sampling)[0]
    return draw(q, noise.uniform(len(text), DRAW)), q


# ------------------------------------------------------------------------------------ verify


def verify(draft: Draft, choices: Iterator[int]) -> list[Judgement]:
    """Keep the draft for as long as it is what the target chooses itself.

    `choices` are the target's own tokens after pending, d1, …, dn (see `own_choices`). The first
    one that differs from the draft recovers the text; if none does the last one is a bonus.

    Lossless, because only the target's own choices are ever emitted: choice i was made behind
    accepted tokens only, which are the choices before it. So each stands behind the same text as
    in plain decoding, and depends on that text, the seed and the position alone.

    Example: choices 4, 9, 1, 7 and Draft([4, 8, 1]) -> 4 accepted, 8 rejected, 9 recovered.
    """
    judged = []
    for drafted, chosen in zip(draft.tokens, choices, strict=False):
        if drafted != chosen:
            return [*judged, Judgement(drafted, "rejected"), Judgement(chosen, "recovered")]
        judged.append(Judgement(drafted, "accepted"))
    return [*judged, Judgement(next(choices), "bonus")]


@torch.inference_mode()
def verify_by_rejection(draft: Draft, p: Tensor, noise: Noise, position: int) -> list[Judgement]:
    """The classical rule: accept by chance, so that the output is distributed exactly as p.

    p [n + 1, V] is the target's distribution after pending, d1, …, dn. A drafted token is accepted
    if u < p / q. The first rejected token is replaced by one drawn from norm(max(0, p - q)); if
    none was rejected a bonus token is drawn from the last row. The chance of a token x is then
    q(x) min(1, p(x) / q(x)) + (1 - Σ min(p, q)) norm(max(0, p - q))(x) = p(x), whatever q is.
    It accepts the most that is possible, Σ min(p, q), but which tokens come depends on the drafts.
    Source: Leviathan et al., algorithm 1.
    """
    judged = []
    for i, token in enumerate(draft.tokens):
        if draft.probs is None:  # nothing was drawn: q is one-hot
            q = torch.zeros_like(p[i])
            q[token] = 1.0
        else:
            q = draft.probs[i].to(p)
        p_here, q_here = float(p[i, token]), float(q[token])
        u = noise.uniform(position + i, ACCEPT)
        if not u * q_here < p_here:
            judged.append(Judgement(token, "rejected", p_here, q_here, u))
            u = noise.uniform(position + i, RECOVER)
            token = draw(residual(p[i], q), u)
            p_here, q_here = float(p[i, token]), float(q[token])
            return [*judged, Judgement(token, "recovered", p_here, q_here, u)]
        judged.append(Judgement(token, "accepted", p_here, q_here, u))
    n = len(draft.tokens)
    u = noise.uniform(position + n, DRAW)
    token = draw(p[n], u)
    return [*judged, Judgement(token, "bonus", float(p[n, token]), None, u)]


def draw(weights: Tensor, u: float) -> int:
    """The token drawn by u from weights [V], which need not sum to 1. Raises ValueError for none.

    Example: weights [.2, 0, .6], u = .5 -> 2: of the total .8, u points at .4.
    """
    cumulated = weights.cumsum(0, dtype=torch.float64)
    total = float(cumulated[-1])
    if not 0 < total < inf:  # as NaN is not
        raise ValueError(NO_NUMBERS)
    # Below the total whatever the rounding: then a token without weight is never found.
    return int(torch.searchsorted(cumulated, min(u * total, nextafter(total, 0)), right=True))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The positive part of p [V] - q [V], not normalised: draw() does that.

    Example: p [.5, .5, 0], q [.2, .8, 0] -> [.3, 0, 0].
    """
    more = (p - q).clamp_(min=0)
    # Nothing more: p = q but for rounding, and the rejection was rounding as well.
    return more if more.sum() > 0 else p


# ----------------------------------------------------------------------------------- request


class Sequence:
    """A request under way: its tokens, cache row, drafter's state, text and statistics."""

    def __init__(self, request: Request, row: int, tokenizer: Any) -> None:
        self.request, self.row, self.tokenizer = request, row, tokenizer
        self.noise = Noise(request.seed)
        self.tokens = list(request.prompt)
        self.logprobs: list[dict[str, Any]] = []  # see token_logprobs()
        self.drafter: Drafter | None = None
        self.state: Any = None  # the drafter's
        self.text = TextStream(tokenizer, request.stop)
        self.hidden: list[Tensor] = []  # of the prompt's chunks so far, for drafters that ask
        self.statistics = Statistics()
        self.num_steps = 0
        self.finish_reason: str | None = None
        self.records: dict[str, Acceptance] = {}  # of each drafter that may propose
        self.decision: Decision | None = None  # the controller's last one
        self.warnings: list[str] = []
        self.failure: Exception | None = None  # its own; then the finish_reason is "error"

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - (len(self.tokens) - len(self.request.prompt))

    def cut(self, emitted: list[Judgement], eos_ids: set[int]) -> int:
        """How many of a cycle's tokens stay: up to an end of text, a stop string or max_tokens.

        The one place that cuts: cache, counters, statistics and stream only see what stays.
        """
        for kept, token in enumerate(emitted, 1):
            if self.text.push(token.id, token.kind) or token.id in eos_ids:
                self.finish_reason = "stop"
            elif kept == self.remaining:
                self.finish_reason = "length"
            if self.finish_reason:
                if self.text.finish():  # the last bytes completed a stop string
                    self.finish_reason = "stop"
                return kept
        return len(emitted)


# ------------------------------------------------------------------------------- engine step


WARM_UP_S = 0.5  # after so much nothing is run a second time


class Engine:
    """Runs cycles over any number of sequences, each with its own drafter and K, or none."""

    def __init__(
        self,
        target: CachedModel,
        loaded: dict[str, Drafter],
        default: str | None = None,
        prefill_chunk: int = Options.prefill_chunk,
        controller: Controller | None = None,
        draft_model: CachedModel | None = None,
    ):
        """Without controller every draft has the length that the request asks for."""
        self.target, self.drafters, self.default_drafter = target, loaded, default
        self.draft_model = draft_model
        self.prefill_chunk, self.controller = prefill_chunk, controller
        ends = [target.model.generation_config.eos_token_id, target.tokenizer.eos_token_id]
        self.eos_ids = {
            i for end in ends if end is not None for i in (end if isinstance(end, list) else [end])
        }
        self.decisions: dict[str, Decision] = {}  # the controller's last one on each drafter
        self._start_counting()

    def _start_counting(self) -> None:
        # Of closed sequences, by drafter and by rule.
        self.totals = {name: Statistics() for name in [*self.drafters, PLAIN]}
        self.by_rule = {rule: Statistics() for rule in ("greedy", "coupled", "rejection")}
        self.recent: deque[tuple[int, int]] = deque(maxlen=200)  # (drafted, accepted) by cycle
        self.num_drafter_failures = 0
        self.num_faults = 0  # forwards that failed and were tried again

    def prepare(self, options: Options) -> None:
        """Find the shapes to run in, in the thread that is going to run them."""
        for model in (self.target, self.draft_model):
            if model is None:
                continue
            with refusal(model):
                # Only the target's bits count: a draft with other bits is a worse draft at most.
                if model is self.target and options.bitwise:
                    model.make_exact(options.max_running * (options.num_speculative_tokens + 1))
                else:
                    model.shapes.min_rows = by_speed(model)[0]
            if model.reference:
                model.reference.check(model)
                model.reference = None
        self.warm_up()

    @property
    def is_exact(self) -> bool:
        """Whether equal logits are equal bits: no output depends on company in the last bit."""
        return bool(self.target.report and self.target.report.is_exact)

    def warm_up(self) -> None:
        """Let the target and each drafter run once before a measurement counts; then forget it.

        First calls are slow: kernels are chosen, buffers allocated. Each drafter is asked for a
        whole draft, so the target runs at 1 and at K + 1 rows. A fault here is one at run time,
        too, and is told there.
        """
        began, controller, self.controller = time.perf_counter(), self.controller, None
        prompt = [i % self.target.vocab_size for i in (1, 2, 3, 1, 2, 3)]
        for _ in range(2):
            for name in [None, *(n for n in self.drafters if n != AutoDrafter.name)]:
                with suppress(Exception):
                    for _, event in self.generate(Request(prompt, 16, name)):
                        if event["step"] == 2:
                            break
            if time.perf_counter() - began > WARM_UP_S:
                break
        self.controller = controller
        self._start_counting()

    def check_prompt(self, prompt: list[int]) -> None:
        """Raises ValueError if the prompt is empty, leaves no room or holds an unknown id."""
        length, context, largest = len(prompt), self.target.max_length, self.target.vocab_size - 1
        if not prompt:
            raise ValueError("the prompt is empty")
        if length >= context:
            raise ValueError(
                f"the prompt's {length} tokens leave no room in a context of {context}"
            )
        if not all(0 <= token <= largest for token in prompt):
            raise ValueError(f"the prompt has a token id outside 0 to {largest}")

    def open(self, request: Request) -> Sequence:
        """Admit a request, max_tokens clamped to the context. Raises ValueError for its prompt."""
        self.check_prompt(request.prompt)
        room = self.target.max_length - len(request.prompt)
        wanted = request.drafter if request.num_speculative_tokens else None
        drafter = self.drafters[wanted] if wanted else None
        admitted = replace(request, max_tokens=min(request.max_tokens, room), drafter=wanted)
        row = self.target.cache.open_row(len(request.prompt))
        sequence = Sequence(admitted, row, self.target.tokenizer)
        if room < request.max_tokens:
            sequence.warnings.append(
                f"max_tokens was lowered from {request.max_tokens} to {room}: the context holds "
                f"{self.target.max_length} tokens"
            )
        if drafter:
            self._open_drafter(sequence, drafter)
        return sequence

    def _open_drafter(self, s: Sequence, drafter: Drafter) -> None:
        try:
            s.state = drafter.open(s.request.prompt, s.request.sampling, s.noise)
            s.drafter = drafter  # from here on there is a state to close
            names = drafter.candidates(s.state)
            if not (names and all(isinstance(name, str) for name in names)):
                raise ValueError(f"its candidates are {names!r:.100}")
            if self.controller:
                of_request = len(s.request.prompt), s.request.sampling.rule
                s.records = {name: self.controller.record(name, *of_request) for name in names}
        except Exception as error:
            self._lose_drafter(s, drafter.name, error)

    def close(self, sequence: Sequence) -> None:
        """Give cache row and drafter state back; every opened sequence comes here once."""
        self.target.cache.close_row(sequence.row)
        self._close_drafter(sequence)
        # A new object each time: /health reads whole sums from another thread.
        name, rule = sequence.request.drafter or PLAIN, sequence.request.sampling.rule
        self.totals[name] = self.totals[name] + sequence.statistics
        self.by_rule[rule] = self.by_rule[rule] + sequence.statistics

    def generate(self, request: Request) -> Iterator[tuple[Sequence, dict[str, Any]]]:
        """Run one request, yielding (sequence, event) cycle by cycle. Leaving early is fine."""
        sequence = self.open(request)
        try:
            while sequence.finish_reason is None:
                if event := self.step([sequence])[0]:
                    yield sequence, event
            if sequence.failure:
                raise sequence.failure
        finally:
            self.close(sequence)

    def step(self, sequences: list[Sequence]) -> list[dict[str, Any] | None]:
        """One cycle: draft, verify all sequences in one target forward, accept, truncate.

        The first cycle of a sequence is its prefill: a long run of tokens to feed, and no draft. Of
        a prompt longer than a chunk each cycle feeds one chunk, and of one prompt at a time, so
        that the others' tokens keep coming; such a sequence gets None. So does one that cannot go
        on, as its logits are not numbers, say: it ends with a `failure`, and the others go on. When
        the forward itself fails, each sequence is verified again by itself.

        Returns an event for each sequence: {step, proposals, accepted_count, emitted_count, tokens,
        rejected, cached, pieces} and what `details` adds. proposals is the draft as it was made;
        the others are what stays of it after a cut. tokens and rejected (None where nothing was)
        are Judgements; cached is how many tokens the KV cache held after the verify and after the
        truncation; pieces is the text that may be shown now, as (text, kind).
        """
        lengths = self.target.cache.lengths
        filling = [s for s in sequences if len(s.tokens) - lengths[s.row] > self.prefill_chunk]
        if filling:
            self._guarded(self._fill, filling[0])
        ready = [s for s in sequences if s not in filling]
        events = dict(zip(map(id, ready), self._cycle(ready), strict=True)) if ready else {}
        return [events.get(id(s)) for s in sequences]

    def _guarded(self, act: Callable[..., Any], s: Sequence, *arguments: Any) -> Any:
        """act(s, …); None for a sequence that has failed. What breaks in there fails s alone."""
        try:
            return None if s.failure else act(s, *arguments)
        except Exception as error:
            s.failure, s.finish_reason = error, "error"
            return None

    def _fill(self, s: Sequence) -> None:
        """Cache the next chunk of a prompt."""
        began = time.perf_counter()
        cached = self.target.cache.lengths[s.row]
        chunk = s.tokens[cached : cached + self.prefill_chunk]
        fed = [s.row], [chunk], [1], s.drafter is not None and s.drafter.needs_hidden
        try:
            output = self.target.forward(*fed)
        except Exception as error:
            self._note_fault(error)
            self.target.cache.truncate(s.row, cached)
            output = self.target.forward(*fed)
        s.hidden += output.hidden or []
        s.statistics.prompt_ms += (time.perf_counter() - began) * 1e3

    def _cycle(self, sequences: list[Sequence]) -> list[dict[str, Any] | None]:
        """One cycle of sequences that all get a token."""
        times = [time.perf_counter()]
        drafts = self._draft(sequences)
        times.append(time.perf_counter())
        cached = [self.target.cache.lengths[s.row] for s in sequences]
        try:
            output = self._forward(sequences, drafts)
        except Exception as error:
            self._note_fault(error)
            return list(map(self._verify_alone, sequences, drafts, cached))
        return self._settle(sequences, drafts, output, times)

    def _note_fault(self, error: Exception) -> None:
        self.num_faults += 1
        LOG.warning("a forward of the target failed and is tried again: %s", in_short(error))

    def _verify_alone(self, s: Sequence, draft: Draft, cached: int) -> dict[str, Any] | None:
        """After a fault that may be a neighbour's, or over; else try to do without the draft."""
        for attempt in (draft, Draft()) if draft.tokens else (draft,):
            self.target.cache.truncate(s.row, cached)
            now = time.perf_counter()
            try:
                output = self._forward([s], [attempt])
            except Exception as error:
                failure = error
            else:
                return self._settle([s], [attempt], output, [now, now])[0]
            if s.drafter:  # which will not be told what became of its draft
                self._go_on_plainly(s, f"a forward failed ({in_short(failure)})")
        s.failure, s.finish_reason = failure, "error"
        return None

    def _forward(self, sequences: list[Sequence], drafts: list[Draft]) -> Output:
        # Every committed token that is not cached (after prefill the pending one), then the draft.
        lengths = self.target.cache.lengths
        return self.target.forward(
            rows=[s.row for s in sequences],
            tokens=[
                s.tokens[lengths[s.row] :] + draft.tokens
                for s, draft in zip(sequences, drafts, strict=True)
            ],
            num_logits=[len(draft.tokens) + 1 for draft in drafts],
            want_hidden=any(s.drafter and s.drafter.needs_hidden for s in sequences),
        )

    def _settle(
        self, sequences: list[Sequence], drafts: list[Draft], output: Output, times: list[float]
    ) -> list[dict[str, Any] | None]:
        """Judge and commit: what fails from here on is a sequence's own affair.

        `times`: when the cycle began, and when it had drafted.
        """
        # As plain decoding would have it behind each of them: penalties grow with the draft.
        scores = [
            penalise(logits, s.request.sampling.repetition_penalty, s.tokens, draft.tokens)
            for s, draft, logits in zip(sequences, drafts, output.logits, strict=True)
        ]
        judged = [
            self._guarded(self._judge, *each)
            for each in zip(sequences, drafts, scores, strict=True)
        ]
        times = [*times, time.perf_counter()]
        is_timed = self.controller and all(s.num_steps for s in sequences)  # prompts cost otherwise
        hidden = output.hidden or [None] * len(sequences)
        events = [
            self._guarded(self._commit, *each)
            for each in zip(sequences, drafts, judged, hidden, strict=True)
        ]
        times.append(time.perf_counter())
        if is_timed:
            fed = [len(draft.tokens) + 1 for draft in drafts]
            before, passed, after = ((end - begin) * 1e3 for begin, end in pairwise(times))
            self.controller.costs.observe_pass(len(fed), sum(fed), passed, before + after, max(fed))
        return [
            self._guarded(self._report, s, event, times, logits, score)
            for s, event, logits, score in zip(
                sequences, events, output.logits, scores, strict=True
            )
        ]

    def _judge(self, s: Sequence, draft: Draft, scores: Tensor) -> list[Judgement]:
        sampling, position = s.request.sampling, len(s.tokens)
        if sampling.is_coupled:
            return verify(draft, own_choices(scores, sampling, s.noise, position))
        return verify_by_rejection(draft, probabilities(scores, sampling), s.noise, position)

    def _report(
        self, s: Sequence, event: dict[str, Any], times: list[float], logits: Tensor, scores: Tensor
    ) -> dict[str, Any]:
        """The event with what was asked for, once the cycle's times are known."""
        s.statistics.record_times(times, is_prefill=s.num_steps == 1)
        event |= details(s, event, logits, scores)
        if s.request.trace:
            spans = [(end - begin) * 1e3 for begin, end in pairwise(times)]
            event["ms"] = dict(zip(("draft", "verify", "other"), spans, strict=True))
        return event

    def _draft(self, sequences: list[Sequence]) -> list[Draft]:
        """A draft for each; empty for prefill, for the last token and where there is no drafter."""
        drafts = {id(s): Draft() for s in sequences}
        able = [s for s in sequences if s.drafter and s.num_steps and s.remaining > 1]
        groups: dict[tuple[Drafter, str], list[tuple[Sequence, int]]] = {}
        for s, (name, limit) in zip(able, self._decide(able, len(sequences)), strict=True):
            if limit and s.drafter:
                groups.setdefault((s.drafter, name), []).append((s, limit))
        for (drafter, name), group in groups.items():
            began = time.perf_counter()
            for s, draft in self._propose(drafter, group):
                drafts[id(s)] = draft
            if self.controller:
                unread = sum(s.records[name].unread for s, _ in group)
                spent_ms = (time.perf_counter() - began) * 1e3
                limits = [limit for _, limit in group]
                self.controller.costs.observe_draft(name, limits, unread, spent_ms)
        return [drafts[id(s)] for s in sequences]

    def _decide(self, sequences: list[Sequence], batch: int) -> list[tuple[str, int]]:
        """Who drafts for each, and how much; without controller as much as was asked for."""
        limits = [min(s.request.num_speculative_tokens, s.remaining - 1) for s in sequences]
        if not self.controller:
            return [(s.drafter.name, limit) for s, limit in zip(sequences, limits, strict=True)]
        seats = [
            Seat(self._candidates(s), limit, s.remaining)
            for s, limit in zip(sequences, limits, strict=True)
        ]
        decisions = self.controller.plan(seats, batch)
        for s, decision in zip(sequences, decisions, strict=True):
            s.decision = self.decisions[decision.drafter] = decision
            try:
                s.drafter.select(s.state, decision.drafter)
            except Exception as error:
                self._lose_drafter(s, decision.drafter, error)
        return [(decision.drafter, decision.num_tokens) for decision in decisions]

    def _candidates(self, s: Sequence) -> dict[str, Acceptance]:
        """The records of whom to choose from: not of one that is known to have no proposal now."""
        try:
            able = {n: r for n, r in s.records.items() if self._guess(s, n, 1) != []}
        except Exception:  # it will be asked again once the tokens are known, and lost then
            able = {}
        return able or s.records

    def _guess(self, s: Sequence, name: str, max_tokens: int) -> list[int] | None:
        guess = s.drafter.guess(s.state, name, max_tokens)
        if guess is not None:
            self._check_tokens(guess)
        return guess

    def _propose(
        self, drafter: Drafter, group: list[tuple[Sequence, int]]
    ) -> list[tuple[Sequence, Draft]]:
        """A batch of drafts that can be verified; who gets none of them loses its drafter."""
        try:
            proposed = list(
                drafter.propose_batch([s.state for s, _ in group], [limit for _, limit in group])
            )
            if len(proposed) != len(group):
                raise ValueError(f"{len(proposed)} drafts for {len(group)} requests")
        except Exception as error:
            if len(group) > 1:  # one of them is to blame, and the others need not suffer for it
                return [pair for one in group for pair in self._propose(drafter, [one])]
            self._lose_drafter(group[0][0], drafter.name, error)
            return []
        sound = []
        for (s, limit), draft in zip(group, proposed, strict=True):
            try:
                self._check_draft(draft, limit, s.request.sampling)
                sound.append((s, draft))
            except Exception as error:
                self._lose_drafter(s, drafter.name, error)
        return sound

    def _check_draft(self, draft: Draft, limit: int, sampling: Sampling) -> None:
        self._check_tokens(draft.tokens)
        if len(draft.tokens) > limit:
            raise ValueError(f"{len(draft.tokens)} tokens proposed, {limit} asked for")
        if draft.tokens and draft.probs is not None and not sampling.is_coupled:
            if draft.probs.shape != (len(draft.tokens), self.target.vocab_size):
                raise ValueError(
                    f"probs of shape {list(draft.probs.shape)} for {len(draft.tokens)} tokens"
                )
            drawn = draft.probs[range(len(draft.tokens)), draft.tokens]
            off = (draft.probs.sum(-1) - 1).abs().max()
            if not (draft.probs.min() >= 0 and drawn.min() > 0 and off < 1e-3):  # nor with NaN
                raise ValueError("probs are no distributions that the tokens can be drawn from")

    def _check_tokens(self, tokens: Any) -> None:
        if not isinstance(tokens, list):
            raise TypeError(f"proposed a {type(tokens).__name__}, not a list of tokens")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.target.vocab_size:
                raise ValueError(
                    f"proposed {token!r:.100}, which is no id below {self.target.vocab_size}"
                )

    def _commit(
        self, s: Sequence, draft: Draft, judged: list[Judgement], hidden: Tensor | None
    ) -> dict[str, Any]:
        """Cut once, truncate the cache, count, and let the drafter observe."""
        emitted = [j for j in judged if j.kind != "rejected"]
        tokens, accepted = [j.id for j in emitted], len(emitted) - 1
        kept = s.cut(emitted, self.eos_ids)
        s.tokens += tokens[:kept]
        verified = self.target.cache.lengths[s.row]
        self.target.cache.truncate(s.row, len(s.tokens) - 1)
        # A cut among the accepted drafts shortens the draft as well: the rest was not judged.
        is_whole = kept == len(tokens)
        num_judged = len(draft.tokens) if is_whole else kept
        s.statistics.record(num_judged, [j.kind for j in emitted[:kept]])
        self._record(s, num_judged, min(accepted, kept), tokens[:kept])
        if num_judged:
            self.recent.append((num_judged, min(accepted, kept)))
        rejected = [j.as_dict() for j in judged if j.kind == "rejected" and is_whole]
        event = {
            "step": s.num_steps,
            "proposals": draft.tokens,
            "accepted_count": min(accepted, kept),
            "emitted_count": kept,
            "tokens": [j.as_dict() for j in emitted[:kept]],
            "rejected": rejected[0] if rejected else None,
            "cached": [verified, len(s.tokens) - 1],
            "pieces": s.text.release(final=s.finish_reason is not None),
        }
        s.num_steps += 1
        if s.drafter and s.finish_reason is None:
            cached = None
            if hidden is not None and s.drafter.needs_hidden:
                cached = hidden[: len(hidden) - len(draft.tokens) + accepted]
                cached, s.hidden = torch.cat([*s.hidden, cached]), []
            try:
                s.drafter.observe(s.state, Verdict(len(draft.tokens), accepted, tokens, cached))
            except Exception as error:
                self._lose_drafter(s, s.drafter.name, error)
        return event

    def _record(self, s: Sequence, drafted: int, accepted: int, tokens: list[int]) -> None:
        """What this cycle says of each drafter that s may choose from.

        Of those that did not draft: of what they would have drafted, how much came true.
        """
        for name, record in s.records.items() if s.drafter and self.controller else ():
            if s.decision and name == s.decision.drafter and s.decision.num_tokens:
                record.observe(drafted, accepted, s.decision.num_tokens)
                record.unread = 0
                continue
            try:
                guess = self._guess(s, name, len(tokens))
            except Exception as error:
                return self._lose_drafter(s, name, error)
            record.unread += len(tokens)
            if guess is None:
                record.observe(0, 0)
            else:
                record.observe(len(guess), len(os.path.commonprefix([guess, tokens])), len(tokens))

    def _lose_drafter(self, s: Sequence, name: str, error: Exception) -> None:
        self.num_drafter_failures += 1
        self._go_on_plainly(s, f"drafter {name} failed ({in_short(error)})")

    def _go_on_plainly(self, s: Sequence, why: str) -> None:
        """A fault costs the request the speculation, never the answer; its warnings say so."""
        s.decision = None
        s.warnings.append(f"{why}: went on without speculation")
        self._close_drafter(s)

    def _close_drafter(self, s: Sequence) -> None:
        drafter, s.drafter = s.drafter, None
        try:
            if drafter:
                drafter.close(s.state)
        except Exception as error:
            s.warnings.append(f"drafter {drafter.name} failed to close: {in_short(error)}")


def details(s: Sequence, event: dict[str, Any], logits: Tensor, scores: Tensor) -> dict[str, Any]:
    """What a request asked to know about the tokens of an event, as more parts of it.

    From logits and scores (penalised logits), [n + 1, V] both: `logprobs` of each new token; for a
    trace `target_argmax` [n + 1], `target_top`, the tokens that led where each new one was chosen,
    and `texts` of all ids in the event (a part of a character as "�").
    """
    asked: dict[str, Any] = {}
    num_new = event["emitted_count"]
    if s.request.logprobs is not None:
        new = s.tokens[len(s.tokens) - num_new :]
        asked["logprobs"] = token_logprobs(logits, new, s.request.logprobs, s.tokenizer)
        s.logprobs += asked["logprobs"]
    if s.request.trace and s.decision:
        asked["controller"] = str(s.decision)
    if s.request.trace:
        asked["target_argmax"] = scores.argmax(-1).tolist()
        asked["target_top"] = leaders(s, event, scores[:num_new])
        ids = {*event["proposals"], *asked["target_argmax"]}
        ids |= {token["id"] for token in chain(event["tokens"], *asked["target_top"])}
        asked["texts"] = {i: s.tokenizer.decode([i]) for i in sorted(ids)}
    return asked


def leaders(s: Sequence, event: dict[str, Any], scores: Tensor) -> list[list[dict[str, Any]]]:
    """The first five tokens of each row of scores [n, V], as {id, score}.

    Of a coupled request the choice is the first of them. It goes by the total of score and noise,
    which its entries have, too; and so do the event's judged tokens, which are changed here. The
    score of a sampled token is the logarithm of p, that of a greedy one the logit.
    """
    sampling, totals = s.request.sampling, scores
    if sampling.is_coupled and not sampling.is_greedy:
        scores = probabilities(scores, sampling).double().log()
        begin, ids = len(s.tokens) - len(scores), np.arange(scores.shape[-1])
        races = [s.noise.exponentials(begin + i, ids) for i in range(len(scores))]
        totals = scores.cpu() - torch.tensor(np.stack(races)).log()

    def entry(row: int, token: int) -> dict[str, Any]:
        found = {"id": token, "score": finite(scores[row, token])}
        return found | ({"total": finite(totals[row, token])} if sampling.is_coupled else {})

    if sampling.is_coupled:
        rejected = [event["rejected"]] if event["rejected"] else []  # judged where the last was
        for row, token in [*enumerate(event["tokens"]), *((len(scores) - 1, r) for r in rejected)]:
            token |= entry(row, token["id"])
    top, result = totals.topk(min(5, scores.shape[-1])), []
    for row, (ids, values) in enumerate(
        zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ):
        able = [i for i, value in zip(ids, values, strict=True) if value > -inf]
        if sampling.is_coupled:  # of equal ones the chosen one comes first
            able.sort(key=lambda i: i != event["tokens"][row]["id"])
        result.append([entry(row, i) for i in able])
    return result


def finite(value: Tensor) -> float | None:
    """A number for JSON, which has no infinity: what is impossible has none."""
    return float(value) if value.isfinite() else None


# ---------------------------------------------------------------------------- plain decoding


def plain_decode(
    target: CachedModel,
    prompt: list[int],
    max_tokens: int,
    eos_ids: set[int],
    sampling: Sampling = Request.sampling,
    seed: int = 0,
) -> list[int]:
    """The target alone, one token a pass: what speculation must reproduce, and its baseline."""
    max_tokens = min(max_tokens, target.max_length - len(prompt))
    noise = Noise(seed)
    row, fed, tokens = target.cache.open_row(len(prompt)), prompt, []
    try:
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in eos_ids):
            logits = target.forward([row], [fed], [1]).logits[0]
            tokens.append(sample(logits[0], prompt + tokens, sampling, noise)[0])
            fed = tokens[-1:]
        return tokens
    finally:
        target.cache.close_row(row)


# ----------------------------------------------------------------------------------- loading

DEFAULT_DRAFTERS = ("mtp", "ngram")
NUM_RUNS = 3  # of what is compared; figures are medians


def load_model(name: str, options: Options) -> CachedModel:
    """A folder or a hub id with a KV cache. Raises StartError if missing, broken or unsuited."""
    found = load_pretrained(name, options)
    return CachedModel(
        found.model, found.tokenizer, name, options.max_running, found.length, found.structure
    )


def load_drafters(options: Options, context: Context) -> tuple[dict[str, Drafter], str]:
    """Every drafter that fits, by name, and the default's name: auto where there is a choice.

    Raises StartError if one that was asked for does not fit.
    """
    loaded: dict[str, Drafter] = {}
    wanted = options.drafter if options.drafter != AutoDrafter.name else None
    default, asked = wanted, {wanted, "ngram", "draft_model" if options.draft_model else None}
    for name in dict.fromkeys([wanted, *drafters.NAMES] if wanted else drafters.NAMES):
        try:
            drafter = drafters.load(name, context)
        except ValueError as error:
            if name in asked:
                raise StartError(str(error)) from error
            continue  # this target has no MTP head, say
        if drafter.name in (*loaded, PLAIN, AutoDrafter.name):
            raise StartError(f"{name}: the name {drafter.name!r} is taken, give it another")
        loaded[drafter.name] = drafter
        if name == wanted:
            default = drafter.name
    first = default or next(n for n in DEFAULT_DRAFTERS if n in loaded)
    loaded[AutoDrafter.name] = AutoDrafter({first: loaded[first]} | loaded)
    can_choose = wanted is None and len(loaded) > 2 and not options.fixed_k
    is_auto = options.drafter == AutoDrafter.name or can_choose
    return loaded, AutoDrafter.name if is_auto else first


def assemble_engine(options: Options) -> Engine:
    """Load the target and every drafter that fits. Raises StartError if one asked for does not."""
    target = load_model(options.model, options)
    draft_name = options.draft_model
    if draft_name is None and options.is_embedded:
        draft_name = str(ROOT / "demo_models" / "draft")
    draft = load_model(draft_name, options) if draft_name else None
    models = [model for model in (target, draft) if model]
    for model in models:
        model.reference = Reference.of(model)  # before packing takes the weights
    context = Context(
        target,
        sample,
        draft,
        options.max_running,
        options.prompt_lookup_max,
        options.prompt_lookup_min,
        options.fastpath,
        options.drafter_timeout,
    )
    loaded, default = load_drafters(options, context)
    for model in models:
        follow_masks(model.model, model.cache.capacity)
        with refusal(model):
            if options.fastpath:
                model.speed_up()
    controller = None
    if not options.fixed_k:
        sizes = {name: drafter.num_step_weights for name, drafter in loaded.items()}
        controller = Controller(target.num_weights, sizes)
    return Engine(target, loaded, default, options.prefill_chunk, controller, draft)


def load_engine(options: Options) -> Engine:
    """An engine that is ready to run in this thread. Raises StartError if it cannot be had."""
    engine = assemble_engine(options)
    engine.prepare(options)
    return engine


# --------------------------------------------------------------------------------- Flask app


def create_app(
    engine: Engine,
    options: Options,
    worker: Worker | None = None,
    prepare: Callable[[], None] | None = None,
) -> Flask:
    """The web application: POST /generate, GET /health and /metrics, /v1, and the page at /.

    `prepare` makes the engine ready, in the thread that will run it.
    """
    app, started = Flask(__name__), time.monotonic()
    app.config["MAX_CONTENT_LENGTH"] = 1 << 20
    app.json.sort_keys = False
    app.url_map.merge_slashes = False  # //generate is not found: a redirect would be HTML
    name_requests(app, options.log_prompts)
    register_errors(app)
    register_page(app, read_prompts())
    guard(app, options.api_key, options.allow_origin)
    worker = worker or Worker(engine, options, prepare)
    app.extensions["worker"] = worker

    def begin(body: dict[str, Any]) -> tuple[list[Job], bool, list[str]]:
        """Parse and queue a request: its jobs, whether to stream, and warnings."""
        wanted, stream, compare, notes = parse_request(body, engine, options)
        # In turn, as a machine that is busy for a while should not count against one of them.
        again = [replace(wanted, trace=False), replace(wanted, drafter=None, trace=False)]
        first = [wanted, replace(wanted, drafter=None, trace=True)]
        g.jobs = worker.submit(*(first + again * (NUM_RUNS - 1) if compare else [wanted]))
        return g.jobs, stream, notes

    @app.post("/generate")
    def generate() -> Response | dict[str, Any]:
        """Answer when all is done, or stream it."""
        jobs, stream, notes = begin(read_body())
        dtype = engine.target.model.dtype
        if stream:
            return Response(stream_answer(jobs, notes, dtype), mimetype="text/event-stream")
        # 499: the client has left, and nobody reads it.
        return answer(jobs, notes, dtype) if finish(jobs) else Response(status=499)

    @app.get("/health")
    def get_health() -> tuple[dict[str, Any], int]:
        body = health(engine, worker, options.num_speculative_tokens, time.monotonic() - started)
        return body, 200 if body["status"] == "ok" else 503

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(metrics(engine, worker), content_type=CONTENT_TYPE)

    register_openai(app, engine, begin)
    return app


def load_app(options: Options) -> Flask:
    """The application with an engine that its worker's thread has made ready."""
    engine = assemble_engine(options)
    return create_app(engine, options, prepare=lambda: engine.prepare(options))


def parse_request(
    body: dict[str, Any], engine: Engine, options: Options
) -> tuple[Request, bool, bool, list[str]]:
    """A request's fields, defaults filled in: (request, stream, compare, warnings).

    Raises RequestError, naming the field that is wrong.
    """
    defaults = {name: getattr(options, name) for name in (*SAMPLING_FIELDS, "max_tokens")}
    defaults |= {
        "num_speculative_tokens": options.num_speculative_tokens,
        "drafter": engine.default_drafter,
    }
    target = engine.target
    given, notes = parse_fields(
        body, target.tokenizer, engine.drafters, defaults, target.name, target.max_length
    )
    try:
        engine.check_prompt(given["prompt"])
    except ValueError as error:
        raise RequestError(str(error), param="prompt") from error
    stream, compare = given.pop("stream"), given.pop("compare")
    sampling = Sampling(**{field.name: given.pop(field.name) for field in fields(Sampling)})
    return Request(**given, sampling=sampling), stream, compare, notes


# -------------------------------------------------------------------------------------- demo


def show_prompt(engine: Engine, wanted: Request, num_explained: int = 0) -> None:
    """One generation, streamed to the terminal with the origin of each token, then its figures.

    Of the first `num_explained` cycles, prefill included, every step is shown before the text.
    """
    for _, event in engine.generate(replace(wanted, trace=True)) if num_explained else ():
        print(terminal.explain(event), end="\n\n")
        if event["step"] == num_explained - 1:
            break
    colour = terminal.has_colour()
    print(terminal.legend(colour), end="\n\n")
    print(engine.target.tokenizer.decode(wanted.prompt), end="", flush=True)
    for sequence, event in engine.generate(wanted):
        print(terminal.mark(event["pieces"], colour), end="", flush=True)
        finished = sequence
    terminal.print_figures(finished.finish_reason, finished.statistics)
    if finished.decision:
        print(f"controller, last: {finished.decision}")
    if not wanted.sampling.is_greedy:
        print(f"seed {wanted.seed}")
    for warning in finished.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def read_prompts() -> dict[str, str]:
    """The demo prompts by name; a file's last line break is not part of its prompt."""
    files = sorted((ROOT / "demo_prompts").glob("*.txt"))
    return {path.stem: path.read_text("utf-8").removesuffix("\n") for path in files}


def compare(engine: Engine, prompt: list[int], options: Options, repeats: int) -> dict[str, Any]:
    """One prompt by standard decoding and by each drafter, in turn; times are medians.

    Under the rule of rejection sampled outputs are draws of their own, and not compared (identical:
    None).
    """
    sampling, seed = options.sampling, options.seed or 0
    times: dict[str, list[float]] = {name: [] for name in [PLAIN, *engine.drafters]}
    identical = dict.fromkeys(engine.drafters, True if sampling.is_coupled else None)
    runs: dict[str, list[Sequence]] = {name: [] for name in engine.drafters}
    for _ in range(repeats):
        for name, measured in times.items():
            began = time.perf_counter()
            if name == PLAIN:
                ids = plain_decode(
                    engine.target, prompt, options.max_tokens, engine.eos_ids, sampling, seed
                )
            else:
                k = options.num_speculative_tokens
                wanted = Request(prompt, options.max_tokens, name, k, sampling=sampling, seed=seed)
                *_, (sequence, _) = engine.generate(wanted)
                runs[name].append(sequence)
                if sampling.is_coupled:
                    identical[name] &= sequence.output == ids
            measured.append((time.perf_counter() - began) * 1e3)
    text, passes = engine.target.tokenizer.decode(ids, skip_special_tokens=True), len(ids) - 1
    standard = {"target_passes": passes, "tokens_per_pass": ratio(len(ids) - 1, passes)}
    standard |= timed(times[PLAIN]) | {"token_ids": ids, "text": text}
    return {
        "standard": standard,
        "speculative": {
            name: demo_run(sequences, times[name], standard) | {"identical": identical[name]}
            for name, sequences in runs.items()
        },
    }


def worked_cycle(
    engine: Engine, prompts: dict[str, list[int]], options: Options
) -> dict[str, Any] | None:
    """The first cycle of the default drafter in which one draft is kept and another refused."""
    k = options.num_speculative_tokens
    for name, prompt in prompts.items():
        wanted = Request(
            prompt, options.max_tokens, engine.default_drafter, k, sampling=options.sampling,
            seed=options.seed or 0, trace=True,
        )  # fmt: skip
        for _, event in engine.generate(wanted):
            if event["accepted_count"] and event["rejected"]:
                return {"name": name, "event": event}
    return None


def run_demo(engine: Engine, options: Options) -> dict[str, Any]:
    """Every demo prompt by every method; returns the document that --demo --json prints."""
    encode = engine.target.tokenizer
    prompts = {name: (text, encode(text)["input_ids"]) for name, text in read_prompts().items()}
    compare(engine, encode("warm up")["input_ids"], replace(options, max_tokens=8), repeats=1)
    results = [
        {"name": name, "prompt": text} | compare(engine, ids, options, repeats=3)
        for name, (text, ids) in tqdm(prompts.items(), desc="demo prompts")
    ]
    return {
        "prompts": results,
        "worked_cycle": worked_cycle(engine, {n: ids for n, (_, ids) in prompts.items()}, options),
        "totals": demo_totals(results, options.sampling.is_coupled),
        "device": str(engine.target.model.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


# ------------------------------------------------------------------------------ command line


def prompt_request(engine: Engine, given: argparse.Namespace, options: Options) -> Request:
    """The request that --prompt and its companions make. Raises what a server would refuse."""
    return parse_request({"prompt": given.prompt, "stop": given.stop}, engine, options)[0]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if outputs differed, 2 if it could not be carried out."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without "·" gets "?" and its text
    given, options = parse_arguments(__doc__.splitlines()[0], arguments)
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    status = 0
    try:
        if given.port:
            return serve(lambda: load_app(options), given.host, given.port, options)
        engine = load_engine(options)
        if given.prompt is not None:
            show_prompt(engine, prompt_request(engine, given, options), given.explain)
        else:
            document = run_demo(engine, options)
            if given.json:
                for run in (r for p in document["prompts"] for r in p["speculative"].values()):
                    del run["pieces"]
                print(json.dumps(document))
            else:
                terminal.print_demo(document, engine.default_drafter, terminal.has_colour())
            status = int(any(t["identical"] is False for t in document["totals"].values()))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough (| head); nor can the rest be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except (StartError, RequestError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
