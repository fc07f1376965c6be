"""Speculative decoding in one file: a cheap drafter proposes, the target verifies, nothing is lost.

A language model reads all its weights to produce one token. Verifying six tokens reads them once, too. So:

    cached │ pending   drafted                      one target forward over [pending, d1, d2, d3]
    ───────┼──────────────────────────────          gives the target's own choice after each of them
    The cat│  sat       on    the    mat
           │   ↓        ↓      ↓      ↓
           │  on ✓     the ✓   rug ✗  .             d1, d2 accepted; d3 refused, "rug" recovered instead
           │
    The cat│  sat on the                            the KV cache is truncated behind the last accepted token,
           │             └─ pending: rug            in O(1): a row's length is lowered
    One pass, three tokens: on · the · rug. The text is the one that the target alone would have written.

One cycle:  draft → verify → accept → truncate.    Read on in this order: the KV cache and its truncation · the
cached model · verify · request and statistics · engine step · plain decoding · loading · Flask app · demo ·
command line. Drafters live in drafters/, the worker thread and the parsing of requests in serving/.

    python 08_speculative_decoding.py --demo
    python 08_speculative_decoding.py --prompt "def fib(n):" --drafter ngram
    python 08_speculative_decoding.py --port 5000

Sources: Leviathan et al. arXiv 2211.17192; Chen et al. arXiv 2302.01318; the cache interface of transformers.
Not covered yet: sampling (temperature > 0), batches of several requests at once, hybrid (recurrent) targets.
"""

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin

import drafters
from drafters import Context, Draft, Drafter, Sampling, Verdict
from serving.text import TextStream

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------- KV cache and truncation


