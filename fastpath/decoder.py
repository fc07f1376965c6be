"""What makes models of transformers faster that run in their own modules, and heads."""

from typing import Any

from torch import nn

from kernels import library
from kernels.head import KernelHead, eagle_layer, mtp_layer
from kernels.weights import Gone
from kernels.weights import pack as pack_in_panels

from . import attention
from .activation import make_steady
from .int8 import Int8Weights, quantise_embedding
from .linear import Kind, Weights, pack

KINDS: dict[str | None, Kind] = {None: Weights, "int8": Int8Weights}  # by --quantize


def speed_up_modules(model: Any) -> None:
    """Make a model of transformers faster, in place. Its results stay, but for rounding."""
    attention.register()
    if model._supports_attention_backend or model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(attention.NAME)
    make_steady(model)


def quantise_modules(model: Any, quantize: str, has_own_embedding: bool = True) -> None:
    """Turn the layers of a model into integers; and its embedding, if it is its own."""
    if has_own_embedding:
        quantise_embedding(model)
    pack(model, KINDS[quantize])


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
