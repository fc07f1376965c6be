"""Rotations that depend on the longest position in a forward, and how they are fixed.

Phi-3's longrope has factors for short texts and others for long ones, and transformers chooses by
the longest text of a batch; dynamic NTK widens its waves with the text. A long neighbour, or a
draft across the border, would then change what a model says. Here the longest text that may be
served chooses, once and for all texts: the factors are those that transformers uses for a text of
`--max-model-len` tokens.

Without `--max-model-len` such a model serves the context that it was first trained on. Up to there
transformers uses the factors for short texts, so every text is what transformers writes.

llama4's layers without rotations scale queries by a position that they count themselves, from the
longest text of a batch on. Positions are served for which that scale is 1.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

_KINDS = ("dynamic", "longrope")


def rotations(model: nn.Module) -> Iterator[tuple[Any, str | None, dict[str, Any]]]:
    """(module, kind of layer or None for all, rope parameters) of what depends on the length."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if types is None or not hasattr(module, "config"):
            continue
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            if any(name in str(kind) for name in _KINDS):
                parameters = module.config.rope_parameters
                yield module, layer_type, parameters[layer_type] if layer_type else parameters


def _counting(model: nn.Module) -> list[Any]:
    """The attention layers that count positions themselves, to scale queries by them."""
    return [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", 1)
    ]


def contexts(model: nn.Module, longest: int) -> tuple[int, int]:
    """(Positions that use the factors for short texts, positions that a user may ask for).

    `longest` is the config's number of positions. Dynamic NTK is made for `factor` times as many.
    """
    longest = min([longest, *(module.floor_scale - 1 for module in _counting(model))])
    shortest = longest
    for _, _, parameters in rotations(model):
        shortest = min(shortest, parameters.get("original_max_position_embeddings") or shortest)
        if "dynamic" in parameters["rope_type"]:
            longest = max(longest, int(longest * parameters.get("factor", 1)))
    return shortest, longest


def fix_rotations(model: nn.Module, length: int) -> None:
    """Rotate, in whatever company, as transformers does in a text of `length` tokens."""
    for module in _counting(model):
        module.attn_temperature_tuning = False  # a scale of 1
    for module, layer_type, parameters in rotations(model):
        like, layer = next(module.buffers()), {"layer_type": layer_type} if layer_type else {}
        module(like, torch.tensor([[length - 1]], device=like.device), **layer)  # which chooses
        # transformers then leaves the frequencies alone.
        module.rope_type = {**module.rope_type, layer_type: "default"} if layer else "default"
        if "long_mscale" in parameters:  # Phi-3.5-MoE scales by the length as well
            is_long = length > parameters["original_max_position_embeddings"]
            module.config = deepcopy(module.config)
            scale = parameters["long_mscale" if is_long else "short_mscale"]
            module.config.rope_parameters |= {"long_mscale": scale, "short_mscale": scale}