@dataclass(frozen=True, slots=True)
class Place:
    """Where one forward's tokens go: row b of the batch is cache row rows[b], and gets counts[b] new tokens.

    Rows of unequal counts are padded on the left, so that the last tokens (whose logits matter) line up. Pads
    are never written to the cache.
    """

    rows: list[int]
    counts: list[int]
    positions: Tensor  # [B, T]; pads stand at 0 or before their row's first new token
    kv_length: int
    device: torch.device

    @property
    def width(self) -> int:
        return max(self.counts)

    def pad(self, tokens: list[list[int]]) -> Tensor:
        """Ragged token lists -> [B, T] ids."""
        return torch.tensor([[0] * (self.width - len(t)) + t for t in tokens], device=self.device)

    def pad_states(self, states: list[Tensor]) -> Tensor:
        """Ragged [t, D] states -> [B, T, D]."""
        return torch.stack([torch.nn.functional.pad(s, (0, 0, self.width - len(s), 0)) for s in states])

    def is_real(self) -> Tensor:
        """[B, T] bool: False on pads."""
        columns = torch.arange(self.width, device=self.device)
        return columns >= self.width - torch.tensor(self.counts, device=self.device)[:, None]

    def mask(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Additive attention mask [B, 1, T, kv_length]: the past of each token, at most `window` of it."""
        keys = torch.arange(self.kv_length, device=self.device)
        queries = self.positions[:, None, :, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, torch.finfo(dtype).min)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, preallocated: zeros [rows, heads, max_length, width], written in place."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Sizes come from the states, not from the config, which knows nothing of sharded heads or of MLA's
        # widths. Zeros, not empty: a masked slot still enters 0 · value, and 0 · NaN would be NaN.
        shape = self._cache.num_rows, key_states.shape[1], self._cache.max_length
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, width] at the current place; returns keys and values up to its kv_length."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self._cache.current
        stored = []
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if len(place.rows) == 1:
                row = place.rows[0]
                buffer[row, :, place.kv_length - place.width : place.kv_length] = new[0]
                stored.append(buffer[row : row + 1, :, : place.kv_length])
            else:
                real = place.is_real()
                row_of = torch.tensor(place.rows, device=new.device)[:, None].expand_as(real)
                buffer[row_of[real], :, place.positions[real]] = new.transpose(1, 2)[real]
                first, last = place.rows[0], place.rows[-1]
                in_order = place.rows == list(range(first, last + 1))  # then a view will do
                stored.append(buffer[slice(first, last + 1) if in_order else place.rows, :, : place.kv_length])
        return stored[0], stored[1]

    def get_seq_length(self) -> int:
        return self._cache.current.kv_length - self._cache.current.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.current.kv_length, 0

    def get_max_length(self) -> int:
        return self._cache.max_length


class SlotCache(Cache):
    """A KV cache whose rows have lengths of their own. Appending writes in place; truncating lowers a length.

    One forward is: `place` its tokens, run the model with this cache, `advance`.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])
        self.num_rows, self.max_length, self.device = num_rows, max_length, device
        self.lengths = [0] * num_rows
        self.current: Place = None  # type: ignore[assignment]  # of the forward under way
        self._free = list(range(num_rows))[::-1]

    def open_row(self) -> int:
        """An empty row for a new request. Raises ValueError when all are taken."""
        if not self._free:
            raise ValueError(f"all {self.num_rows} rows of the KV cache are in use")
        row = self._free.pop()
        self.lengths[row] = 0
        return row

    def close_row(self, row: int) -> None:
        """Give the row back."""
        assert row not in self._free, f"row {row} closed twice"
        self._free.append(row)

    def place(self, rows: list[int], counts: list[int]) -> Place:
        """Make room for counts[b] ≥ 1 tokens behind what rows[b] holds.

        Raises ValueError if a row would outgrow `max_length`.
        """
        ends = [self.lengths[row] + count for row, count in zip(rows, counts, strict=True)]
        if max(ends) > self.max_length:
            raise ValueError(f"{max(ends)} tokens do not fit a KV cache of {self.max_length}")
        width = max(counts)
        columns = torch.arange(width, device=self.device)
        positions = torch.tensor(ends, device=self.device)[:, None] - width + columns
        self.current = Place(rows, counts, positions.clamp_(min=0), max(ends), self.device)
        return self.current

    def advance(self, place: Place) -> None:
        """The placed tokens are cached now."""
        for row, count in zip(place.rows, place.counts, strict=True):
            self.lengths[row] += count

    def truncate(self, row: int, length: int) -> None:
        """Forget row's tokens from `length` on. O(1): stale slots are masked, then overwritten.

        Example: 9 cached after verifying [pending, d1, d2, d3] with 1 accepted -> truncate(row, 7).
        Raises ValueError unless 0 <= length <= lengths[row].
        """
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot truncate {self.lengths[row]} cached tokens to {length}")
        self.lengths[row] = length


# ------------------------------------------------------------------------------------- the cached model


@dataclass(frozen=True, slots=True)
class Output:
    logits: list[Tensor]  # row by row [num_logits, V], float32
    hidden: list[Tensor] | None  # row by row [tokens fed, D], after the final norm


