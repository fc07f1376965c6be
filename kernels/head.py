"""A head of another model, MTP's or EAGLE-3's, as a decoder of one block that reads states, too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import chain, library
from .decoder import FULL, Block, Decoder, Rows, can_tabulate, norm_struct, ropes_of
from .experts import pack_experts
from .parts import is_same, norm_of, parts_of
from .weights import Gone, PanelEmbedding, PanelLinear, Panels, pack

_NUM_COMPARED = 8  # tokens that old and new are compared on


def speed_up_head(
    head: Any, target: Any, length: int, quantize: str | None = None
) -> list["KernelHead"]:
    """The layers of an MTP head (transformers' MtpModel) in C: all of them, or none.

    The layers that it shares with its target are packed when the target's are.
    """
    found = []
    for number in range(len(head.layers)) if library.is_used else ():
        found.append(mtp_layer(head, number, length))
        if found[-1] is None:
            break
    return _settle(head, found, quantize, target)


def speed_up_eagle(head: Any, length: int, quantize: str | None = None) -> list["KernelHead"]:
    """The same for an EAGLE-3 head."""
    return _settle(head, [eagle_layer(head, length)] if library.is_used else [], quantize)


def _settle(
    head: Any, found: list["KernelHead | None"], quantize: str | None, besides: Any = None
) -> list["KernelHead"]:
    """Let the head's modules go, or keep them where a layer is not known."""
    layers = [layer for layer in found if layer is not None]
    is_known = len(layers) == len(head.layers)
    if is_known:
        head.layers = nn.ModuleList(Gone() for _ in layers)
        for layer in layers if quantize else ():
            layer.decoder.quantise()
    else:
        for layer in layers:
            layer.decoder.restore()
    if library.is_used:
        pack(head, quantize, besides)
        pack_experts(head, quantize)
    return layers if is_known else []


class KernelHead:
    """Stands in for a head's layer: pairs of embeddings and states in, outputs out."""

    def __init__(self, decoder: Decoder, shift: int = 0, layer: int = -1) -> None:
        """The pair in slot j of the cache stands at position j + shift.

        What comes out behind `layer` is given to the next step: see Decoder.
        """
        self.decoder, self._shift, self._layer = decoder, shift, layer

    def take(self, embedding: nn.Module, output: nn.Module, words: chain.Vocabulary) -> bool:
        """Be able to `draft` among these words, if both modules are in panels."""
        if not (isinstance(embedding, PanelEmbedding) and isinstance(output, PanelLinear)):
            return False
        self.decoder.embedding, self.decoder.output = embedding.panels, output.panels
        self.decoder.struct.embedding_scale = embedding.factor
        self.decoder.point()
        self._words = words
        return True

    def draft(self, cache: Any, texts: Sequence[chain.Text]) -> None:
        """Draw each text's draft: see chain.py."""
        chain.draft(self.decoder, cache, texts, self._words, self._shift, self._layer)

    def __call__(
        self, cache: Any, rows: list[int], embeds: Sequence[Tensor], states: Sequence[Tensor]
    ) -> list[Tensor]:
        """Outputs [n, D] of each row's pairs, embeds and states [n, D], fed after what it holds."""
        counts = [len(own) for own in embeds]
        place, where = cache.place(rows, counts), Rows()
        self.decoder.follow(cache)
        for slot, row, count in zip(place.slots, rows, counts, strict=True):
            where.chain(slot, cache.lengths[row], count)
        found = self.run(torch.cat(list(embeds)), torch.cat(list(states)), where)
        cache.advance(place)
        return list(found.split(counts))

    def run(self, embeds: Tensor, states: Tensor, where: Rows) -> Tensor:
        """[N, D] of pairs, embeds and states [N, D], in the embeddings' type."""
        pairs = torch.cat([embeds, states.to(embeds.dtype)], -1)
        parts, (rows, lines) = [], where.tensors()
        none = torch.empty(0, dtype=torch.int64)
        for begin in range(0, len(pairs), 256):
            own = slice(begin, begin + 256)
            _, found = self.decoder(
                rows[:, own], lines[own], none,
                given=pairs[own], layers=(self._layer,), shift=self._shift,
            )  # fmt: skip
            parts.append(found[self._layer])
        return torch.cat(parts).to(embeds.dtype)


def _decoder(block: Block, rotary: Any, length: int, embed_norm: Any, state_norm: Any) -> Decoder:
    kept: list[Any] = []
    found = Decoder([block], ropes_of(rotary, [FULL], length, kept), torch.get_num_threads())
    found.keep(kept)
    found.struct.has_states = 1
    found.struct.embed_norm = norm_struct(embed_norm, kept)
    found.struct.state_norm = norm_struct(state_norm, kept)
    return found


def _agrees(head: KernelHead, expected: Tensor, embeds: Tensor, states: Tensor) -> bool:
    """Whether it gives what the module gives [N, D], for pairs of a text from its beginning on."""
    block, where = head.decoder.blocks[0], Rows()
    where.chain(0, 0, len(embeds))
    shape = 1, block.kv_heads, len(embeds), block.width
    head.decoder.attach([[torch.zeros(shape, dtype=block.dtype) for _ in "kv"]])
    return is_same(head.run(embeds, states, where), expected)


def _random_pairs(count: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    embeds, states = torch.randn(2, count, width, generator=random).to(like)
    return embeds, states


def _causal(count: int, like: Tensor) -> Tensor:
    mask = like.new_full((count, count), torch.finfo(like.dtype).min)
    return mask.triu_(1)[None, None]


@torch.no_grad()
def mtp_layer(head: Any, number: int, length: int) -> KernelHead | None:
    """One layer of an MTP head (transformers' MtpModel), if it is a plain block that agrees."""
    layer, shift = head.layers[number], number + 1
    kind = (getattr(head.config, "layer_types", None) or [FULL] * shift)[number]
    parts, norms = parts_of(layer.mtp_block), [norm_of(layer.enorm), norm_of(layer.hnorm)]
    if kind != FULL or not parts or parts.is_recurrent or not can_tabulate(head.rotary_emb):
        return None
    count, width = min(_NUM_COMPARED, length), layer.eh_proj.weight.shape[0]
    embeds, states = _random_pairs(count, width, layer.eh_proj.weight)
    positions = torch.arange(count)[None] + shift
    expected = layer(
        embeds[None],
        states[None],
        position_embeddings=_turns(head, embeds, positions, kind),
        attention_mask=_causal(count, embeds),
        position_ids=positions,
        past_key_values=None,
    )[0]
    if head.use_shared_post_norm:
        expected = head.shared_post_norm(expected)
    block = Block(parts, FULL, None)
    decoder = _decoder(block, head.rotary_emb, length + shift + 1, *norms)
    decoder.entrance = Panels.of(layer.eh_proj.weight)
    decoder.struct.is_state_first = getattr(head.config, "mtp_hidden_states_first", False)
    last = [layer.post_norm] if layer.use_post_norm else []
    last += [head.shared_post_norm] if head.use_shared_post_norm else []
    kept: list[Any] = []
    for name, norm in zip(("last_norm", "second_norm"), last, strict=False):
        setattr(decoder.struct, name, norm_struct(norm_of(norm), kept))
    decoder.keep(kept)
    decoder.point()
    found = KernelHead(decoder, shift)
    if _agrees(found, expected, embeds, states):
        return found
    decoder.restore()
    return None


def _turns(head: Any, x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    options = {"layer_type": kind} if head.has_per_layer_rope else {}
    return head.rotary_emb(x[None], positions, **options)


@torch.no_grad()
def eagle_layer(head: nn.Module, length: int) -> KernelHead | None:
    """The layer of an EAGLE-3 head, if it agrees."""
    layer = head.layers[0]
    parts = parts_of(layer, besides=("hidden_norm",))
    if not parts or not can_tabulate(head.rotary_emb):
        return None
    count, width = min(_NUM_COMPARED, length), len(head.norm.weight)
    embeds, states = _random_pairs(count, width, head.norm.weight)
    pairs, positions = torch.cat([embeds, states], -1)[None], torch.arange(count)[None]
    expected = head.run(pairs, positions, _causal(count, embeds), None)[0]
    expected = head.norm(expected) if head.config.norm_output else expected
    block = Block(parts, FULL, None)
    norms = norm_of(layer.input_layernorm), norm_of(layer.hidden_norm)
    decoder = _decoder(block, head.rotary_emb, length + 1, *norms)
    decoder.struct.adds_to_normed = layer.norm_before_residual
    kept: list[Any] = []
    decoder.struct.last_norm = norm_struct(norm_of(head.norm), kept)
    decoder.keep(kept)
    found = KernelHead(decoder, layer=-1 if head.config.norm_output else 0)
    if _agrees(found, expected, embeds, states):
        return found
    decoder.restore()
    return None


@torch.no_grad()
def look_ahead(
    head: Any, length: int, quantize: str | None, sees: Callable[[str], tuple[bool, int | None]]
) -> Decoder:
    """The layers of a DFlash head, of Qwen3's kind; `sees` says of a kind of attention how far.

    That is, whether it looks ahead, and how many tokens it sees behind.
    """
    kinds, kept = head.config.layer.layer_types, list[Any]()
    blocks = []
    for layer, kind in zip(head.layers, kinds, strict=True):
        looks_ahead, window = sees(kind)
        blocks.append(Block(parts_of(layer), kind, window))
        blocks[-1].struct.looks_ahead = looks_ahead
    found = Decoder(blocks, ropes_of(head.rotary_emb, kinds, length, kept), torch.get_num_threads())
    found.keep(kept)
    if quantize:
        found.quantise()
    head.layers = nn.ModuleList(Gone() for _ in blocks)
    return found
