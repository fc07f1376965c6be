"""What drafters that run a head beside the target have in common: MTP, EAGLE and DFlash heads.

An MTP or EAGLE head reads a pair (hidden state the target had at position j, token j + 1) and
predicts token j + 2. Fed its own output it predicts on: one layer serves every draft step, as vLLM
and SGLang do. (DFlash drafts otherwise: dflash.py.)

    true pairs      (h₀,x₁) (h₁,x₂) … (hₙ₋₂,xₙ₋₁)           kept: n known tokens give n − 1 pairs
    recursive rows                                (g,d₁) (g,d₂) …   truncated when the draft is done

Its KV cache is of the core's kind. The hidden states come with each verdict, at no extra forward of
the target.
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

from .base import Chain, Context, Drafter, ModelState
from .noise import Noise
from .tree import Comb


@dataclass(slots=True, kw_only=True)
class HeadState(ModelState):
    """The true pairs that are not fed yet are (hidden, tokens)."""

    row: int  # in the head's KV cache
    hidden: list[Tensor] = field(default_factory=list)  # [pairs, D] each
    tokens: list[int] = field(default_factory=list)
    observed: int = 0  # positions of `text` whose hidden states have come
    can_branch: bool = False  # the panel sets it


class StateReader(Drafter):
    """Drafts from the target's hidden states, with a KV cache of its own, batched over requests."""

    needs_hidden = True
    stops_early = True

    def __init__(self, context: Context, num_layers: int = 1, spare: int = 0) -> None:
        """For a cache of so many layers, with room for `spare` tokens behind the longest text."""
        self._cache = context.target.new_cache(num_layers, context.num_rows, spare)
        self._shapes = context.target.shapes
        self._sample = context.sample

    @abstractmethod
    def _draft(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        """A draft for each; their cache rows then hold what belongs to the text, and no more."""

    @abstractmethod
    def _to_logits(self, outputs: Tensor) -> Tensor:
        """What the head gave [B, D] -> [B, V]."""

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> HeadState:
        row = self._cache.open_row(len(prompt) - 1)
        return HeadState(row=row, text=list(prompt), sampling=sampling, noise=noise)

    def propose(self, state: HeadState, max_tokens: int) -> Draft:
        return self.propose_batch([state], [max_tokens])[0]

    @torch.inference_mode()
    def propose_batch(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        """Drafts of all in the same forwards."""
        lengths = [self._cache.lengths[state.row] for state in states]
        try:
            return self._draft(states, max_tokens)
        except Exception:  # as if nothing had been fed: the states are still there
            for state, length in zip(states, lengths, strict=True):
                self._cache.truncate(state.row, length)
            raise

    def _logits(self, outputs: Tensor) -> Tensor:
        """[B, D] -> [B, V] float32, in a number of rows that was checked."""
        num_rows = self._shapes.run_rows(len(outputs))
        padded = torch.nn.functional.pad(outputs, (0, 0, 0, num_rows - len(outputs)))
        return self._to_logits(padded)[: len(outputs)].float()

    def observe(self, state: HeadState, verdict: Verdict) -> None:
        assert verdict.hidden is not None, (
            "the engine hands hidden states to a drafter that needs them"
        )
        state.text.extend(verdict.tokens)
        begin, state.observed = state.observed, state.observed + len(verdict.hidden)
        following = state.text[begin + 1 :]  # what came after each newly cached position
        assert len(following) == len(verdict.hidden)
        state.hidden.append(verdict.hidden)
        state.tokens.extend(following)

    def close(self, state: HeadState) -> None:
        self._cache.close_row(state.row)


class HeadDrafter(StateReader):
    """Drafts token by token: each step reads what the step before gave."""

    branches = True

    def __init__(self, context: Context, can_share: bool) -> None:
        """`can_share` says whether texts may stand one behind the other in a forward."""
        super().__init__(context)
        fast, plain = Runs(self._cache, self._shapes, can_share), partial(whole, self._cache)
        self._runs = fast if context.fast else plain

    @abstractmethod
    def _run(self, ids: Tensor, hidden: Tensor, place: Any, is_first: bool) -> Tensor:
        """The head over pairs, as the place arranges them: ids [B, T] and hidden [B, T, width].

        Hidden states are the target's where `is_first`, else what this returned: [B, T, D].
        """

    def _draft(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        """One batched run of the layer per draft step; the first feeds the true pairs.

        A tree has the layer's other likely tokens beside those that it goes on with.
        """
        pairs_of = zip(states, max_tokens, strict=True)
        chains = [(Comb if state.can_branch else Chain)(state, limit) for state, limit in pairs_of]
        pairs = [(torch.cat(state.hidden), state.tokens) for state in states]
        known = [self._cache.lengths[state.row] + len(state.tokens) for state in states]
        is_first = True
        while active := [i for i, chain in enumerate(chains) if chain.is_open]:
            rows, fed = [states[i].row for i in active], [pairs[i] for i in active]
            outputs = self._forward(rows, fed, is_first)
            logits = self._logits(torch.cat(outputs))  # [B, V]
            for b, i in enumerate(active):
                pairs[i] = (outputs[b], [chains[i].extend(logits[b], self._sample)])
            is_first = False
        for state, length in zip(states, known, strict=True):
            # The true pairs are cached now; the recursive pairs after them go.
            self._cache.truncate(state.row, length)
            state.hidden, state.tokens = [], []
        return [chain.draft() for chain in chains]

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