class CachedModel:
    """A causal language model with a SlotCache: the target, and a draft model alike."""

    def __init__(self, model: Any, tokenizer: Any, name: str, num_rows: int, max_length: int) -> None:
        config = model.config.get_text_config()
        self.model, self.tokenizer, self.name, self.max_length = model, tokenizer, name, max_length
        self.vocab_size = config.vocab_size
        self.cache = self.new_cache(config.num_hidden_layers, num_rows)
        # A window belongs in the mask. Families with layers of two kinds take one mask per kind.
        self._window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            self._window = None
        self._layer_types = set(getattr(config, "layer_types", None) or ())

    def new_cache(self, num_layers: int, num_rows: int) -> SlotCache:
        """An empty cache as long as this model's own, for a head that runs beside it."""
        return SlotCache(num_layers, num_rows, self.max_length, self.model.device)

    def _masks(self, place: Place) -> Tensor | dict[str, Tensor]:
        dtype, window = self.model.dtype, self._window
        if window is None or "sliding_attention" not in self._layer_types:
            return place.mask(dtype, None if self._layer_types else window)
        return {
            kind: place.mask(dtype, window if kind == "sliding_attention" else None) for kind in self._layer_types
        }

    @torch.inference_mode()
    def forward(
        self, rows: list[int], tokens: list[list[int]], num_logits: list[int], want_hidden: bool = False
    ) -> Output:
        """Feed tokens[b] behind what cache row rows[b] holds, in one forward of the model.

        Prefill (a long run of tokens), decoding (one) and verifying (n + 1) differ only in what is fed.
        Returns the logits of each row's last num_logits[b] tokens. Raises ValueError if a row outgrows its cache.
        """
        place = self.cache.place(rows, [len(t) for t in tokens])
        result = self.model(
            input_ids=place.pad(tokens),
            attention_mask=self._masks(place),
            position_ids=place.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=max(num_logits),
            **({"output_hidden_states": -1} if want_hidden else {}),
        )
        self.cache.advance(place)
        logits = [result.logits[b, -n:].float() for b, n in enumerate(num_logits)]
        hidden = None
        if want_hidden:
            hidden = [result.hidden_states[-1][b, place.width - n :] for b, n in enumerate(place.counts)]
        return Output(logits, hidden)


# -------------------------------------------------------------------------------------------- verify


def verify(draft: Draft, target_argmax: list[int]) -> tuple[int, list[int]]:
    """Accept the longest prefix of the draft that the target would have written itself.

    target_argmax [n + 1] is the target's choice after pending, d1, …, dn. Returns (accepted, tokens), where tokens
    are the accepted drafts and one token of the target's own: recovered where the first refusal fell, or the
    bonus when nothing was refused. This is the greedy case of Leviathan et al., algorithm 1: p is one-hot.

    Example: verify(Draft([4, 8, 1]), [4, 9, 1, 7]) -> (1, [4, 9])
    """
    accepted = 0
    while accepted < len(draft.tokens) and draft.tokens[accepted] == target_argmax[accepted]:
        accepted += 1
    return accepted, [*draft.tokens[:accepted], target_argmax[accepted]]


