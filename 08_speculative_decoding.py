"""Speculative decoding in one file: a cheap drafter proposes, the target verifies, nothing is lost.

A language model reads all its weights to produce one token. Verifying four tokens reads them once,
too. So guess, then check; one cycle is draft → verify → accept → truncate:

    cached  │ pending  draft
    The cat │ sat      on     a      mat      one target forward over [pending, d1, d2, d3]
            │  ↓       ↓      ↓      ↓
            │  on ✓    the ✗  …      …        the target's own choice after each of them
            │
    The cat   sat      on │ the               d1 accepted, d2 rejected, "the" recovered;
                          │  └ pending        the KV cache is truncated to "The cat sat on", in O(1)

One pass gave two tokens, and the text is the one that the target alone would have written. Where
tokens are sampled, the target chooses with noise that belongs to the seed and the position. So its
choice is the same with a draft and without.

Read on in this order: KV cache and truncation · cached model · probabilities · verify · sequence ·
engine · plain decoding · loading · Flask app · command line. The drafters live in drafters/. What
decides who drafts and how much lives in control/, and what only a server needs in serving/. The
same numbers come sooner with fastpath/.

    python 08_speculative_decoding.py --demo
    python 08_speculative_decoding.py --prompt "def fib(n):" --drafter ngram
    python 08_speculative_decoding.py --port 5000

Sources: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; Daliri et al., arXiv
2408.07978; transformers' cache interface. Not covered yet: hybrid (recurrent) targets.
"""

import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Indexes
from dataclasses import dataclass, replace
from math import inf, isfinite, nextafter
from typing import Any

import torch
from flask import Flask, Response, g
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import demo
import drafters
from control.controller import Controller
from control.planner import FixedK, Planner, Wish
from control.statistics import Statistics, Totals
from drafters import Context, Drafter, Noise
from drafters.noise import ACCEPT, DRAW, NO_NUMBERS, RECOVER
from drafters.panel import Panel, Seat
from fastpath.exact import KEY_BLOCK, Report, Shapes, calibrate
from fastpath.forward import lazy_zeros, speed_up
from fastpath.sampling import survivors, truncated_softmax
from messages import Cycle, Draft, Judgement, Output, Request, Sampling
from serving import answers, faults, http
from serving.comparison import runs_to_compare
from serving.gpt_neo import follow_masks
from serving.loading import StartError, ends_of, load_pretrained
from serving.metrics import CONTENT_TYPE, metrics
from serving.openai import register_openai
from serving.options import ROOT, Options, parse_arguments
from serving.parsing import check_prompt, parse_request
from serving.reference import Reference, refusal
from serving.structure import Structure
from serving.text import TextStream
from serving.worker import Job, Worker, warm_up

# ------------------------------------------------------------------- KV cache and truncation


