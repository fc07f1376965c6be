"""DFlash: a head that drafts a whole block in one forward (block diffusion).

    states of some layers [N, L · D] ─ fc ─ norm ─→ context ─┐ keys and values, in every layer
    embeddings of [pending, mask, mask, …] ───────→ block ───┴→ layers ─ norm ─→ d1 d2 … of the
                                                            target's output layer

Only the block has queries. Each of its places sees the whole context and the whole block, those
behind it too; the masks are to become tokens all at once. So the tokens of a draft are chosen
independently: what was drawn for d1 is unknown to d2. A draft costs one forward, however long it
is, and the layers may be several where an EAGLE-3 head has one. Keys and values of the context
stay, those of the block are forgotten.

Embedding and output layer are the target's. Train a head with tools/train.py, or take
one of z-lab's: `--dflash FOLDER_OR_HUB_ID`.

Sources: arXiv 2602.06036; the layout of z-lab/dflash. Not covered: DFlash 2, whose convolutions and
candidate selector are refused as unknown weights; the layout of speculators.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from runtime.kernels import can_tabulate, speed_up_blocks
from runtime.models.weights import check_config, check_sizes, fill
from runtime.values import Draft, Model

from .base import Chain, Context
from .head import HeadDrafter, HeadState, check_layers, layer_config

_NEEDED = "hidden_size", "block_size", "mask_token_id", "target_layer_ids"
# Fields that change what a head computes, each with the one value that is served.
_ONLY = {
    "model_type": "qwen3",
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
_LARGEST_BLOCK = 256
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class BlockConfig:
    """What config.json says of a head."""

    layer: PreTrainedConfig  # of the layers; has the sizes
    block_size: int  # the pending token and the masks behind it
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # whose results are read
    num_target_layers: int | None = None
    is_causal: bool | None = None  # None: where a layer sees a window only

    @classmethod
    def of(cls, content: dict[str, Any]) -> "BlockConfig":
        """Read config.json. Raises ValueError for what is not supported."""
        fields = content | (content.get("dflash_config") or {})
        for name in _NEEDED:
            if fields.get(name) is None:
                raise ValueError(f"config.json has no {name}: is this a DFlash head?")
        check_config(fields, _ONLY)
        size, mask, ids = (fields[name] for name in _NEEDED[1:])
        if type(size) is not int or not 2 <= size <= _LARGEST_BLOCK:
            raise ValueError(f"block_size is {size!r}: it must be from 2 to {_LARGEST_BLOCK}")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError(f"target_layer_ids are {ids!r}, not integers")
        layer = layer_config(content, "qwen3")
        if unknown := {*layer.layer_types} - {_FULL, _SLIDING}:
            raise ValueError(f"layer_types has {min(unknown)!r}, which is not supported")
        if layer.sliding_window is not None and layer.sliding_window < 1:
            raise ValueError(f"sliding_window is {layer.sliding_window}: it must be at least 1")
        rest = fields.get("num_target_layers"), fields.get("is_causal")
        return cls(layer, size, mask, tuple(ids), *rest)

    def check(self, target: Model) -> None:
        """Raises ValueError if the head was trained for another target."""
        num_layers = target.model.config.get_text_config().num_hidden_layers
        if self.num_target_layers not in (None, num_layers):
            raise ValueError(
                f"it was trained for a target of {self.num_target_layers} layers, and "
                f"{target.name} has {num_layers}"
            )
        check_layers(self.target_layer_ids, 0, target)
        check_sizes(self.layer.hidden_size, self.layer.vocab_size, target)
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < target.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id!r}, which is no token")


class BlockKeys:
    """What a layer's block sees in the place of a KV cache: keys of the context, then the block."""

    def __init__(self, layer: nn.Module, context: Tensor, rope: list[Tensor], cache: Any) -> None:
        """The keys of an attention `layer` for context [B, N, D]; `cache`, if any, holds them."""
        shape = -1, layer.head_dim
        key = layer.k_norm(layer.k_proj(context).unflatten(-1, shape)).transpose(1, 2)
        self._key = qwen3.apply_rotary_pos_emb(key, key, *rope)[1]
        self._value = layer.v_proj(context).unflatten(-1, shape).transpose(1, 2)
        self._cache = cache

    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Add the block's keys and values [B, H, n, d]; returns all that it sees."""
        key, value = torch.cat([self._key, key], 2), torch.cat([self._value, value], 2)
        return self._cache.update(key, value) if self._cache else (key, value)


