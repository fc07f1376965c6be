"""Multi-token prediction: an extra decoder layer of the target's own, run K times (DeepSeek-V3).

The head reads a pair (hidden state the target had at position j, embedding of token j + 1) and
predicts token j + 2. Fed its own output it predicts on: one layer serves every draft step, as vLLM
and SGLang do.

    true pairs      (h₀,x₁) (h₁,x₂) … (hₙ₋₂,xₙ₋₁)           kept: n known tokens give n − 1 pairs
    recursive rows                                (g,d₁) (g,d₂) …   truncated when the draft is done

Its KV cache is of the core's kind with a single layer. The hidden states come with each verdict, at
no extra forward of the target. Weights: transformers' MtpModel, from the target's own checkpoint.

Source: arXiv 2412.19437. Not covered: checkpoints with several MTP layers, meant for one draft step
each; the first one is reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from fastpath.attention import NAME as GROUPED
from fastpath.decoder import speed_up_head
from fastpath.forward import Runs, whole
from messages import Draft, Sampling, Verdict

from .base import Context, Drafter
from .noise import Noise
from .weights import own_weights, why_not_loaded


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


class MtpHeadDrafter(Drafter):
    """Drafts with the target's MTP head, batched over requests."""

    name: ClassVar[str] = "mtp"
    needs_hidden = True

    def __init__(self, head: MtpModel, context: Context) -> None:
        self._head, self._target = head, context.target
        self._width = context.target.model.config.get_text_config().hidden_size
        self._cache = context.target.new_cache(num_layers=1, num_rows=context.num_rows)
        weights = [*head.layers[0].parameters(), *head.shared_head.parameters()]
        self.num_step_weights = sum(weight.numel() for weight in weights)
        self._fused = speed_up_head(head, self._cache.max_length) if context.fast else None
        # Without the fast path sequences are padded to one length to attend side by side.
        can_share = head.config._attn_implementation == GROUPED or self._fused is not None
        self._shapes = context.target.shapes
        fast, plain = Runs(self._cache, self._shapes, can_share), partial(whole, self._cache)
        self._runs = fast if context.fast else plain
        self._sample = context.sample

    @classmethod
    def build(cls, context: Context) -> "MtpHeadDrafter":
        """Raises ValueError if the target has no MTP head, or one that cannot be loaded."""
        model = context.target.model
        text = model.config.get_text_config()
        names = ("num_mtp_layers", "mtp_num_hidden_layers")
        count = next((n for name in names if (n := getattr(text, name, None))), 0)
        if not count:
            raise ValueError(
                f"the target {context.target.name} has no MTP head (no num_mtp_layers in config): "
                "use --drafter ngram or draft_model, or a checkpoint that has one"
            )
        if not getattr(text, names[0], None):  # Qwen3-Next and Qwen3.5 have the other name
            text.num_mtp_layers = count
            text.mtp_layer_types = ["full_attention"] * count
        try:
            head = MtpModel.from_pretrained(model)
        except Exception as error:  # a family that registers no MTP weights fails in its own way
            name, reason = context.target.name, why_not_loaded(error)
            raise ValueError(f"the MTP head of {name} could not be loaded: {reason}") from error
        head.to(model.device).eval().set_attn_implementation(model.config._attn_implementation)
        if not context.mmap:
            own_weights(head)
        return cls(head, context)

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
            outputs = self._forward([states[i].row for i in active], [pairs[i] for i in active])
            logits = self._to_logits(torch.cat(outputs))  # [B, V]
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

    def _to_logits(self, outputs: Tensor) -> Tensor:
        """[B, D] -> [B, V] float32, in a number of rows that was checked."""
        num_rows = self._shapes.run_rows(len(outputs))
        padded = torch.nn.functional.pad(outputs, (0, 0, 0, num_rows - len(outputs)))
        return self._head._project_to_logits(padded[None])[0, : len(outputs)].float()

    def _forward(self, rows: list[int], pairs: list[tuple[Tensor, list[int]]]) -> list[Tensor]:
        """Run the layer over each row's pairs; returns the output [1, D] of each row's last pair.

        Row b's pair j stands at position j + 1, after what its cache row holds: the head's cache
        slot j belongs to position j + 1.
        """
        last: list[Tensor] = [None] * len(rows)
        counts = [len(tokens) for _, tokens in pairs]
        for pieces, place in self._runs(rows, counts):
            fed = [pairs[p.index][1][p.begin : p.end] for p in pieces]
            device = place.positions.device
            ids = place.arrange([torch.tensor(tokens, device=device) for tokens in fed])
            hidden = place.arrange([pairs[p.index][0][p.begin : p.end] for p in pieces])
            if self._fused:
                output = self._fused(ids, hidden, place, self._cache)
            else:
                output = self._run_layer(ids, hidden, place)
            self._cache.advance(place)
            for piece, own in zip(pieces, place.part(output), strict=True):
                last[piece.index] = own[-1:]
        return last

    def _run_layer(self, ids: Tensor, hidden: Tensor, place: Any) -> Tensor:
        """transformers' own modules on pairs (hidden and ids as the place arranges them)."""
        embeds = self._head.embed_tokens(ids)
        positions = place.positions + 1
        rope_options = (
            {"layer_type": self._head.config.layer_types[0]}
            if self._head.has_per_layer_rope
            else {}
        )
        output = self._head.layers[0](
            embeds,
            hidden.to(embeds.dtype),
            position_embeddings=self._head.rotary_emb(embeds, positions, **rope_options),
            attention_mask=place.mask(embeds.dtype),
            position_ids=positions,
            past_key_values=self._cache,
        )
        if self._head.use_shared_post_norm:
            output = self._head.shared_post_norm(output)
        return output

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
