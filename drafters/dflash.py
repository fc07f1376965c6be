"""DFlash: a head that drafts a whole block in one forward (block diffusion).

    states of some layers [N, L · D] ─ fc ─ norm ─→ context ─┐ keys and values, in every layer
    embeddings of [pending, mask, mask, …] ───────→ block ───┴→ layers ─ norm ─→ d1 d2 … of the
                                                            target's output layer

Only the block has queries. Each of its places sees the whole context and the whole block, those
behind it too; the masks are to become tokens all at once. So the tokens of a draft are chosen
independently: what was drawn for d1 is unknown to d2. A draft costs one forward, however long it
is, and the layers may be several where an EAGLE-3 head has one. Keys and values of the context
stay, those of the block are forgotten.

Embedding and output layer are the target's. Train a head with demo_models/train.py, or take
one of z-lab's: `--dflash FOLDER_OR_HUB_ID`.

Sources: arXiv 2602.06036; the layout of z-lab/dflash. Not covered: DFlash 2, whose convolutions and
candidate selector are refused as unknown weights; the layout of speculators.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from kernels import library
from kernels.decoder import FULL, MOST_ROWS, Rows, can_tabulate
from kernels.files import check_fields, check_sizes, fill, read_folder, reading
from kernels.head import look_ahead
from kernels.weights import DTYPES, pack
from messages import Draft, Model

from .base import Chain, Context
from .head import HeadState, StateReader

_NEEDED = "hidden_size", "block_size", "mask_token_id", "target_layer_ids"
# Fields that change what a head computes, each with the one value that is served.
_ONLY = {
    "model_type": "qwen3",
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
_LARGEST_BLOCK = 256
_SLIDING = "sliding_attention"


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
        given = content | (content.get("dflash_config") or {})
        for name in _NEEDED:
            if given.get(name) is None:
                raise ValueError(f"config.json has no {name}: is this a DFlash head?")
        check_fields(given, _ONLY)
        size, mask, ids = (given[name] for name in _NEEDED[1:])
        if type(size) is not int or not 2 <= size <= _LARGEST_BLOCK:
            raise ValueError(f"block_size is {size!r}: it must be from 2 to {_LARGEST_BLOCK}")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError(f"target_layer_ids are {ids!r}, not integers")
        layer = AutoConfig.for_model(**{"model_type": "qwen3"} | content)
        layer._attn_implementation = "sdpa"
        if unknown := {*layer.layer_types} - {FULL, _SLIDING}:
            raise ValueError(f"layer_types has {min(unknown)!r}, which is not supported")
        rest = given.get("num_target_layers"), given.get("is_causal")
        return cls(layer, size, mask, tuple(ids), *rest)

    def check(self, target: Model) -> None:
        """Raises ValueError if the head was trained for another target."""
        num_layers = target.model.config.get_text_config().num_hidden_layers
        if self.num_target_layers not in (None, num_layers):
            raise ValueError(
                f"it was trained for a target of {self.num_target_layers} layers, and "
                f"{target.name} has {num_layers}"
            )
        for i in self.target_layer_ids:
            if not 0 <= i < num_layers:
                raise ValueError(f"it reads layer {i}, and can read 0 to {num_layers - 1}")
        check_sizes(self.layer.hidden_size, self.layer.vocab_size, target)
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < target.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id!r}, which is no token")


class DFlashHead(nn.Module):
    """The head's weights, named as in the public layout."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        width = layer.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, layer.rms_norm_eps)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(layer, i) for i in range(layer.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(width, layer.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layer)


