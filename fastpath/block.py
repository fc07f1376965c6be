"""The decoder block of most families, fused.

    x → norm → queries, keys, values → norm, rotation → attention → out → norm → + x
    x → norm → gate and up → activation → down → norm → + x

Every norm and the rotation may be missing. A small model's time is the overhead of its operations,
so fewer of them are the gain: one linear layer for queries, keys and values, one for gate and up,
norm and rotation of queries and keys in one go, rotations and masks from tables. It computes what
transformers' modules compute, in another order of rounding.

Blocks are chosen by structure: by the names of their parts, whatever the family is called. That two
models with the same parts may still differ (a multiplier here, a skipped rotation there) is why
whoever fuses (decoder.py) compares both on random tokens, and keeps the module unless they agree.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.parts import Parts, RMSNorm, linear_of, norm_of

from .activation import sigmoid, steady
from .attention import CausalMasks, Ragged, additive, attend, causal_mask, grouped_mask
from .linear import JoinedLinear, Kind, Weights


class Where(Protocol):
    """Where a forward's rows stand in their texts; the core's Place is one."""

    positions: Tensor  # [1, N], as the rows are
    end: int  # one more than the last position
    kv_length: int


Rope = tuple[Tensor, Tensor]  # cos and signed sin (see `sign`), [B, T, 1, head_dim] each


class FusedBlock(nn.Module):
    """Takes a decoder block's place; transformers may call it as it called that."""

    has_other_inputs = False  # than a hidden state
    is_recurrent = False

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.set_attention(parts)
        before, after, self.mlp_norm, self.down_norm = (n and norm_of(n) for n in parts.norms)
        self.input_norm, self.out_norm = before, after
        self.qkv, self.out = JoinedLinear([*parts.qkv, *parts.gates]), JoinedLinear([parts.out])
        self.gate_up, self.down = JoinedLinear(parts.up), JoinedLinear([parts.down])
        down = linear_of(parts.down)[0]
        self.is_gated, self.activation_name = parts.is_gated, type(parts.activation).__name__
        self.activation = steady(parts.activation, down.shape[1], down.dtype)

    def set_attention(self, parts: Parts) -> None:
        """What attention needs to know, and its norms."""
        attention = parts.attention
        self.layer_idx, self.scaling = attention.layer_idx, attention.scaling
        self.softcap = getattr(attention, "attn_logit_softcapping", None)
        self.head_dim = attention.head_dim
        widths = [len(linear_of(layer)[0]) // self.head_dim for layer in parts.qkv]
        self.groups: int = getattr(attention, "num_key_value_groups", 1)  # query heads per key's
        self.num_kv_heads = sum(widths) // (self.groups + 2)
        self.num_heads = self.groups * self.num_kv_heads
        self.num_gates = sum(len(linear_of(layer)[0]) for layer in parts.gates)
        self.qk_norm: RMSNorm | None = None
        self.wide_norms = [norm_of(norm) for norm in parts.qk_norms]  # over all heads at once
        if parts.qk_norms and parts.qk_norms[0].weight.shape == (self.head_dim,):
            query, key = self.wide_norms
            weights = [query.weight] * self.num_heads + [key.weight] * self.num_kv_heads
            self.qk_norm, self.wide_norms = RMSNorm(torch.stack(weights), query.epsilon), []

    @property
    def like(self) -> Tensor:
        """Of the type and on the device of what the block computes with."""
        return next(n for n in (self.input_norm, self.out_norm) if n is not None).weight

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> what attention reads, and what its result is added to."""
        return x if self.input_norm is None else self.input_norm(x), x

    def run(
        self,
        x: Tensor,
        rope: Rope | None,
        mask: Tensor,
        cache: Any,
        ragged: Ragged | None = None,
    ) -> Tensor:
        """What `read` takes -> [B, T, D] under a grouped mask. Keys and values go to the cache.

        With `ragged` x is [N, D]: only attention needs rows of one length.
        """
        read, x = self.read(x)
        joined = self.qkv.compute(read)
        if self.num_gates:
            joined, gate = joined.tensor_split([joined.shape[-1] - self.num_gates], -1)
        query, key, value = self.heads(joined, rope)
        if ragged is None:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended = attend(query, key, value, mask, self.scaling, ragged, self.softcap)
        return self.finish(x, attended * sigmoid(gate) if self.num_gates else attended)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What attention is added to [..., D], and its result by heads -> the block's [..., D]."""
        x = _added(self.out, attended, self.out_norm, x)
        inner = self.gate_up.compute(x if self.mlp_norm is None else self.mlp_norm(x))
        if self.is_gated:
            gate, up = inner.chunk(2, -1)
            inner = self.activation(gate).mul_(up)
        else:
            inner = self.activation(inner)
        return _added(self.down, inner, self.down_norm, x)

    def heads(self, joined: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side -> [..., heads, head_dim] each, rotated."""
        if self.wide_norms:
            widths = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads)]
            query, key, value = joined.split([*widths, widths[-1]], -1)
            query_norm, key_norm = self.wide_norms
            joined = torch.cat([query_norm(query), key_norm(key), value], -1)
        heads = joined.unflatten(-1, (-1, self.head_dim))
        rotated, value = heads[..., : -self.num_kv_heads, :], heads[..., -self.num_kv_heads :, :]
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated)
        if rope is not None:
            rotated = rotate(rotated, *rope)
        return rotated[..., : self.num_heads, :], rotated[..., self.num_heads :, :], value

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor:
        """As transformers calls it: position_embeddings are cos and sin, [B, T, head_dim]."""
        count = hidden_states.shape[1]
        if attention_mask is None:  # left out where causal order says it all
            length = count
            if past_key_values is not None:
                length += past_key_values.get_seq_length(self.layer_idx)
            attention_mask = causal_mask(count, length, hidden_states)
        if attention_mask.dtype == torch.bool:
            attention_mask = additive(attention_mask, hidden_states.dtype)
        mask, rope = grouped_mask(attention_mask, self.groups), None
        if position_embeddings is not None:
            cos, sin = position_embeddings
            rope = cos.unsqueeze(2), sign(sin).unsqueeze(2)
        return self.run(hidden_states, rope, mask, past_key_values)

    def join(self, kind: Kind = Weights) -> None:
        """Pack the weights, and let go of the module's."""
        for part in (self.qkv, self.out, self.gate_up, self.down):
            part.join(kind)


class FusedPositionalBlock(FusedBlock):
    """GPT-2's, whose positions are embeddings, and which transformers calls in another order."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """As transformers calls it."""
        return super().forward(hidden_states, attention_mask, None, past_key_values)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] by cos and signed sin [..., width]: its first `width` numbers, or all."""
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    turned = torch.addcmul(turned * cos, turned.roll(width // 2, -1), sin)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)


def sign(sin: Tensor) -> Tensor:
    """Rotating x by cos, sin is then x · cos + (x with its halves swapped) · signed sin."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


def _added(
    layer: JoinedLinear, x: Tensor, norm: Callable[[Tensor], Tensor] | None, residual: Tensor
) -> Tensor:
    """The layer's output, normed if need be, added to the residual."""
    return layer.compute(x, residual) if norm is None else norm(layer.compute(x)).add_(residual)


class FusedStack:
    """Blocks with the tables that they share: rotations and masks, per kind of layer."""

    def __init__(
        self,
        blocks: Sequence[FusedBlock],
        kinds: Sequence[str],
        windows: dict[str, int | None],
        rotary: Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]] | None,
        length: int,
    ) -> None:
        """kinds[i] is block i's kind of attention; `rotary` (x, positions, kind) gives cos, sin."""
        self.blocks, self._kinds, self._windows = blocks, kinds, windows
        weight = blocks[0].like
        positions = torch.arange(length + 1, device=weight.device)[None]
        self._ropes: dict[str, Rope] = {}  # [1, length, 1, D]
        self._masks: dict[str, CausalMasks] = {}
        by_kind = dict(zip(kinds, blocks, strict=True))
        for kind in (kind for kind, block in by_kind.items() if not block.is_recurrent):
            if rotary is not None:
                cos, sin = rotary(weight.new_zeros(1, 1, 1), positions, kind)
                self._ropes[kind] = cos.unsqueeze(2), sign(sin).unsqueeze(2)
            self._masks[kind] = CausalMasks(
                by_kind[kind].groups, length, windows[kind], weight.dtype, weight.device
            )

    def __call__(
        self,
        x: Tensor,
        where: Where,
        cache: Any,
        shift: int = 0,
        states: dict[int, Any] | None = None,
    ) -> Tensor:
        """x [1, N, D] -> [1, N, D].

        A token is rotated as if it stood `shift` positions further on. `states` is given what comes
        out of those blocks that it names.
        """
        states = states or {}
        ragged: Ragged | None = getattr(where, "ragged", None)  # several texts have it
        start: int | None = where.end - x.shape[1]
        if ragged is not None or start < 0:  # positions do not follow one another
            rows, start = where.positions[0] + shift, None
        else:
            rows = slice(start + shift, start + shift + x.shape[1])
        ropes = {  # [N, 1, D] each
            kind: (cos[0, rows], sin[0, rows]) for kind, (cos, sin) in self._ropes.items()
        }
        if ragged is None:
            masks = self._masks_of(where.positions, start, where)
            ropes = {kind: (cos[None], sin[None]) for kind, (cos, sin) in ropes.items()}
        else:
            masks, x = self._masks_of(ragged.queries, start, where), x[0]
        for i, (block, kind) in enumerate(zip(self.blocks, self._kinds, strict=True)):
            x = block.run(x, ropes.get(kind), masks.get(kind), cache, ragged)
            if i in states:
                states[i] = x if ragged is None else x[None]
        return x if ragged is None else x[None]

    def _masks_of(self, queries: Tensor, start: int | None, where: Where) -> dict[str, Tensor]:
        """By kind of attention; `start` as for CausalMasks.of."""
        return {
            kind: table.of(queries, start, where.kv_length) for kind, table in self._masks.items()
        }
