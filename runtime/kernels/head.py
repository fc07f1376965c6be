"""A head of another model, MTP's or EAGLE-3's, as a decoder of one block that reads states, too."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.values import Draft, KeyCache

from . import chain, library
from .decoder import MOST_ROWS, Block, Decoder, Rows, norm_struct
from .experts import pack_experts
from .parts import Parts, is_same, norm_of, parts_of
from .patches import PanelEmbedding, PanelLinear, ReleasedModule, pack
from .reading import FULL, can_tabulate, ropes_of
from .weights import DTYPES, PackedMatrix

_NUM_COMPARED = 8  # tokens on which modules and C are compared


def speed_up_head(
    head: nn.Module, layer_of: "Callable[[nn.Module, int, int], KernelHead | None]", length: int,
    quantize: str | None = None, besides: nn.Module | None = None,
) -> list["KernelHead"]:  # fmt: skip
    """The layers of a head in C, by `mtp_layer` or `eagle_layer`: all of them, or none.

    The modules of these layers are freed. What the head shares with `besides`, its target, is
    packed when the target is.
    """
    if not library.is_used:
        return []
    every = [layer_of(head, number, length) for number in range(len(head.layers))]
    layers = every if all(every) else []
    if layers:
        head.layers = nn.ModuleList(ReleasedModule() for _ in layers)
    for layer in layers if quantize else ():
        layer.decoder.quantise(quantize)
    pack(head, quantize, besides)
    pack_experts(head, quantize)
    return layers


class KernelHead:
    """Stands in for a head's layer: pairs of embeddings and states in, outputs out."""

    def __init__(self, decoder: Decoder, shift: int = 0, layer: int = -1) -> None:
        """The pair in slot j of the cache stands at position j + shift.

        The next step reads the hidden states behind block `layer`; -1: behind the last norm.
        """
        self.decoder, self._shift, self._layer = decoder, shift, layer

    def take(self, embedding: nn.Module, output: nn.Module, words: Any) -> bool:
        """Be able to `draft` among these words, if both modules are in panels."""
        if not (isinstance(embedding, PanelEmbedding) and isinstance(output, PanelLinear)):
            return False
        self.decoder.embedding, self.decoder.output = embedding.panels, output.panels
        self.decoder.struct.embedding_scale = embedding.factor
        self.decoder.point()
        self._words = words
        return True

    def draft(
        self, cache: KeyCache, states: Sequence[Any], fed: list[list[int]], limits: list[int],
        hidden: Tensor,
    ) -> list[Draft]:  # fmt: skip
        """Draw up to limits[i] tokens for each drafter's state: see chain.draft_chain."""
        rest = self._words, hidden, self._shift, self._layer
        return chain.draft_chain(self.decoder, cache, states, fed, limits, *rest)

    def __call__(
        self, cache: KeyCache, rows: list[int], counts: list[int], embeds: Tensor, states: Tensor
    ) -> list[Tensor]:
        """Outputs [n, D] of each row's pairs, fed after what it holds; embeds and states [N, D]."""
        place, where = cache.place(rows, counts), Rows()
        self.decoder.follow(cache)
        for slot, row, count in zip(place.slots, rows, counts, strict=True):
            where.chain(slot, cache.lengths[row], count)
        outputs = self.run(embeds, states, where)
        cache.advance(place)
        return list(outputs.split(counts))

    def run(self, embeds: Tensor, states: Tensor, where: Rows) -> Tensor:
        """Outputs [N, D] of pairs, embeds and states [N, D], in the embeddings' type."""
        pairs, outputs = torch.cat([embeds, states.to(embeds.dtype)], -1), list[Tensor]()
        for rows, part in zip(where.parts(), pairs.split(MOST_ROWS), strict=True):
            options = {"input_states": part, "layers": (self._layer,), "shift": self._shift}
            outputs.append(self.decoder(rows, **options)[1][self._layer])
        return torch.cat(outputs).to(embeds.dtype)