class DFlashDrafter(StateReader):
    """Drafts with a DFlash head, batched over requests."""

    name: ClassVar[str] = "dflash"

    def __init__(self, head: DFlashHead, context: Context) -> None:
        model, self._config = context.target.model, head.config
        ids, last = head.config.target_layer_ids, model.config.get_text_config().num_hidden_layers
        self.hidden_layers = tuple(i if i < last - 1 else -1 for i in ids)
        self.drafts_at_once = head.config.block_size - 1
        super().__init__(context, len(head.layers), spare=head.config.block_size)
        self._embed, self._output = model.get_input_embeddings(), model.get_output_embeddings()
        weights = [*head.parameters(), *self._output.parameters()]
        self.num_step_weights = sum(weight.numel() for weight in weights)
        self._head, self._decoder = head, None
        is_ours = context.fast and library.is_used and head.norm.weight.dtype in DTYPES
        if is_ours and head.norm.weight.device.type == "cpu":
            length = self._cache.max_length
            self._decoder = look_ahead(head, length, context.quantize, self._sees)
            pack(head, context.quantize)

    @classmethod
    def build(cls, context: Context) -> "DFlashDrafter":
        """Raises ValueError without a head, or with one of another target."""
        if context.dflash is None:
            raise ValueError("the drafter dflash needs a head: give --dflash DIR_OR_HUB_ID")
        with reading(f"DFlash head {context.dflash}"):
            content, weights = read_folder(context.dflash, context.allow_pickle)
            config = BlockConfig.of(content)
            config.check(context.target)
            head = DFlashHead(config)
            fill(head, weights)
            like = context.target.model.get_input_embeddings().weight
            head = head.to(like.device, like.dtype).eval()
            # Rotations stay in float32, as transformers keeps them.
            head.rotary_emb = Qwen3RotaryEmbedding(config.layer).to(like.device)
            if not can_tabulate(head.rotary_emb):
                raise ValueError("its rotations are of an unknown kind (rope_type in config.json)")
            return cls(head, context)

    def _draft(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        size, cache = self._config.block_size, self._cache
        counts = [min(limit, self.drafts_at_once) for limit in max_tokens]
        order = sorted(range(len(states)), key=lambda i: cache.slot(states[i].row))
        blocks = dict(zip(order, self._run([states[i] for i in order]), strict=True))
        places = torch.cat([blocks[i][1 : count + 1] for i, count in enumerate(counts)])
        drafts = []
        for state, logits in zip(states, self._logits(places).split(counts), strict=True):
            chain = Chain(state, len(logits))
            while chain.is_open:
                chain.extend(logits[len(chain.tokens)], self._sample)
            drafts.append(chain.draft())
        for state in states:
            cache.truncate(state.row, cache.lengths[state.row] - size)
            state.hidden[0] = []
        return drafts

    def _run(self, states: list[HeadState]) -> Tensor:
        """The layers over each text's block [B, block_size, D]; caches contexts and blocks."""
        size, cache, rows = self._config.block_size, self._cache, [state.row for state in states]
        hidden = [
            torch.cat(state.hidden[0]) for state in states
        ]  # [N, L · D], since the last draft
        place = cache.place(rows, [len(new) + size for new in hidden])
        slots, positions = self._where(place.slots, rows, [len(new) for new in hidden])
        context = self._head.hidden_norm(self._head.fc(torch.cat(hidden)))
        ids = [[state.text[-1]] + [self._config.mask_token_id] * (size - 1) for state in states]
        x = self._embed(self._tensor(ids)).flatten(0, 1)
        if self._decoder:
            x = self._compute(x, context, slots, positions)
        else:
            x = self._run_modules(x, context, slots, positions, place)
        cache.advance(place)
        return x.unflatten(0, (len(states), size))

    def _compute(self, x: Tensor, context: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """In C: the contexts' keys and values, and then the blocks, which look ahead."""
        decoder, size = self._decoder, self._config.block_size
        decoder.follow(self._cache)
        blocks, contexts = Rows(), Rows()
        for part, some in ((blocks, slice(len(x))), (contexts, slice(len(x), None))):
            part.slots, part.positions = slots[some].tolist(), positions[some].tolist()
            part.places = part.positions
        contexts.ends = [position + 1 for position in contexts.positions]
        for rows, given in zip(contexts.parts(), context.split(MOST_ROWS), strict=True):
            decoder(rows, given, only_keys=True)
        last = blocks.positions[size - 1 :: size]
        blocks.ends = [position + 1 for position in last for _ in range(size)]
        _, found = decoder(blocks, x, layers=(-1,))
        return found[-1].to(x.dtype)

    def _run_modules(
        self, x: Tensor, context: Tensor, slots: Tensor, positions: Tensor, place: Any
    ) -> Tensor:
        """By transformers' modules."""
        head, shape = self._head, (len(place.slots), self._config.block_size)
        rope = [table[0].to(x.dtype) for table in head.rotary_emb(x, positions[None])]
        masks = self._masks(positions[: len(x)].view(shape), place.end, x.dtype)
        for layer, cached, kind in zip(head.layers, self._cache.layers, self._kinds, strict=True):
            own = layer.self_attn
            read = torch.cat([layer.input_layernorm(x), context])
            query, key, value = (
                part(read).unflatten(-1, (-1, own.head_dim))
                for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            query, key = apply_rotary_pos_emb(own.q_norm(query), own.k_norm(key), *rope)
            if not cached.is_initialized:
                cached.lazy_initialization(*(part[None].transpose(1, 2) for part in (key, value)))
            cached.keys[slots, :, positions] = key
            cached.values[slots, :, positions] = value
            keys, values = (
                buffer[place.slots, :, : place.end] for buffer in (cached.keys, cached.values)
            )
            query = query[: len(x)].unflatten(0, shape).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(
                query, keys, values, masks[kind], scale=own.scaling, enable_gqa=True
            )
            x = x + own.o_proj(attended.transpose(1, 2).flatten(2).flatten(0, 1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

    def _where(self, slots: list[int], rows: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Slot and position of each token of a pass: all blocks first, then the new contexts."""
        size, held = self._config.block_size, [self._cache.lengths[row] for row in rows]
        new = list(zip(slots, held, counts, strict=True))
        spans = [(slot, at + count, size) for slot, at, count in new] + new
        return (
            self._tensor([slot for slot, _, count in spans for _ in range(count)]),
            self._tensor([at + i for _, at, count in spans for i in range(count)]),
        )

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self._cache.device)

    @property
    def _kinds(self) -> list[str]:
        """Of attention, layer by layer."""
        return self._config.layer.layer_types

    def _sees(self, kind: str) -> tuple[bool, int | None]:
        """Whether a kind of attention looks ahead in its block, and how far back it sees."""
        is_sliding, is_causal = kind == _SLIDING, self._config.is_causal
        window = self._config.layer.sliding_window if is_sliding else None
        return not (is_sliding if is_causal is None else is_causal), window or None

    def _masks(self, positions: Tensor, num_keys: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """By kind of attention what blocks at `positions` [B, size] see: additive."""
        keys, queries = self._tensor(range(num_keys)), positions[:, None, :, None]
        masks = {}
        for kind in dict.fromkeys(self._kinds):
            looks_ahead, window = self._sees(kind)
            seen = keys <= (queries[:, :, -1:] if looks_ahead else queries)
            seen = seen.expand(-1, -1, positions.shape[1], -1)
            if window:
                seen = seen & (keys > queries - window)
            masks[kind] = torch.zeros_like(seen, dtype=dtype).masked_fill_(
                ~seen, torch.finfo(dtype).min
            )
        return masks

    def _to_logits(self, outputs: Tensor) -> Tensor:
        return self._output(self._head.norm(outputs))
