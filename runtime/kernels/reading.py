"""How a Decoder is made of a model of transformers.

    pack block by block, the modules' weights freed → compare with the model → keep, or leave

Blocks are chosen by structure (parts.py), and compared with transformers' forward on a few
random tokens. Where they differ, the modules go on, with their linear layers in panels.
"""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import library
from .decoder import ACTIVATIONS, Block, Decoder, Rope, Rows, norm_struct
from .library import address, empty_f32
from .parts import Norm, Parts, norm_of, parts_of
from .patches import ReleasedModule, panels_of, put_panels
from .weights import DTYPES

FULL = "full_attention"  # transformers' name for layers that see the whole text
_JUMP = 0.05  # of a row's largest number, by an input that is rounded to another of few bits
_NUM_COMPARED = 8  # tokens that the decoder and transformers' modules are compared on


def layers_of(decoder: nn.Module) -> tuple[Any, Any]:
    """A decoder's layers and last norm, by the names of most families or by GPT-2's."""
    if hasattr(decoder, "h"):
        return decoder.h, getattr(decoder, "ln_f", None)
    return getattr(decoder, "layers", None), getattr(decoder, "norm", None)


@torch.no_grad()
def ropes_of(module: nn.Module, kinds: Sequence[str], length: int) -> dict[str, Rope]:
    """Tables of cos and sin by kind of layer, for positions below `length`."""
    inputs, ropes = (empty_f32(1, 1, 1), torch.arange(length)[None]), {}
    for kind in dict.fromkeys(kinds):
        cos, sin = module(*inputs, kind) if isinstance(module.rope_type, dict) else module(*inputs)
        width = cos.shape[-1]
        halves = [table[0, :, : width // 2].float().contiguous() for table in (cos, sin)]
        ropes[kind] = Rope(width, *map(address, halves))
        ropes[kind].tables = halves  # the structure points to their memory
    return ropes


@torch.no_grad()
def recompute_rope_tables(module: nn.Module | None, ropes: dict[str, Rope]) -> None:
    """Compute the tables anew in double, so that they are the same on every machine.

    transformers' float32 angles are as far from these as their roundings explain; a table that
    is further off stays, since the module then turns in a way that is not known here.
    """
    for kind, rope in ropes.items():
        prefix = f"{kind}_" if isinstance(module.rope_type, dict) else ""
        theirs = getattr(module, f"{prefix}inv_freq").double()
        scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
        if len(theirs) != rope.tables[0].shape[1]:
            continue
        parameters = getattr(module.config, "rope_parameters", None) or {}
        base = parameters.get(kind, parameters).get("rope_theta") or 1.0
        # The power of the usual kind depends on the CPU in float32, too.
        powers = [base ** (-i / len(theirs)) for i in range(len(theirs))]
        usual = torch.tensor(powers, dtype=torch.float64).float().double()
        frequencies = usual if torch.allclose(usual, theirs, rtol=1e-6, atol=0) else theirs
        made = [torch.empty_like(table) for table in rope.tables]
        sizes, pointer = made[0].shape, address(frequencies, dtype=torch.float64)
        library.load().tabulate(*map(address, made), *sizes, pointer, ctypes.c_double(scale))
        # Roundings of the frequency, of the angle, and of cos and sin.
        angles = torch.arange(sizes[0])[:, None] * frequencies
        explained = (1 + abs(scale)) * torch.finfo(torch.float32).eps * (angles + 4)
        pairs = list(zip(rope.tables, made, strict=True))
        if all(((table - new).abs() <= explained).all() for table, new in pairs):
            for table, new in pairs:
                table.copy_(new)


def can_tabulate(rotary: nn.Module | None) -> bool:
    """Whether `rotary` turns by the position alone and not by the length of the text."""
    return rotary is not None and not any(
        kind in str(rotary.rope_type) for kind in ("dynamic", "longrope")
    )


@torch.no_grad()
def decoder_of(
    model: PreTrainedModel, length: int, windows: dict[str, int | None], is_known: bool = False
) -> Decoder | None:
    """The decoder of a model of transformers for texts of up to `length` tokens; None for others.

    The linear layers of blocks that are known are in panels afterwards, even where None is
    returned. A model that `is_known` is not compared.
    """
    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers, last = layers_of(decoder)
    if model.dtype not in DTYPES or model.device.type != "cpu" or not layers or last is None:
        return None
    parts, last_norm = list(map(parts_of, layers)), norm_of(last)
    table, rotary = getattr(decoder, "wpe", None), getattr(decoder, "rotary_emb", None)
    if last_norm is None or not all(map(_is_known, parts)):
        return None
    if table is None and not can_tabulate(rotary):
        return None
    kinds = getattr(config, "layer_types", None) or [FULL] * len(parts)
    count = min(_NUM_COMPARED, length)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (count,), generator=random)
    most = length if table is None else min(length, table.num_embeddings)
    shifts = {0, most - count}  # far on, too: some families scale by the position
    blocks = [
        Block(part, kind, windows[kind], getattr(layer, "residual_multiplier", 1.0))
        for part, kind, layer in zip(parts, kinds, layers, strict=True)
    ]
    packed = Decoder(blocks, ropes_of(rotary, kinds, length + 1) if table is None else {})
    _take_ends(packed, model, last_norm)
    return packed if is_known or all(_agrees(packed, model, ids, at) for at in shifts) else None


def _take_ends(decoder: Decoder, model: PreTrainedModel, last_norm: Norm) -> None:
    """Give the decoder the embedding of a model, and what follows its blocks."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    inner, config = model.get_decoder(), model.config.get_text_config()
    decoder.output = panels_of(output)
    decoder.embedding = decoder.output
    if output.weight is not embedding.weight:
        decoder.embedding = panels_of(embedding)
    table = getattr(inner, "wpe", None)
    decoder.positions = None if table is None else panels_of(table)
    scale = getattr(embedding, "embed_scale", torch.ones(())).to(embedding.weight.dtype)
    multiplier = getattr(inner, "embedding_multiplier", 1.0)
    decoder.struct.embedding_scale = float(scale) * multiplier
    decoder.struct.logit_scale = 1 / getattr(config, "logits_scaling", 1.0)
    decoder.struct.logit_softcap = getattr(config, "final_logit_softcapping", None) or 0
    decoder.struct.last_norm = norm_struct(last_norm, decoder.references)
    decoder.point()


def release(decoder: Decoder, model: PreTrainedModel) -> None:
    """Free the weights of a model whose blocks the decoder computes."""
    layers, _ = layers_of(model.get_decoder())
    for i, block in enumerate(decoder.blocks):
        layers[i] = ReleasedModule()
        if block.net and block.net.layer:
            block.net.layer.follow(block.net)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    put_panels(embedding, decoder.embedding, decoder.struct.embedding_scale)
    put_panels(output, decoder.output)


def _run(decoder: Decoder, ids: Tensor, shift: int, layers: tuple[int, ...]) -> Any:
    """Logits [N, V] of a text that begins at position `shift`, and states behind `layers`."""
    count, rows = len(ids), Rows()
    decoder.attach_zeros(count)
    rows.chain(0, 0, count)
    rows.ids, rows.wanted = ids.tolist(), list(range(count))
    passed = [net.passed([None], [None], count) for net in decoder.nets]
    return decoder(rows, layers=layers, shift=shift, counts=[count], passed=passed)


def _agrees(decoder: Decoder, model: PreTrainedModel, ids: Tensor, shift: int) -> bool:
    """Whether each layer of a model gives what the decoder's gives, but for roundings.

    What a layer gave is replaced by the decoder's state, so roundings do not add up. Where inputs
    are rounded to fewer bits, a tiny difference may make it another of them. Then nearly all rows
    agree but for roundings of the modules, and those in which a number jumps are near.
    """
    layers, _ = layers_of(model.get_decoder())
    logits, states = _run(decoder, ids, shift, tuple(range(len(layers))))
    expected = list[Tensor]()

    def note(_: nn.Module, args: object, output: Any) -> Any:
        is_alone = isinstance(output, Tensor)
        expected.append((output if is_alone else output[0])[0])
        state = states[len(expected) - 1][None].to(model.dtype)
        return state if is_alone else (state, *output[1:])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(note))
        positions = torch.arange(len(ids))[None] + shift
        last = model(ids[None], position_ids=positions, use_cache=False).logits[0]
    pairs = [*zip(states.values(), expected, strict=True), (logits, last)]
    distances = torch.cat([(a - b).abs().amax(-1) / b.abs().amax(-1) for a, b in pairs])
    usual = max(64 * torch.finfo(torch.float32).eps, 4 * torch.finfo(model.dtype).eps)
    is_rounded = any(panels.reads != "float32" for panels in decoder.panels)
    most = max(8 * usual, _JUMP if is_rounded else 0)
    return float(distances.median()) <= usual and float(distances.max()) <= most


def _is_known(parts: Parts | None) -> bool:
    if parts is None or type(parts.activation).__name__ not in ACTIVATIONS:
        return False
    return parts.is_recurrent or parts.attention.head_dim % 2 == 0
