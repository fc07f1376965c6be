"""The plain decoder block (Llama's, with or without Qwen3's norms of queries and keys), fused.

A small model's time is the overhead of its operations, so fewer of them are the gain: one linear
layer for queries, keys and values, one for gate and up, norm and rotation of queries and keys in
one go, rotations and masks from tables. It computes what transformers' modules compute, in another
order of rounding.

Blocks are chosen by structure: by the names of their parts, whatever the family is called. That two
models with the same parts may still differ (a multiplier here, a skipped rotation there) is why
`fuse` compares both on random tokens, and keeps the module unless the results agree.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .activation import steady
from .attention import CausalMasks, Ragged, additive, attend, causal_mask, grouped_mask
from .linear import JoinedLinear, Kind, Weights

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORM_PARTS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Where(Protocol):
    """Where a forward's rows stand in their texts; the core's Place is one."""

    positions: Tensor  # [1, N], as the rows are
    end: int  # one more than the last position
    kv_length: int


Rope = tuple[Tensor, Tensor]  # cos and signed sin (see `sign`), [B, T, 1, head_dim] each


class RMSNorm:
    """x over the root of its mean square, times weight; in float32 inside, as the models' own."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight = weight.detach()
        self._epsilon = torch.tensor(epsilon, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        wide = x if x.dtype is torch.float32 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scaled = wide * torch.addcmul(self._epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (scaled if x is wide else scaled.to(x.dtype)).mul_(self.weight)


class FusedBlock(nn.Module):
    """Takes a decoder block's place; transformers may call it as it called that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx, self.scaling = attention.layer_idx, attention.scaling
        self.head_dim = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.input_norm = norm_of(layer.input_layernorm)
        self.post_norm = norm_of(layer.post_attention_layernorm)
        self.qk_norm: RMSNorm | None = None
        if hasattr(attention, "q_norm"):
            weights = [attention.q_norm.weight] * self.num_heads
            weights += [attention.k_norm.weight] * self.num_kv_heads
            self.qk_norm = RMSNorm(torch.stack(weights), attention.q_norm.variance_epsilon)
        self.qkv = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = JoinedLinear([attention.o_proj])
        self.gate_up = JoinedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = JoinedLinear([mlp.down_proj])
        gate = mlp.gate_proj.weight
        self.activation = steady(mlp.act_fn, len(gate), gate.dtype)

    @property
    def groups(self) -> int:
        """Query heads per head of keys and values."""
        return self.num_heads // self.num_kv_heads

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> what attention reads, and what its result is added to."""
        return self.input_norm(x), x

    def run(
        self, x: Tensor, rope: Rope, mask: Tensor, cache: Any, ragged: Ragged | None = None
    ) -> Tensor:
        """What `read` takes -> [B, T, D] under a grouped mask. Keys and values go to the cache.

        With `ragged` x is [N, D]: only attention needs rows of one length.
        """
        read, x = self.read(x)
        heads = self.qkv.compute(read).view(*x.shape[:-1], -1, self.head_dim)
        rotated, value = heads[..., : -self.num_kv_heads, :], heads[..., -self.num_kv_heads :, :]
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated)
        cos, sin = rope
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin)
        query, key = rotated[..., : self.num_heads, :], rotated[..., self.num_heads :, :]
        if ragged is None:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended = attend(query, key, value, mask, self.scaling, ragged)
        x = self.out.compute(attended, x)
        gate, up = self.gate_up.compute(self.post_norm(x)).chunk(2, -1)
        return self.down.compute(self.activation(gate).mul_(up), x)

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
        cos, sin = position_embeddings
        count = hidden_states.shape[1]
        if attention_mask is None:  # left out where causal order says it all
            length = count
            if past_key_values is not None:
                length += past_key_values.get_seq_length(self.layer_idx)
            attention_mask = causal_mask(count, length, hidden_states)
        if attention_mask.dtype == torch.bool:
            attention_mask = additive(attention_mask, hidden_states.dtype)
        mask = grouped_mask(attention_mask, self.groups)
        rope = cos.unsqueeze(2), sign(sin).unsqueeze(2)
        return self.run(hidden_states, rope, mask, past_key_values)

    def join(self, kind: Kind = Weights) -> None:
        """Pack the weights, and let go of the module's."""
        for part in (self.qkv, self.out, self.gate_up, self.down):
            part.join(kind)