def _head_of(
    head: nn.Module, parts: Parts | None, length: int, like: Tensor, norms: dict[str, nn.Module],
    run: Callable[..., Tensor], entrance: nn.Linear | None = None, shift: int = 0, layer: int = -1,
    **fields: bool,
) -> KernelHead | None:  # fmt: skip
    """A head's layer, if it is a plain block that gives what `run` gives of random pairs.

    `run` takes embeds and states [1, T, D], positions and a mask. `norms` are by the names of
    the decoder's structure, as `fields` are.
    """
    if not parts or parts.is_recurrent or not can_tabulate(head.rotary_emb):
        return None
    count = min(_NUM_COMPARED, length)
    random = torch.Generator().manual_seed(0)
    embeds, states = library.empty_f32(2, count, like.shape[0]).normal_(generator=random).to(like)
    mask = like.new_full((count, count), torch.finfo(like.dtype).min).triu_(1)
    positions = torch.arange(count)[None] + shift
    expected = run(embeds[None], states[None], positions, mask[None, None])[0]
    block, where = Block(parts, FULL, None), Rows()
    decoder = Decoder([block], ropes_of(head.rotary_emb, [FULL], length + shift + 1))
    norm_structs = {
        name: norm_struct(norm_of(norm), decoder.references) for name, norm in norms.items()
    }
    for name, value in {"has_states": True, **fields, **norm_structs}.items():
        setattr(decoder.struct, name, value)
    decoder.entrance = entrance and PackedMatrix.of(entrance.weight)
    decoder.point()
    decoder.attach_zeros(count)
    where.chain(0, 0, count)
    layer_in_c = KernelHead(decoder, shift, layer)
    return layer_in_c if is_same(layer_in_c.run(embeds, states, where), expected) else None


@torch.no_grad()
def mtp_layer(
    head: nn.Module, number: int, length: int, run: Callable[..., Tensor]
) -> KernelHead | None:
    """A layer of an MTP head (transformers' MtpModel), if it is a plain block that agrees.

    `run` computes it in its modules: see drafters/mtp.py.
    """
    layer, shift = head.layers[number], number + 1
    kind = (getattr(head.config, "layer_types", None) or [FULL] * shift)[number]
    if kind != FULL:
        return None
    last = [layer.post_norm] if layer.use_post_norm else []
    last += [head.shared_post_norm] if head.use_shared_post_norm else []
    norms = {"embed_norm": layer.enorm, "state_norm": layer.hnorm}
    norms |= zip(("last_norm", "second_norm"), last, strict=False)
    return _head_of(
        head, parts_of(layer.mtp_block), length, layer.eh_proj.weight, norms,
        partial(run, head, number), layer.eh_proj, shift,
        is_state_first=getattr(head.config, "mtp_hidden_states_first", False),
    )  # fmt: skip


@torch.no_grad()
def eagle_layer(head: nn.Module, number: int, length: int) -> KernelHead | None:
    """The layer of an EAGLE-3 head, if it agrees."""
    layer, is_normed = head.layers[number], head.config.norm_output
    norms = {"embed_norm": layer.input_layernorm, "state_norm": layer.hidden_norm}
    return _head_of(
        head, parts_of(layer, besides=("hidden_norm",)), length, head.norm.weight,
        norms | {"last_norm": head.norm}, head, layer=-1 if is_normed else 0,
        adds_to_normed=layer.norm_before_residual,
    )  # fmt: skip


class BlockHead:
    """The layers of a DFlash head in C: contexts become keys and values, blocks look ahead."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, cache: KeyCache, place: Any, context: Tensor, blocks: Tensor) -> Tensor:
        """Outputs [B, n, D] of blocks [B, n, D], each behind the context of its text.

        `place` has, of each text, the new rows of its context and then its block; context [N, D]
        are the new rows of all texts. Keys and values of both are written to `cache`.
        """
        size, read, drafted = blocks.shape[1], Rows(), Rows()
        self.decoder.follow(cache)
        for slot, count, end in zip(place.slots, place.counts, place.ends, strict=True):
            read.chain(slot, end - count, count - size)
            drafted.chain(slot, end - size, size)
            drafted.ends += [end] * size
        read.ends = [position + 1 for position in read.positions]
        for rows, states in zip(read.parts(), context.split(MOST_ROWS), strict=True):
            self.decoder(rows, states, only_keys=True)
        _, outputs = self.decoder(drafted, blocks.flatten(0, 1), layers=(-1,))
        return outputs[-1].view_as(blocks).to(blocks.dtype)


@torch.no_grad()
def speed_up_blocks(
    head: Any, length: int, quantize: str | None, sees: Callable[[str], tuple[int | None, bool]]
) -> BlockHead | None:
    """The layers of a DFlash head, of Qwen3's kind, in C; None where C cannot compute them.

    `sees` says of a kind of attention how many tokens it sees behind (None: all), and whether it
    looks ahead. Texts have up to `length` tokens. The modules let go of their weights.
    """
    weight = head.norm.weight
    if not library.is_used or weight.dtype not in DTYPES or weight.device.type != "cpu":
        return None
    kinds, blocks = head.config.layer.layer_types, []
    for layer, kind in zip(head.layers, kinds, strict=True):
        window, looks_ahead = sees(kind)
        blocks.append(Block(parts_of(layer), kind, window))
        blocks[-1].struct.looks_ahead = looks_ahead
    decoder = Decoder(blocks, ropes_of(head.rotary_emb, kinds, length))
    if quantize:
        decoder.quantise(quantize)
    head.layers = nn.ModuleList(ReleasedModule() for _ in blocks)
    pack(head, quantize)
    return BlockHead(decoder)