class DFlashHead(nn.Module):
    """The head's weights, named as in the public layout."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        width = layer.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(width, layer.rms_norm_eps)
        self.layers = nn.ModuleList(
            qwen3.Qwen3DecoderLayer(layer, i) for i in range(layer.num_hidden_layers)
        )
        self.norm = qwen3.Qwen3RMSNorm(width, layer.rms_norm_eps)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(layer)

    def enter(self, states: Tensor) -> Tensor:
        """The target's states [..., L · D], side by side -> the context [..., D]."""
        return self.hidden_norm(self.fc(states))

    def run(
        self, x: Tensor, context: Tensor, at: Tensor, masks: dict[str, Tensor], caches: list[Any]
    ) -> Tensor:
        """The layers over blocks x [B, n, D] behind a context [B, N, D] -> [B, n, D].

        `at` [B, N + n] are positions, the context's first. Additive masks [B, 1, n, keys] are by
        kind of attention, and caches, or None, by layer.
        """
        rope, begin = self.rotary_emb(x, at), context.shape[1]
        old, new = [table[:, :begin] for table in rope], [table[:, begin:] for table in rope]
        kinds = self.config.layer.layer_types
        for layer, kind, cache in zip(self.layers, kinds, caches, strict=True):
            keys = BlockKeys(layer.self_attn, context, old, cache)
            x = layer(x, position_embeddings=new, attention_mask=masks[kind], past_key_values=keys)
        return x


class DFlashDrafter(HeadDrafter):
    """Drafts with a DFlash head, batched over requests."""

    name: ClassVar[str] = "dflash"
    rank = 2
    title = "DFlash"

    @staticmethod
    def make_head(content: dict[str, Any], weights: dict[str, Tensor], target: Model) -> DFlashHead:
        """The head for a target; see HeadDrafter."""
        config = BlockConfig.of(content)
        config.check(target)
        expected = config.layer.num_hidden_layers
        num_layers = len({key.split(".")[1] for key in weights if key.startswith("layers.")})
        if num_layers != expected:  # layers are made before their weights are compared
            raise ValueError(f"num_hidden_layers is {expected}, and it has weights of {num_layers}")
        head = DFlashHead(config)
        fill(head, weights)
        if not can_tabulate(head.rotary_emb):
            raise ValueError("its rotations are of an unknown kind (rope_type in config.json)")
        return head

    def __init__(self, head: DFlashHead, context: Context) -> None:
        model, self._config = context.target.model, head.config
        ids, last = head.config.target_layer_ids, model.config.get_text_config().num_hidden_layers
        self.hidden_layers = tuple(i if i < last - 1 else -1 for i in ids)
        self.block_size = head.config.block_size - 1
        super().__init__(context, len(head.layers), spare=head.config.block_size)
        self._embed, self._output = model.get_input_embeddings(), model.get_output_embeddings()
        self._count_weights(head, self._output)
        self._head, self._decoder = head, None
        if context.fast:
            length = self._cache.max_length
            self._decoder = speed_up_blocks(head, length, context.quantize, self._sees)

    def _draft(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        counts = [min(limit, self.block_size) for limit in max_tokens]
        blocks, drafts = self._run(states), []
        places = torch.cat([block[1 : n + 1] for block, n in zip(blocks, counts, strict=True)])
        every = self._output(self._head.norm(places)).float().split(counts)
        for state, logits in zip(states, every, strict=True):
            chain = Chain(state, len(logits))
            while chain.is_open:
                chain.extend(logits[len(chain.tokens)])
            drafts.append(chain.draft())
        for state in states:
            state.hidden[0] = []
        return drafts

    def _run(self, states: list[HeadState]) -> Tensor:
        """The layers over each text's block [B, block_size, D]; caches contexts and blocks."""
        size, cache, rows = self._config.block_size, self._cache, [state.row for state in states]
        hidden = [torch.cat(state.hidden[0]) for state in states]  # since the last draft
        place = cache.place(rows, [len(new) + size for new in hidden])
        ids = [[state.text[-1]] + [self._config.mask_token_id] * (size - 1) for state in states]
        x = self._embed(torch.tensor(ids, device=cache.device))
        context = self._head.enter(torch.cat(hidden))
        if self._decoder:
            x = self._decoder(cache, place, context, x)
        else:
            parts = context.split(list(map(len, hidden)))
            context = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side="left")
            kinds = dict.fromkeys(self._config.layer.layer_types)
            masks = {kind: place.mask(x.dtype, *self._sees(kind), size) for kind in kinds}
            x = self._head.run(x, context, place.positions, masks, cache.layers)
        cache.advance(place)
        return x

    def _sees(self, kind: str) -> tuple[int | None, bool]:
        """How many tokens a kind of attention sees (None: all), and whether it looks ahead."""
        is_sliding, is_causal = kind == _SLIDING, self._config.is_causal
        window = self._config.layer.sliding_window if is_sliding else None
        return window, not (is_sliding if is_causal is None else is_causal)