class FusedEagleBlock(FusedBlock):
    """The first layer of an EAGLE-3 head: x is [embedding, state], side by side."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.hidden_norm = norm_of(layer.hidden_norm)
        self.norm_before_residual = layer.norm_before_residual

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, 2 D] -> what attention reads [B, T, 2 D], what it adds to [B, T, D]."""
        embeds, state = x.chunk(2, -1)
        normed = self.hidden_norm(state)
        read = torch.cat([self.input_norm(embeds), normed], -1)
        return read, normed if self.norm_before_residual else state.contiguous()


def sign(sin: Tensor) -> Tensor:
    """Rotating x by cos, sin is then x · cos + (x with its halves swapped) · signed sin."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


def norm_of(module: nn.Module) -> RMSNorm:
    """The same norm in fewer operations."""
    return RMSNorm(module.weight, module.variance_epsilon)


class FusedStack:
    """Blocks with the tables that they share: rotations and masks, per kind of layer."""

    def __init__(
        self,
        blocks: Sequence[FusedBlock],
        kinds: Sequence[str],
        windows: dict[str, int | None],
        rotary: Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]],
        length: int,
    ) -> None:
        """kinds[i] is block i's kind of attention; `rotary` (x, positions, kind) gives cos, sin."""
        self.blocks, self._kinds = blocks, kinds
        weight = blocks[0].input_norm.weight
        positions = torch.arange(length + 1, device=weight.device)[None]
        self._ropes: dict[str, Rope] = {}
        self._masks: dict[str, CausalMasks] = {}
        for kind in dict.fromkeys(kinds):
            cos, sin = rotary(weight.new_zeros(1, 1, 1), positions, kind)
            self._ropes[kind] = cos.unsqueeze(2), sign(sin).unsqueeze(2)  # [1, length, 1, D]
            self._masks[kind] = CausalMasks(
                blocks[0].groups, length, windows[kind], weight.dtype, weight.device
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
        ropes, masks = {}, {}
        ragged: Ragged | None = getattr(where, "ragged", None)  # several texts have it
        queries, start = where.positions, where.end - x.shape[1]
        if ragged is not None:
            queries, start = ragged.queries, -1
        start = None if start < 0 else start  # positions then do not follow one another
        at = slice(start + shift, start + shift + x.shape[1]) if start is not None else None
        for kind, (cos, sin) in self._ropes.items():
            rows = where.positions + shift if at is None else (slice(None), at)
            cos, sin = (table[0, rows] if at is None else table[rows] for table in (cos, sin))
            ropes[kind] = (cos, sin) if ragged is None else (cos[0], sin[0])
            masks[kind] = self._masks[kind].of(queries, start, where.kv_length)
        if ragged is not None:
            x = x[0]
        for i, (block, kind) in enumerate(zip(self.blocks, self._kinds, strict=True)):
            x = block.run(x, ropes[kind], masks[kind], cache, ragged)
            if states and i in states:
                states[i] = x if ragged is None else x[None]
        return x if ragged is None else x[None]


def is_plain_block(layer: nn.Module) -> bool:
    """Whether a decoder layer consists of the plain block's parts and no others."""
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    attention = {name for name, _ in layer.self_attn.named_children()}
    mlp = {name for name, _ in layer.mlp.named_children()}
    if attention not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _NORM_PARTS) or mlp != _MLP_PARTS:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if attention & _NORM_PARTS:
        heads = [layer.self_attn.q_norm, layer.self_attn.k_norm]
        if any(norm.weight.shape != (layer.self_attn.head_dim,) for norm in heads):
            return False
        norms += heads
    linears = [getattr(layer.self_attn, name) for name in _ATTENTION_PARTS]
    linears += [getattr(layer.mlp, name) for name in _MLP_PARTS - {"act_fn"}]
    return all(hasattr(norm, "variance_epsilon") for norm in norms) and all(
        type(linear) is nn.Linear for linear in linears
    )