# ---------------------------------------------------------------------------- request and statistics


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `drafter` names a loaded drafter; None, or no speculative tokens, is plain decoding."""

    prompt: list[int]
    max_tokens: int = 128
    drafter: str | None = None
    num_speculative_tokens: int = 5
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()


FORMULAS = {
    "draft_acceptance_rate": "accepted / drafted",
    "mean_acceptance_length": "1 + accepted / cycles with a draft",
    "tokens_per_pass": "tokens emitted after the prefill's / target forwards after prefill",
    "acceptance_rate_per_position": "position i accepted / position i drafted",
    "conditional_acceptance_rate_per_position": "position i accepted / position i drafted and i - 1 accepted",
    "completion_tokens": "accepted + recovered + bonus",
}


@dataclass
class Statistics:
    """Counters of one request, or summed over many. Rates are null before there is anything to divide."""

    num_spec_steps: int = 0  # cycles in which something was drafted
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_recovered_tokens: int = 0
    num_bonus_tokens: int = 0
    target_passes: int = 0  # after prefill
    prefills: int = 0
    drafted_at: list[int] = field(default_factory=list)  # by position in the draft
    reached_at: list[int] = field(default_factory=list)  # drafted, and everything before it accepted
    accepted_at: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)  # cycles by number of accepted tokens
    prompt_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    def record(self, drafted: int, kinds: list[str]) -> None:
        """Count one cycle: `drafted` tokens judged, and the kind of each token that it emitted."""
        accepted = kinds.count("accepted")
        self.num_recovered_tokens += kinds.count("recovered")
        self.num_bonus_tokens += kinds.count("bonus")
        if drafted:
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted
            self.num_accepted_draft_tokens += accepted
            _add(self.acceptance_histogram, [0] * accepted + [1])
            _add(self.drafted_at, [1] * drafted)
            _add(self.reached_at, [1] * min(drafted, accepted + 1))
            _add(self.accepted_at, [1] * accepted)

    def add(self, other: "Statistics") -> None:
        for name, value in vars(other).items():
            if isinstance(value, list):
                _add(getattr(self, name), value)
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def completion_tokens(self) -> int:
        return self.num_accepted_draft_tokens + self.num_recovered_tokens + self.num_bonus_tokens

    @property
    def predicted_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def draft_acceptance_rate(self) -> float | None:
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def tokens_per_pass(self) -> float | None:
        return _ratio(self.completion_tokens - self.prefills, self.target_passes)

    def counters(self, num_spec_tokens: int) -> dict[str, Any]:
        """The `speculative_decoding` block, by the field's names; the histogram has K + 1 buckets."""
        extra = _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        buckets = max(num_spec_tokens + 1, len(self.acceptance_histogram))
        return {
            "num_spec_tokens": num_spec_tokens,
            "num_spec_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_recovered_tokens": self.num_recovered_tokens,
            "num_bonus_tokens": self.num_bonus_tokens,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": None if extra is None else 1 + extra,
            "acceptance_histogram": self.acceptance_histogram + [0] * (buckets - len(self.acceptance_histogram)),
            "target_passes": self.target_passes,
            "tokens_per_pass": self.tokens_per_pass,
        }

    def per_position(self) -> dict[str, list[float | None]]:
        """Acceptance by position in the draft, unconditional and given that the position before was accepted."""
        accepted = self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at))
        return {
            "acceptance_rate_per_position": list(map(_ratio, accepted, self.drafted_at)),
            "conditional_acceptance_rate_per_position": list(map(_ratio, accepted, self.reached_at)),
        }

    def timings(self) -> dict[str, float]:
        """The `timings` block, as llama.cpp names it, with the time split of speculation."""
        parts = {"prompt_ms": self.prompt_ms, "predicted_ms": self.predicted_ms, "draft_ms": self.draft_ms}
        parts |= {"verify_ms": self.verify_ms, "other_ms": self.other_ms}
        return {name: round(ms, 3) for name, ms in parts.items()} | {
            "predicted_n": self.completion_tokens,
            "draft_n": self.num_draft_tokens,
            "draft_n_accepted": self.num_accepted_draft_tokens,
        }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _add(total: list[int], more: list[int]) -> None:
    """Add position by position; `total` grows as needed."""
    total += [0] * (len(more) - len(total))
    for i, value in enumerate(more):
        total[i] += value


# --------------------------------------------------------------------------------------- engine step


class Sequence:
    """A request under way: its tokens, its cache row, its drafter's state, its text and figures."""

    def __init__(self, request: Request, row: int, tokenizer: Any, drafter: Drafter | None) -> None:
        self.request, self.row, self.drafter = request, row, drafter
        self.tokens = list(request.prompt)
        self.state: Any = None
        self.text = TextStream(tokenizer, request.stop)
        self.statistics = Statistics()
        self.finish_reason: str | None = None
        self.warnings: list[str] = []
        self.num_steps = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.output)

    def cut(self, tokens: list[int], kinds: list[str], eos_ids: set[int]) -> int:
        """How many of a verdict's tokens stay: up to an end-of-text token, a stop string or max_tokens.

        The one place that cuts. What comes after it (cache, counters, statistics, stream) sees only the rest.
        """
        for kept, (token, kind) in enumerate(zip(tokens, kinds, strict=True), 1):
            if self.text.push(token, kind) or token in eos_ids:
                self.finish_reason = "stop"
            elif kept == self.remaining:
                self.finish_reason = "length"
            if self.finish_reason:
                self.text.finish()
                return kept
        return len(tokens)