@dataclass(frozen=True, slots=True)
class Place:
    """Where a forward's tokens [B, T] go: counts[b] of them to slots[b] of the cache.

    Texts with fewer than T tokens are padded on the left. Pads are never written to the cache.
    """

    slots: list[int]
    counts: list[int]
    positions: Tensor  # [B, T], of the queries
    real: Tensor  # [B, T] bool: False on pads
    targets: tuple[Tensor, Tensor] | None  # (slot, position) of every token, where B > 1
    end: int  # one more than the last position of all rows
    kv_length: int  # keys that are attended to, unseen ones included

    def arrange(self, rows: list[Tensor]) -> Tensor:
        """Ids [t] of each text -> [B, T], or states [t, D] -> [B, T, D]."""
        missing = [self.positions.shape[1] - len(row) for row in rows]
        pads = [row.new_zeros(n, *row.shape[1:]) for n, row in zip(missing, rows, strict=True)]
        return torch.stack(list(map(torch.cat, zip(pads, rows, strict=True))))

    def part(self, result: Tensor) -> list[Tensor]:
        """A forward's result [B, T, D] -> [t, D] of each text."""
        return [row[len(row) - n :] for row, n in zip(result, self.counts, strict=True)]

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Additive mask [B, 1, T, kv_length]: a token sees its past and itself, or a `window`."""
        keys = torch.arange(self.kv_length, device=self.positions.device)
        queries = self.positions[:, None, :, None]
        unseen = keys > queries
        if window is not None:
            unseen |= keys <= queries - window
        # Floats and not bools: transformers' eager attention adds the mask to the scores.
        mask = torch.zeros(unseen.shape, dtype=dtype, device=keys.device)
        return mask.masked_fill_(unseen, torch.finfo(dtype).min)

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write keys or values [B, H, T, width], and return all that the texts have by now."""
        if self.targets:
            slots, positions = self.targets
            buffer[slots, :, positions] = new.transpose(1, 2)[self.real]
        else:
            count = self.counts[0]
            new = new.narrow(2, new.shape[2] - count, count)
            buffer.narrow(0, self.slots[0], 1).narrow(2, self.end - count, count).copy_(new)
        return self.view(buffer)

    def view(self, buffer: Tensor) -> Tensor:
        """The texts' rows [B, H, kv_length, width] of a buffer; a copy only if they lie apart."""
        first, last = self.slots[0], self.slots[-1]
        is_compact = self.slots == list(range(first, last + 1))
        return buffer[slice(first, last + 1) if is_compact else self.slots, :, : self.kv_length]


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, preallocated [rows, heads, capacity, width]."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Sizes come from the states: the config knows nothing of sharded heads or of MLA's widths.
        # Zeros, not empty: a masked slot still enters 0 · value, and 0 · NaN would be NaN.
        rows, capacity = self._cache.num_rows, self._cache.capacity
        self.keys, self.values = (
            lazy_zeros(states, rows, states.shape[1], capacity, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write [B, H, T, width] at the current place; returns all keys and values up to there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self._cache.current
        return place.write(self.keys, key_states), place.write(self.values, value_states)

    def get_seq_length(self) -> int:
        return self._cache.current.end - max(self._cache.current.counts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.current.kv_length, 0

    def get_max_length(self) -> int:
        return self._cache.max_length


class SlotCache(Cache):
    """A KV cache whose rows have lengths of their own; truncating a row lowers its length.

    One forward is: `place` its tokens, run the model with this cache, `advance`. Open rows lie in
    the first slots of the buffers, so that a batch of them is a view: when a row is closed, the row
    in the last slot moves into its place.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int, device: Any) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.num_rows, self.max_length, self.device = num_rows, max_length, device
        self.capacity = -(-max_length // KEY_BLOCK) * KEY_BLOCK  # whole blocks may be attended to
        self.lengths = [0] * num_rows
        self.prompt_lengths = [0] * num_rows  # a prompt may be read in blocks (see fastpath/exact)
        self.current: Place  # of the forward under way
        self._free = list(range(num_rows))[::-1]
        self._rows: list[int] = []  # the open ones, by slot
        self._written = [0] * num_rows  # how far each slot was, since it was empty

    def slot(self, row: int) -> int:
        """Where an open row lies in the buffers."""
        return self._rows.index(row)

    def open_row(self, prompt_length: int = 0) -> int:
        """An empty row for a new request. Raises ValueError when all are taken."""
        if not self._free:
            raise ValueError(f"all {self.num_rows} rows of the KV cache are in use")
        row = self._free.pop()
        self._rows.append(row)
        self.prompt_lengths[row] = prompt_length
        return row

    @torch.inference_mode()
    def close_row(self, row: int) -> None:
        """Give the row back; costs a copy of the row in the last slot, if that is another."""
        assert row not in self._free, f"row {row} closed twice"
        slot, last = self.slot(row), self._rows.pop()
        self._clean(slot)
        if last != row:
            source, length = len(self._rows), self.lengths[last]
            for buffer in self._buffers():
                buffer[slot, :, :length] = buffer[source, :, :length]
            self._rows[slot], self._written[slot] = last, length
            self._clean(source)
        self.lengths[row] = 0
        self._free.append(row)

    def _buffers(self) -> list[Tensor]:
        """Keys and values of each layer; some layers share another's and have none."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        return [buffer for layer in layers for buffer in (layer.keys, layer.values)]

    def _clean(self, slot: int) -> None:
        """Zero the slot if a NaN is in it: one that stays spoils attention even where masked.

        What breaks a model shows in its last layer.
        """
        written, self._written[slot] = self._written[slot], 0
        buffers = self._buffers()
        if written and not all(b[slot, :, :written].isfinite().all() for b in buffers[-2:]):
            for buffer in buffers:
                buffer[slot] = 0

    def place(
        self, rows: list[int], counts: list[int], width: int = 0, kv_length: int = 0
    ) -> Place:
        """Make room for counts[b] >= 1 tokens behind what rows[b] holds.

        The forward has `width` tokens per text, or as many as the longest needs, and attends to
        `kv_length` keys, or as many as there are. Raises ValueError if a row would outgrow
        `max_length`.
        """
        ends = [self.lengths[row] + count for row, count in zip(rows, counts, strict=True)]
        end, width = max(ends), max(width, *counts)
        if end > self.max_length:
            raise ValueError(f"{end} tokens do not fit a KV cache of {self.max_length}")
        slots = [self.slot(row) for row in rows]
        for slot, last in zip(slots, ends, strict=True):  # also where the forward then fails
            self._written[slot] = max(self._written[slot], last)
        given = torch.tensor([ends, counts, slots], device=self.device)
        end_of, count_of, slot_of = given[..., None]
        behind = torch.arange(-width, 0, device=self.device)  # -1 is a text's last token
        positions, real = (end_of + behind).clamp_(min=0), behind >= -count_of  # [B, T]
        targets = (slot_of.expand_as(real)[real], positions[real]) if len(rows) > 1 else None
        self.current = Place(slots, counts, positions, real, targets, end, kv_length or end)
        return self.current

    def advance(self, place: Place) -> None:
        """The placed tokens are cached now."""
        for slot, count in zip(place.slots, place.counts, strict=True):
            self.lengths[self._rows[slot]] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget row's tokens from `length` on. O(1): stale slots are masked, then overwritten.

        Raises ValueError unless 0 <= length <= lengths[row].
        """
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot truncate {self.lengths[row]} cached tokens to {length}")
        self.lengths[row] = length

    @torch.inference_mode()
    def keep(self, row: int, num_drafted: int, accepted: Indexes[int]) -> None:
        """Of the last `num_drafted` tokens keep those at the indexes `accepted`, which rise.

        Those of a chain are 0, 1, …, and nothing moves. Those of a branch move together.
        Example: 9 cached after [pending, d1, d2, d3], and d1 accepted: keep(row, 3, [0]) -> 7.
        """
        begin, count = self.lengths[row] - num_drafted, len(accepted)
        if list(accepted) != list(range(count)):
            slot, moved = self.slot(row), torch.tensor(accepted, device=self.device) + begin
            for buffer in self._buffers():
                buffer[slot, :, begin : begin + count] = buffer[slot, :, moved]
        self.truncate(row, begin + count)


# ------------------------------------------------------------------------------ cached model


class CachedModel:
    """A causal language model with a SlotCache: the target, and a draft model alike."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        num_rows: int,
        max_length: int,
        found: Structure,
    ) -> None:
        self.model, self.tokenizer, self.name, self.max_length = model, tokenizer, name, max_length
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.num_weights = sum(weight.numel() for weight in model.parameters())
        self.windows = found.windows  # by kind of layer, how far back it sees
        self.cache = self.new_cache(found.num_cache_layers, num_rows)
        self.shapes = Shapes()  # of forwards; the fast path keeps to them
        self.fast: Any = None  # the fast path, which then stands in for `forward`
        self.report: Report | None = None  # on shapes that give equal bits
        self.reference: Reference | None = None  # what transformers' own modules gave

    def new_cache(self, num_layers: int, num_rows: int) -> SlotCache:
        """An empty cache as long as this model's own, for a head that runs beside it."""
        return SlotCache(num_layers, num_rows, self.max_length, self.model.device)

    @torch.inference_mode()
    def forward(
        self,
        rows: list[int],
        tokens: list[list[int]],
        num_logits: list[int],
        layers: tuple[int, ...] = (),
    ) -> Output:
        """Feed tokens[b] behind what cache row rows[b] holds.

        Prefill (a long run of tokens), decoding (one) and verifying (n + 1) differ only in what is
        fed. Returns the logits of each text's last num_logits[b] >= 1 tokens, and the hidden states
        behind `layers`. Raises ValueError if a row outgrows the cache.

        This is the plain way: one forward, padded. fastpath/forward.py gives the same sooner.
        """
        place = self.cache.place(rows, [len(fed) for fed in tokens])
        ids = place.arrange([torch.tensor(fed, device=place.positions.device) for fed in tokens])
        scores, states = self.run(ids, place, max(num_logits), layers)
        self.cache.advance(place)
        logits = [row[-n:].float() for row, n in zip(scores, num_logits, strict=True)]
        return Output(logits, {layer: place.part(hidden) for layer, hidden in states.items()})

    def run(
        self, ids: Tensor, place: Place, logits_to_keep: Tensor | int, layers: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The forward of transformers' own modules: logits and hidden states, arranged as ids."""
        only_last = set(layers) <= {-1}  # transformers then keeps no other
        result = self.model(
            input_ids=ids,
            attention_mask=self._mask(place),
            position_ids=place.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=(-1 if only_last else True) if layers else False,
        )
        # transformers lists the embeddings first, then each block's result, the last one normed.
        return result.logits, {i: result.hidden_states[i if i < 0 else i + 1] for i in layers}

    def _mask(self, place: Place) -> Tensor | dict[str, Tensor]:
        """The window is in the mask; a family with layers of two kinds takes one mask per kind."""
        masks = {window: place.mask(self.model.dtype, window) for window in self.windows.values()}
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {kind: masks[window] for kind, window in self.windows.items()}


# ----------------------------------------------------------------------------- probabilities


def penalise(logits: Tensor, penalty: float, text: list[int], draft: list[int]) -> Tensor:
    """Apply the repetition penalty to logits [n + 1, V]; 1 = off.

    Row i is penalised as in plain decoding: for `text` and the first i drafts.
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

    Row i is where the token at `position` + i of the text is chosen. The choice depends on the row,
    on the request's sampling, and on the noise that belongs to its seed and that position. It does
    not depend on any draft.
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

    q [V] is the distribution that the token was drawn from; only the rule of rejection needs it.
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
    choice that differs from the draft recovers the text. If none differs, the last is a bonus.

    This is lossless, because only the target's own choices are ever emitted. Choice i was made
    behind accepted tokens, and these are the choices before it. So it stands behind the same text
    as in plain decoding, and depends on that text, the seed and the position alone.

    Example: choices 4, 9, 1, 7 and Draft([4, 8, 1]) -> 4 accepted, 8 rejected, 9 recovered.
    """
    judged = []
    for drafted in draft.tokens:
        chosen = next(choices)
        if drafted != chosen:
            return [*judged, Judgement(drafted, "rejected"), Judgement(chosen, "recovered")]
        judged.append(Judgement(drafted, "accepted"))
    return [*judged, Judgement(next(choices), "bonus")]


@torch.inference_mode()
def verify_by_rejection(draft: Draft, p: Tensor, noise: Noise, position: int) -> list[Judgement]:
    """The classical rule: accept by chance, so that the output is distributed exactly as p.

    p [n + 1, V] is the target's distribution after pending, d1, …, dn. A drafted token is accepted
    if u < p / q. The first rejected token is replaced by one drawn from norm(max(0, p - q)). If
    none was rejected, a bonus token is drawn from the last row. The chance of a token x is then
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
    """The positive part of p [V] - q [V], unnormalised: draw() does that.

    Example: p [.5, .5, 0], q [.2, .8, 0] -> [.3, 0, 0].
    """
    more = (p - q).clamp_(min=0)
    # Nothing more: p = q but for rounding, and the rejection was rounding as well.
    return more if more.sum() > 0 else p


# ---------------------------------------------------------------------------------- sequence


class Sequence:
    """A request under way: its tokens, cache row, seat among the drafters, text and statistics."""

    def __init__(self, request: Request, row: int, seat: Seat, tokenizer: Any) -> None:
        self.request, self.row, self.seat, self.tokenizer = request, row, seat, tokenizer
        self.noise = Noise(request.seed)
        self.tokens = list(request.prompt)
        self.text = TextStream(tokenizer, request.stop)
        self.hidden: dict[int, list[Tensor]] = {}  # of the prompt's chunks so far, by layer
        self.logprobs: list[dict[str, Any]] = []
        self.statistics = Statistics()
        self.num_steps = 0
        self.finish_reason: str | None = None
        self.failure: Exception | None = None  # its own; then the finish_reason is "error"

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def wish(self) -> Wish:
        """What may be drafted now: nothing at the prefill, nor where one token is left."""
        limit = min(self.request.num_speculative_tokens, self.remaining - 1)
        return Wish(self.seat, limit if self.num_steps else 0, self.remaining)

    def fail(self, error: Exception) -> None:
        """End it: the others go on."""
        self.failure, self.finish_reason = error, "error"

    def append(self, emitted: list[Judgement], eos_ids: set[int]) -> int:
        """Append a cycle's tokens up to an end of text, a stop string or max_tokens; how many.

        This is the one place that cuts: cache, counters and stream only see what stays.
        """
        for kept, token in enumerate(emitted, 1):
            if self.text.push(token.id, token.kind) or token.id in eos_ids:
                self.finish_reason = "stop"
            elif self.remaining == 1:
                self.finish_reason = "length"
            self.tokens.append(token.id)
            if self.finish_reason:
                if self.text.finish():  # the last bytes completed a stop string
                    self.finish_reason = "stop"
                return kept
        return len(emitted)


# ------------------------------------------------------------------------------------ engine


class Engine:
    """Runs cycles over any number of sequences, each with its own drafters and K, or none."""

    def __init__(
        self,
        target: CachedModel,
        loaded: dict[str, Drafter],
        default: str | None = None,
        prefill_chunk: int = Options.prefill_chunk,
        controller: Controller | None = None,
        draft_model: CachedModel | None = None,
        is_strict: bool = False,
    ):
        """Without controller every draft has the length that the request asks for."""
        self.target, self.draft_model, self.prefill_chunk = target, draft_model, prefill_chunk
        self.default_drafter, self.eos_ids = default, ends_of(target.model, target.tokenizer)
        self.panel = Panel(loaded, target.vocab_size, is_strict)
        self.controller = controller
        self.planner = Planner(controller, self.panel) if controller else FixedK()
        self.totals = Totals(self.panel.choices)

    @property
    def is_exact(self) -> bool:
        """Whether equal logits are equal bits: no output depends on company in the last bit."""
        return bool(self.target.report and self.target.report.is_exact)

    def open(self, request: Request) -> Sequence:
        """Admit a request, max_tokens clamped to the context. Raises ValueError for its prompt."""
        check_prompt(request.prompt, self.target)
        room = self.target.max_length - len(request.prompt)
        wanted = request.drafter if request.num_speculative_tokens else None
        admitted = replace(request, max_tokens=min(request.max_tokens, room), drafter=wanted)
        seat = Seat(len(request.prompt), request.sampling)
        row = self.target.cache.open_row(len(request.prompt))
        s = Sequence(admitted, row, seat, self.target.tokenizer)
        if room < request.max_tokens:
            seat.warnings.append(
                f"max_tokens was lowered from {request.max_tokens} to {room}: the context holds "
                f"{self.target.max_length} tokens"
            )
        if wanted:
            self.panel.open(seat, wanted, request.prompt, s.noise)
        self.planner.open(seat)
        return s

    def close(self, s: Sequence) -> None:
        """Give cache row and drafters' states back; every opened sequence comes here once."""
        self.target.cache.close_row(s.row)
        self.panel.close(s.seat)
        self.totals.add(s.request.drafter, s.request.sampling.rule, s.statistics)

    def generate(self, request: Request) -> Iterator[tuple[Sequence, Cycle]]:
        """Run one request, cycle by cycle. Leaving early is fine."""
        s = self.open(request)
        try:
            while s.finish_reason is None:
                for cycle in faults.step(self, [s]).values():
                    yield s, cycle
            if s.failure:
                raise s.failure
        finally:
            self.close(s)

    def step(self, sequences: list[Sequence]) -> dict[Sequence, Cycle]:
        """One cycle of each: draft → verify → accept → truncate.

        The first cycle of a sequence is its prefill: a long run of tokens to feed, and no draft. A
        sequence whose prompt is not read yet gets no cycle, nor does one that cannot go on, as its
        logits are no numbers, say. A forward that fails raises, and nothing has been accepted (see
        serving/faults.py for what is tried again).
        """
        batch = self.read_prompts(sequences)
        is_prefill = not all(s.num_steps for s in batch)
        times = [time.perf_counter()]
        drafts = self.panel.propose(
            [s.seat for s in batch], self.planner.plan([s.wish for s in batch])
        )
        times.append(time.perf_counter())
        output = self.forward(batch, drafts)
        times.append(time.perf_counter())
        cycles = {}
        for i, (s, draft) in enumerate(zip(batch, drafts, strict=True)):
            hidden = {layer: states[i] for layer, states in output.hidden.items()}
            try:
                cycles[s] = self.accept(s, draft, output.logits[i], hidden)
            except Exception as error:  # its own affair: the others go on
                s.fail(error)
        times.append(time.perf_counter())
        fed = [len(draft.tokens) + 1 for draft in drafts]
        self.planner.timed(self.panel, fed, None if is_prefill else times)
        for s, cycle in cycles.items():
            cycle.times = times
            s.statistics.record_times(times, is_prefill=cycle.number == 0)
        return cycles

    def read_prompts(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those whose prompts are read but for the last chunk; of one of the others reads a chunk.

        One prompt at a time: the others' tokens keep coming meanwhile.
        """
        lengths, size = self.target.cache.lengths, self.prefill_chunk
        reading = [s for s in sequences if len(s.tokens) - lengths[s.row] > size]
        for s in reading[:1]:
            began, cached = time.perf_counter(), lengths[s.row]
            layers = tuple(self.panel.layers(s.seat))
            output = self.target.forward([s.row], [s.tokens[cached : cached + size]], [1], layers)
            for layer, (states,) in output.hidden.items():
                s.hidden.setdefault(layer, []).append(states)
            s.statistics.prompt_ms += (time.perf_counter() - began) * 1e3
        return [s for s in sequences if s not in reading]

    def forward(self, batch: list[Sequence], drafts: list[Draft]) -> Output:
        """One pass for all: what is not cached yet (after prefill the pending token), the draft."""
        lengths, pairs = self.target.cache.lengths, list(zip(batch, drafts, strict=True))
        return self.target.forward(
            rows=[s.row for s in batch],
            tokens=[s.tokens[lengths[s.row] :] + draft.tokens for s, draft in pairs],
            num_logits=[len(draft.tokens) + 1 for draft in drafts],
            layers=tuple(set().union(*(self.panel.layers(s.seat) for s in batch))),
        )

    def accept(self, s: Sequence, draft: Draft, logits: Tensor, hidden: dict[int, Tensor]) -> Cycle:
        """Judge the draft, cut the text once, truncate the cache, and tell who wants to know."""
        scores = penalise(logits, s.request.sampling.repetition_penalty, s.tokens, draft.tokens)
        judged = self.judge(s, draft, scores)
        emitted = [judgement for judgement in judged if judgement.kind != "rejected"]
        cache, accepted = self.target.cache, len(emitted) - 1
        held, kept = cache.lengths[s.row], s.append(emitted, self.eos_ids)
        cache.keep(s.row, len(draft.tokens), range(kept - 1))  # all but the pending token
        pieces = s.text.release(final=s.finish_reason is not None)
        if s.request.trace and s.request.sampling.rule == "coupled":  # it shows log p
            scores = probabilities(scores, s.request.sampling).double().log()
        cycle = Cycle(
            s.num_steps, draft.tokens, judged, kept, held, cache.lengths[s.row], pieces, logits,
            scores,
        )  # fmt: skip
        s.num_steps += 1
        s.statistics.record(cycle.num_drafted, [token.kind for token in cycle.tokens])
        if cycle.num_drafted:
            self.totals.recent.append((cycle.num_drafted, cycle.num_accepted))
        self.planner.learn(s.seat, cycle)
        if s.finish_reason is None:
            num_refused = len(draft.tokens) - accepted
            known = {
                layer: torch.cat([*s.hidden.pop(layer, []), states[: len(states) - num_refused]])
                for layer, states in hidden.items()
            }
            self.panel.observe(s.seat, cycle.verdict(), known)
        return cycle

    def judge(self, s: Sequence, draft: Draft, scores: Tensor) -> list[Judgement]:
        """What becomes of each drafted token, and the target's own; scores [n + 1, V]."""
        sampling, position = s.request.sampling, len(s.tokens)
        if sampling.is_coupled:
            return verify(draft, own_choices(scores, sampling, s.noise, position))
        return verify_by_rejection(draft, probabilities(scores, sampling), s.noise, position)


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


def load_model(name: str, options: Options) -> CachedModel:
    """A folder or a hub id with a KV cache. Raises StartError if missing, broken or unsuited."""
    found = load_pretrained(name, options)
    return CachedModel(
        found.model, found.tokenizer, name, options.max_running, found.length, found.structure
    )


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
        target, sample, draft, options.max_running, options.prompt_lookup_max,
        options.prompt_lookup_min, options.fastpath, options.drafter_timeout,
    )  # fmt: skip
    try:
        loaded, default = drafters.load_all(options.drafter, context, not options.fixed_k)
    except ValueError as error:
        raise StartError(str(error)) from error
    for model in models:
        follow_masks(model.model, model.cache.capacity)
        with refusal(model):
            if options.fastpath:
                speed_up(model)
    sizes = {name: getattr(d, "num_step_weights", 0) for name, d in loaded.items()}
    controller = None if options.fixed_k else Controller(target.num_weights, sizes)
    return Engine(target, loaded, default, options.prefill_chunk, controller, draft, options.strict)


def prepare(engine: Engine, options: Options) -> None:
    """Find the shapes to run in and run once, in the thread that is going to serve."""
    most = options.max_running * (options.num_speculative_tokens + 1)  # tokens of a forward
    for model in filter(None, (engine.target, engine.draft_model)):
        # Only the target's bits count: a draft with other bits is a worse draft at most.
        bitwise = options.bitwise and model is engine.target
        with refusal(model):
            model.report = calibrate(model, most, bitwise)
        if model.reference:
            model.reference.check(model)
            model.reference = None
    warm_up(engine)


def load_engine(options: Options) -> Engine:
    """An engine that is ready to run in this thread. Raises StartError if it cannot be had."""
    engine = assemble_engine(options)
    prepare(engine, options)
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
    app, started = http.new_app(options, demo.read_prompts()), time.monotonic()
    worker = worker or Worker(engine, options, prepare)
    app.extensions["worker"] = worker

    def begin(body: dict[str, Any]) -> tuple[list[Job], bool, list[str]]:
        """Parse and queue a request: its jobs, whether to stream, and warnings."""
        wanted, stream, compare, notes = parse_request(body, engine, options)
        g.jobs = worker.submit(*(runs_to_compare(wanted) if compare else [wanted]))
        return g.jobs, stream, notes

    @app.post("/generate")
    def generate() -> Response | dict[str, Any]:
        """Answer when all is done, or stream it."""
        jobs, stream, notes = begin(http.read_body())
        dtype = engine.target.model.dtype
        if stream:
            events = answers.stream_answer(jobs, notes, dtype)
            return Response(events, mimetype="text/event-stream")
        # 499: the client has left, and nobody reads it.
        return answers.answer(jobs, notes, dtype) if http.finish(jobs) else Response(status=499)

    @app.get("/health")
    def get_health() -> tuple[dict[str, Any], int]:
        uptime_s = time.monotonic() - started
        body = answers.health(engine, worker, options.num_speculative_tokens, uptime_s)
        return body, 200 if body["status"] == "ok" else 503

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(metrics(engine, worker), content_type=CONTENT_TYPE)

    register_openai(app, engine, begin)
    return app


def load_app(options: Options) -> Flask:
    """The application with an engine that its worker's thread has made ready."""
    engine = assemble_engine(options)
    return create_app(engine, options, prepare=lambda: prepare(engine, options))


# ------------------------------------------------------------------------------ command line


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if outputs differed, 2 if it could not be carried out."""
    given, options = parse_arguments(__doc__.splitlines()[0], arguments)

    def act() -> int:
        if given.port:
            return http.serve(lambda: load_app(options), given.host, given.port, options)
        engine = load_engine(options)
        if given.prompt is None:
            return demo.show_demo(engine, options, plain_decode, given.json)
        body = {"prompt": given.prompt, "stop": given.stop}
        demo.show_prompt(engine, parse_request(body, engine, options)[0], given.explain)
        return 0

    return demo.exit_status(act)


if __name__ == "__main__":
    sys.exit(main())
