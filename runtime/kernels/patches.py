"""What is changed in transformers' modules, and why it is changed in place.

A model's modules belong to transformers, and several others may hold one of them: an output layer
shares its embedding, a head of a drafter its target's layers, and code of a family finds a module
by its name and asks for its weight's type or size. So a module stays where it is.

    put_panels        changes a module's class: the weights lie in panels, which C reads
    ReleasedModule    stands where a block was, which a Decoder computes as a whole
    with_globals      gives a method other functions than those that its file imports

The last one is for forwards that call a function of their file by its name, and offer no other
place to put in ours. The function object is copied, so no other module of the class changes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .parts import linear_of
from .weights import DTYPES, PackedMatrix


def with_globals(module: nn.Module, forward: Any, functions: dict[str, Callable[..., Any]]) -> Any:
    """The plain function `forward` as a method of `module`, with these functions by their names."""
    names = forward.__globals__ | functions
    copied = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copied, module)


@dataclass(frozen=True)
class ShownWeight:
    """What a module shows for a weight that is in panels: others ask for its type and size.

    It is no tensor, so that a module which computes with the weight itself fails for all to see.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"its code computes with a weight itself (.{name}), which is packed")


class PanelLinear(nn.Module):
    """What a linear layer becomes: its weight lies in panels."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], in the type that the layer had."""
        return self.panels(x.detach()).to(self.weight.dtype)


class PanelEmbedding(nn.Embedding):
    """What an embedding becomes: its weight lies in panels."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., inputs], in the type that the embedding had."""
        rows = self.panels.rows(ids)
        return (rows if self.factor == 1 else rows * self.factor).to(self.weight.dtype)


class ReleasedModule(nn.Module):
    """Stands in the place of a module whose weights are elsewhere."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("this module's weights are in panels")


def put_panels(module: nn.Module, panels: PackedMatrix, factor: float = 1.0) -> None:
    """Have a linear layer or an embedding compute with these panels, in place.

    Other modules may share the module, as an output layer shares its embedding: so its class is
    changed, and no other module is put where it was. An embedding's rows are multiplied by
    `factor`.
    """
    weight = ShownWeight(module.weight.dtype, module.weight.device, tuple(module.weight.shape))
    module._parameters.clear()
    module.__class__ = PanelEmbedding if isinstance(module, nn.Embedding) else PanelLinear
    module.weight, module.panels, module.factor = weight, panels, factor


@torch.no_grad()
def pack(module: nn.Module, quantize: str | None = None, besides: nn.Module | None = None) -> None:
    """Put the weights of all linear layers in `module` in panels, in place.

    The originals are freed. Panels that are there already are quantised, too. Layers that are in
    `besides` as well are left out: they are packed with that module.
    """
    others = set(besides.modules()) if besides else set()
    for layer in set(module.modules()) - others:
        if (linear := linear_of(layer)) is not None and layer.weight.dtype in DTYPES:
            put_panels(layer, PackedMatrix.of(*linear, quantize))
        elif quantize and isinstance(layer, PanelLinear):
            layer.panels.quantise(quantize)


@torch.no_grad()
def quantise_embedding(model: nn.Module) -> None:
    """Turn the embedding of a model of transformers into 8-bit blocks, in place."""
    embedding = model.get_input_embeddings()
    # Gemma's embeddings have a scale for all words, and do nothing else.
    if type(embedding) is nn.Embedding or hasattr(embedding, "scalar_embed_scale"):
        scale = getattr(embedding, "embed_scale", torch.ones(())).to(embedding.weight.dtype)
        put_panels(embedding, PackedMatrix.of(embedding.weight, None, "int8"), float(scale))
        # Something has to be left of a model that modules can ask for its type.
        embedding.anchor = nn.Parameter(scale.new_empty(0), requires_grad=False)


def panels_of(layer: nn.Module) -> PackedMatrix:
    """The panels of a linear layer or an embedding; new ones if it is not packed yet."""
    packed = getattr(layer, "panels", None)
    return packed or PackedMatrix.of(*(linear_of(layer) or (layer.weight, None)))


def panels_in(model: nn.Module) -> set[PackedMatrix]:
    """The panels of all modules of a model, each once."""
    experts = (getattr(part, "matrices", ()) for part in model.modules())
    packed = {panels for matrices in experts for side in matrices for panels in side}
    return packed | {getattr(part, "panels", None) for part in model.modules()} - {None}


def num_weights(model: nn.Module) -> int:
    """How many weights a model has, packed or not."""
    count = sum(panels.outputs * panels.inputs for panels in panels_in(model))
    return count + sum(weight.numel() for weight in model.parameters())