class Engine:
    """Runs cycles over any number of sequences, each with its own drafter and K, or none."""

    def __init__(self, target: CachedModel, loaded: dict[str, Drafter], default_drafter: str | None = None) -> None:
        self.target, self.drafters, self.default_drafter = target, loaded, default_drafter
        self.num_drafter_failures = 0
        ends = [target.model.generation_config.eos_token_id, target.tokenizer.eos_token_id]
        self.eos_ids = {i for end in ends if end is not None for i in (end if isinstance(end, list) else [end])}

    def open(self, request: Request) -> Sequence:
        """Admit a request. Raises ValueError if its prompt is empty, too long or holds an unknown id."""
        length, context = len(request.prompt), self.target.max_length
        if not request.prompt:
            raise ValueError("the prompt is empty")
        if length >= context:
            raise ValueError(f"the prompt has {length} tokens and the context holds {context}: no room for output")
        if not all(0 <= token < self.target.vocab_size for token in request.prompt):
            raise ValueError(f"the prompt has a token id outside 0 to {self.target.vocab_size - 1}")
        request = replace(request, max_tokens=min(request.max_tokens, context - length))
        drafter = self.drafters[request.drafter] if request.drafter and request.num_speculative_tokens else None
        sequence = Sequence(request, self.target.cache.open_row(), self.target.tokenizer, drafter)
        if drafter:
            try:
                sequence.state = drafter.open(request.prompt, request.sampling, torch.Generator())
            except Exception as error:
                sequence.drafter = None  # nothing to close
                self._give_up_speculation(sequence, drafter.name, error)
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Give the cache row and the drafter's state back; every opened sequence must come here once."""
        self.target.cache.close_row(sequence.row)
        if sequence.drafter:
            self._close_drafter(sequence)

    def generate(self, request: Request) -> Iterator[tuple[Sequence, dict[str, Any]]]:
        """Run one request to its end, yielding (sequence, event) cycle by cycle. Leaving early is fine."""
        sequence = self.open(request)
        try:
            while sequence.finish_reason is None:
                yield sequence, self.step([sequence])[0]
        finally:
            self.close(sequence)

    def step(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        """One cycle for each sequence: draft, verify all in one target forward, accept, truncate.

        Returns one event per sequence: {step, proposals, target_argmax, accepted_count, emitted_count, tokens}.
        """
        cache, began = self.target.cache, time.perf_counter()
        drafts = self._draft(sequences)
        drafted = time.perf_counter()
        # Every committed token that is not cached (after prefill that is the pending one), then the draft.
        fed = [s.tokens[cache.lengths[s.row] :] + d.tokens for s, d in zip(sequences, drafts, strict=True)]
        output = self.target.forward(
            rows=[s.row for s in sequences],
            tokens=fed,
            num_logits=[len(d.tokens) + 1 for d in drafts],
            want_hidden=any(s.drafter is not None and s.drafter.needs_hidden for s in sequences),
        )
        choices = [logits.argmax(-1).tolist() for logits in output.logits]
        verified = time.perf_counter()
        hidden = output.hidden or [None] * len(sequences)
        events = [self._commit(*row) for row in zip(sequences, drafts, choices, hidden, strict=True)]
        done = time.perf_counter()
        for sequence in sequences:
            statistics = sequence.statistics
            if sequence.num_steps == 1:
                statistics.prompt_ms += (done - began) * 1e3
                continue
            statistics.target_passes += 1
            statistics.draft_ms += (drafted - began) * 1e3
            statistics.verify_ms += (verified - drafted) * 1e3
            statistics.other_ms += (done - verified) * 1e3
        return events

    def _draft(self, sequences: list[Sequence]) -> list[Draft]:
        """Each sequence's draft; empty in its first cycle (prefill), without a drafter, and for the last token."""
        drafts = {id(s): Draft() for s in sequences}
        groups: dict[Drafter, list[tuple[Sequence, int]]] = {}
        for s in sequences:
            limit = min(s.request.num_speculative_tokens, s.remaining - 1)
            if s.drafter and s.num_steps and limit > 0:
                groups.setdefault(s.drafter, []).append((s, limit))
        for drafter, group in groups.items():
            members, limits = [s for s, _ in group], [limit for _, limit in group]
            try:
                proposed = drafter.propose_batch([s.state for s in members], limits)
                for s, draft, limit in zip(members, proposed, limits, strict=True):
                    self._check(draft, limit)
                    drafts[id(s)] = draft
            except Exception as error:
                for s in members:
                    drafts[id(s)] = Draft()
                    self._give_up_speculation(s, drafter.name, error)
        return [drafts[id(s)] for s in sequences]

    def _check(self, draft: Draft, limit: int) -> None:
        if len(draft.tokens) > limit:
            raise ValueError(f"{len(draft.tokens)} tokens proposed where {limit} were asked for")
        if not all(isinstance(t, int) and 0 <= t < self.target.vocab_size for t in draft.tokens):
            raise ValueError(f"a proposed token is no id from 0 to {self.target.vocab_size - 1}")

    def _commit(self, s: Sequence, draft: Draft, choices: list[int], hidden: Tensor | None) -> dict[str, Any]:
        """Verify, cut once, then truncate the cache, count, and let the drafter observe."""
        accepted, tokens = verify(draft, choices)
        refused = len(draft.tokens) - accepted
        kinds = ["accepted"] * accepted + ["recovered" if refused else "bonus"]
        kept = s.cut(tokens, kinds, self.eos_ids)
        s.tokens += tokens[:kept]
        self.target.cache.truncate(s.row, len(s.tokens) - 1)
        # A cut inside the accepted drafts shortens the draft with the verdict: what lies behind was not judged.
        s.statistics.record(len(draft.tokens) if kept == len(tokens) else kept, kinds[:kept])
        s.statistics.prefills += s.num_steps == 0
        event = {
            "step": s.num_steps,
            "proposals": draft.tokens,
            "target_argmax": choices,
            "accepted_count": min(accepted, kept),
            "emitted_count": kept,
            "tokens": [{"id": t, "kind": k} for t, k in zip(tokens[:kept], kinds, strict=False)],
        }
        s.num_steps += 1
        if s.drafter and s.finish_reason is None:
            cached = None if hidden is None else hidden[: len(hidden) - refused]
            try:
                s.drafter.observe(s.state, Verdict(len(draft.tokens), accepted, tokens, cached))
            except Exception as error:
                self._give_up_speculation(s, s.drafter.name, error)
        return event

    def _give_up_speculation(self, s: Sequence, name: str, error: Exception) -> None:
        """A drafter failed: this request goes on with plain decoding and says so."""
        self.num_drafter_failures += 1
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        s.warnings.append(f"the drafter {name} failed ({reason}): the request went on without speculation")
        if s.drafter:
            self._close_drafter(s)

    def _close_drafter(self, s: Sequence) -> None:
        drafter, s.drafter = s.drafter, None
        try:
            drafter.close(s.state)
        except Exception as error:
            s.warnings.append(f"the drafter {drafter.name} failed to close: {error}")


# ------------------------------------------------------------------------------------- plain decoding


def plain_decode(target: CachedModel, prompt: list[int], max_tokens: int, eos_ids: set[int]) -> tuple[list[int], float]:
    """The target alone, one token per pass: what speculation must reproduce, and what it is timed against.

    Returns (output tokens, milliseconds after prefill).
    """
    row = target.cache.open_row()
    try:
        tokens = [int(target.forward([row], [prompt], [1]).logits[0].argmax())]
        began = time.perf_counter()
        while len(tokens) < max_tokens and tokens[-1] not in eos_ids:
            tokens.append(int(target.forward([row], [tokens[-1:]], [1]).logits[0].argmax()))
        return tokens, (time.perf_counter() - began) * 1e3
    finally:
        target.cache.close_row(row)
