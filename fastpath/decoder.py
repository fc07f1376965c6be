"""Whole forwards made of plain blocks, and what does as much for other models.

    ids → embedding → blocks (block.py), rotations and masks from tables → norm → logits

`speed_up_modules` looks at a model of transformers and does what it can: attention without copies
(attention.py), packed linear layers (linear.py), and for a stack of plain blocks the forward above.
`speed_up_head` does it for an MTP head. Either compares old and new on random tokens first, and
lets go of the modules' own weights only then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels import library
from kernels.head import KernelHead, eagle_layer, mtp_layer
from kernels.parts import is_same, norm_of, parts_of
from kernels.weights import Gone
from kernels.weights import pack as pack_in_panels

from . import attention
from .activation import make_steady
from .attention import FULL
from .block import (
    FusedBlock,
    FusedPositionalBlock,
    FusedStack,
    Where,
)
from .delta import DeltaBlock
from .int8 import Int8Weights, quantise_embedding
from .linear import Kind, Weights, pack

KINDS: dict[str | None, Kind] = {None: Weights, "int8": Int8Weights}  # by --quantize

Windows = dict[str, int | None]  # by kind of layer, how far back it sees; None: all the way
_NUM_COMPARED = 8  # tokens that old and new are compared on


class OneText(NamedTuple):
    """Where the tokens of one text go (see Where in block.py): all of it, from the first on."""

    positions: Tensor  # [1, T]
    end: int
    kv_length: int


class FusedDecoder:
    """The forward of a causal language model whose layers are all plain blocks."""

    def __init__(self, model: Any, length: int, windows: Windows) -> None:
        """For sequences of up to `length` tokens, with the model's own weights until `join`."""
        decoder, config = model.get_decoder(), model.config.get_text_config()
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        layers, last_norm = layers_of(decoder)
        self._norm = norm_of(last_norm)
        self._positions: nn.Module | None = getattr(decoder, "wpe", None)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        kinds = getattr(config, "layer_types", None) or [FULL] * len(layers)
        plain = FusedBlock if self._positions is None else FusedPositionalBlock
        parts = [parts_of(layer) for layer in layers]
        self.blocks = [(DeltaBlock if p.is_recurrent else plain)(p) for p in parts]
        rotary = None if self._positions is not None else rotary_of(decoder.rotary_emb)
        self._stack = FusedStack(self.blocks, kinds, windows, rotary, length)

    def join(self, kind: Kind = Weights) -> None:
        """Pack the blocks' weights, and let go of the modules'."""
        for block in self.blocks:
            block.join(kind)

    @torch.inference_mode()
    def __call__(
        self,
        ids: Tensor,
        where: Where,
        cache: Any,
        wanted: Tensor,
        shift: int = 0,
        layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Of ids [1, N]: logits [1, n, V] of the rows `wanted` [n], hidden states [1, N, D].

        Hidden states are those behind the blocks in `layers`; -1 is behind the final norm.
        """
        states: dict[int, Tensor] = dict.fromkeys(layers)
        x = self._embed(ids)
        if self._positions is not None:
            x = x + self._positions(where.positions + shift)
        hidden = self._norm(self._stack(x, where, cache, shift, states))
        logits = self._head(hidden[:, wanted])
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits, states | ({-1: hidden} if -1 in states else {})


def rotary_of(module: nn.Module) -> Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]]:
    """transformers' rotary embedding as a function of (x, positions, kind of layer)."""
    if isinstance(module.rope_type, dict):
        return module
    return lambda x, positions, kind: module(x, positions)


def layers_of(decoder: Any) -> tuple[Any, Any]:
    """A decoder's layers and last norm, by the names of most families or by GPT-2's."""
    if hasattr(decoder, "h"):
        return decoder.h, getattr(decoder, "ln_f", None)
    return getattr(decoder, "layers", None), getattr(decoder, "norm", None)


def can_tabulate(decoder: Any, head_dim: int, is_partial: bool = False) -> bool:
    """Whether it rotates whole heads, by the position alone and not by the length of the text.

    With `is_partial` a part of each head will do.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or any(k in str(rotary.rope_type) for k in ("dynamic", "longrope")):
        return False
    x, position = next(decoder.parameters()).new_zeros(1, 1, 1), torch.zeros(1, 1).long()
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else (FULL,)
    turned = (rotary_of(rotary)(x, position.to(x.device), kind)[0].shape[-1] for kind in kinds)
    return all(width == head_dim or is_partial and width < head_dim for width in turned)


@torch.inference_mode()
def fused_decoder(model: Any, length: int, windows: Windows) -> FusedDecoder | None:
    """The model's fused forward, if its structure has one and it computes the same."""
    decoder = model.get_decoder()
    layers, last_norm = layers_of(decoder)
    if not layers or last_norm is None or norm_of(last_norm) is None:
        return None
    parts = list(map(parts_of, layers))
    if not all(parts):
        return None
    heads = [p.attention for p in parts if not p.is_recurrent]
    if not heads:
        return None
    is_gated = any(p.gates for p in parts)  # which runs in Python, where parts of heads may turn
    if not hasattr(decoder, "wpe") and not can_tabulate(decoder, heads[0].head_dim, is_gated):
        return None
    fused, count = FusedDecoder(model, length, windows), min(_NUM_COMPARED, length)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0))
    ids, positions = ids.to(model.device), torch.arange(count, device=model.device)[None]
    where = OneText(positions, count, count)
    table = getattr(decoder, "wpe", None)
    last = (length if table is None else min(length, table.num_embeddings)) - count
    for shift in (0, last):  # far on, too: some families scale by the position
        actual, _ = fused(ids, where, None, positions[0], shift)
        expected = model(ids, position_ids=positions + shift, use_cache=False).logits
        # A delta net norms sums that may nearly cancel, and so enlarges what was rounded in them.
        if not is_same(actual, expected, 32 if len(heads) == len(parts) else 1024):
            return None
    return fused


