"""What drafters that run a head beside the target have in common: MTP heads and EAGLE heads.

A head reads a pair (hidden state the target had at position j, token j + 1) and predicts token
j + 2. Fed its own output it predicts on: one layer serves every draft step, as vLLM and SGLang do.

    true pairs      (h₀,x₁) (h₁,x₂) … (hₙ₋₂,xₙ₋₁)           kept: n known tokens give n − 1 pairs
    recursive rows                                (g,d₁) (g,d₂) …   truncated when the draft is done

Its KV cache is of the core's kind with a single layer. The hidden states come with each verdict, at
no extra forward of the target.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastpath.forward import Runs, whole
from messages import Draft, Sampling, Verdict

from .base import Context, Drafter
from .noise import Noise


@dataclass(slots=True)
class _State:
    """The true pairs that are not fed yet are (hidden, tokens)."""

    row: int  # in the head's KV cache
    text: list[int]  # committed so far
    sampling: Sampling
    noise: Noise
    hidden: list[Tensor] = field(default_factory=list)  # [pairs, D] each
    tokens: list[int] = field(default_factory=list)
    observed: int = 0  # positions of `text` whose hidden states have come


class HeadDrafter(Drafter):
    """Drafts with a head, batched over requests."""

    needs_hidden = True

    def __init__(self, context: Context, can_share: bool) -> None:
        """`can_share` says whether texts may stand one behind the other in a forward."""
        self._cache = context.target.new_cache(num_layers=1, num_rows=context.num_rows)
        self._shapes = context.target.shapes
        fast, plain = Runs(self._cache, self._shapes, can_share), partial(whole, self._cache)
        self._runs = fast if context.fast else plain
        self._sample = context.sample

    @abstractmethod
    def _run(self, ids: Tensor, hidden: Tensor, place: Any, is_first: bool) -> Tensor:
        """The head over pairs, as the place arranges them: ids [B, T] and hidden [B, T, width].

        Hidden states are the target's where `is_first`, else what this returned: [B, T, D].
        """

    @abstractmethod
    def _to_logits(self, outputs: Tensor) -> Tensor:
        """What `_run` returned [B, D] -> [B, V]."""

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> _State:
        return _State(self._cache.open_row(len(prompt) - 1), list(prompt), sampling, noise)

    def propose(self, state: _State, max_tokens: int) -> Draft:
        return self.propose_batch([state], [max_tokens])[0]

    @torch.inference_mode()
    def propose_batch(self, states: list[_State], max_tokens: list[int]) -> list[Draft]:
        """One batched run of the layer per draft step; the first feeds the true pairs."""
        lengths = [self._cache.lengths[state.row] for state in states]
        try:
            return self._draft(states, max_tokens)
        except Exception:  # as if nothing had been fed: the true pairs are still there
            for state, length in zip(states, lengths, strict=True):
                self._cache.truncate(state.row, length)
            raise

    def _draft(self, states: list[_State], max_tokens: list[int]) -> list[Draft]:
        drawn: list[list[tuple[int, Tensor | None]]] = [[] for _ in states]
        texts = [list(state.text) for state in states]  # with the draft so far
        pairs = [(torch.cat(state.hidden), state.tokens) for state in states]
        known = [self._cache.lengths[state.row] + len(state.tokens) for state in states]
        for step in range(max(max_tokens)):
            active = [i for i, limit in enumerate(max_tokens) if limit > step]
            rows, fed = [states[i].row for i in active], [pairs[i] for i in active]
            outputs = self._forward(rows, fed, is_first=step == 0)
            logits = self._logits(torch.cat(outputs))  # [B, V]
            for b, i in enumerate(active):
                token, q = self._sample(logits[b], texts[i], states[i].sampling, states[i].noise)
                drawn[i].append((token, q))
                texts[i].append(token)
                pairs[i] = (outputs[b], [token])
        for state, length in zip(states, known, strict=True):
            # The true pairs are cached now; the recursive pairs after them go.
            self._cache.truncate(state.row, length)
            state.hidden, state.tokens = [], []
        return [Draft.of(tokens) for tokens in drawn]

    def _logits(self, outputs: Tensor) -> Tensor:
        """[B, D] -> [B, V] float32, in a number of rows that was checked."""
        num_rows = self._shapes.run_rows(len(outputs))
        padded = torch.nn.functional.pad(outputs, (0, 0, 0, num_rows - len(outputs)))
        return self._to_logits(padded)[: len(outputs)].float()

    def _forward(
        self, rows: list[int], pairs: list[tuple[Tensor, list[int]]], is_first: bool
    ) -> list[Tensor]:
        """Run the head over each row's pairs; returns the output [1, D] of each row's last pair.

        The pairs of row b come after what its cache row holds.
        """
        last: list[Tensor] = [None] * len(rows)
        counts = [len(tokens) for _, tokens in pairs]
        for pieces, place in self._runs(rows, counts):
            fed = [pairs[p.index][1][p.begin : p.end] for p in pieces]
            device = place.positions.device
            ids = place.arrange([torch.tensor(tokens, device=device) for tokens in fed])
            hidden = place.arrange([pairs[p.index][0][p.begin : p.end] for p in pieces])
            output = self._run(ids, hidden, place, is_first)
            self._cache.advance(place)
            for piece, own in zip(pieces, place.part(output), strict=True):
                last[piece.index] = own[-1:]
        return last

    def observe(self, state: _State, verdict: Verdict) -> None:
        assert verdict.hidden is not None, (
            "the engine hands hidden states to a drafter that needs them"
        )
        state.text.extend(verdict.tokens)
        begin, state.observed = state.observed, state.observed + len(verdict.hidden)
        following = state.text[begin + 1 :]  # what came after each newly cached position
        assert len(following) == len(verdict.hidden)
        state.hidden.append(verdict.hidden)
        state.tokens.extend(following)

    def close(self, state: _State) -> None:
        self._cache.close_row(state.row)