def speed_up_modules(
    model: Any, length: int, windows: Windows, quantize: str | None = None
) -> FusedDecoder | None:
    """Make a model of transformers faster, in place. Its results stay, but for rounding.

    `windows` says how far back each kind of layer sees. Returns the fused forward for sequences of
    up to `length` tokens where there is one; the model itself can still be called. Where layers are
    to become integers, `quantise_modules` has to follow: until then nothing is packed.
    """
    attention.register()
    fused = fused_decoder(model, length, windows)
    if model._supports_attention_backend or model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(attention.NAME)
    if fused:
        layers, _ = layers_of(model.get_decoder())
        for i, block in enumerate(fused.blocks):
            layers[i] = block
    else:
        make_steady(model)
    if not quantize:
        pack_modules(model, fused, Weights)
    return fused


def pack_modules(model: Any, fused: FusedDecoder | None, kind: Kind) -> None:
    """Pack all linear layers of a model, and let go of the module's weights."""
    if fused:
        fused.join(kind)
    pack(model, kind)


def quantise_modules(
    model: Any, fused: FusedDecoder | None, quantize: str, has_own_embedding: bool = True
) -> None:
    """Turn the layers of a model into integers; and its embedding, if it is its own."""
    if has_own_embedding:
        quantise_embedding(model)
    pack_modules(model, fused, KINDS[quantize])


def speed_up_head(
    head: Any, target: Any, length: int, quantize: str | None = None
) -> list[KernelHead]:
    """The layers of an MTP head (transformers' MtpModel) in C: all of them, or none.

    The layers that it shares with its target are packed when the target's are.
    """
    found = []
    for number in range(len(head.layers)) if library.is_used else ():
        found.append(mtp_layer(head, number, length))
        if found[-1] is None:
            break
    return _settle(head, found, quantize, target)


def speed_up_eagle(head: Any, length: int, quantize: str | None = None) -> list[KernelHead]:
    """The same for an EAGLE-3 head."""
    return _settle(head, [eagle_layer(head, length)] if library.is_used else [], quantize)


def _settle(
    head: Any, found: list[KernelHead | None], quantize: str | None, besides: Any = None
) -> list[KernelHead]:
    """Let the head's modules go, or keep them where a layer is not known."""
    layers = [layer for layer in found if layer is not None]
    if len(layers) == len(head.layers):
        head.layers = nn.ModuleList(Gone() for _ in layers)
        for layer in layers if quantize else ():
            layer.decoder.quantise()
        pack_in_panels(head, quantize, besides)
        return layers
    for layer in layers:
        layer.decoder.restore()
    make_steady(head)
    pack(head, KINDS[quantize], besides)
    return []
