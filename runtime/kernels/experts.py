"""Experts of a mixture: each one is called with the rows that chose it, as many as they are.

transformers keeps the weights of all experts of a layer in two parameters [experts, …], and asks
an interface to compute. A row's results are added in rising order of the experts' numbers, so its
bits do not depend on what its neighbours chose.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .patches import ShownWeight
from .weights import DTYPES, PackedMatrix

NAME = "kernels"  # transformers' name for this code


def experts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules within `module` that hold experts and ask transformers' interface."""
    for part in module.modules():
        if hasattr(part, "is_transposed") and hasattr(part, "has_post_expert_norm"):
            yield part


@torch.no_grad()
def pack_experts(module: nn.Module, quantize: str | None = None) -> None:
    """Put the weights of all experts in `module` in panels, as `pack` does those of layers."""
    for part in experts_of(module):
        if isinstance(part.down_proj, nn.Parameter) and part.down_proj.dtype in DTYPES:
            put_experts(part, [_packed(part, name, quantize) for name in matrices_of(part)])
        elif quantize and hasattr(part, "matrices"):
            for panels in sum(part.matrices, []):
                panels.quantise(quantize)


def matrices_of(part: nn.Module) -> tuple[str, str]:
    """The names of the two parameters that hold the experts' weights."""
    return "gate_up_proj" if part.has_gate else "up_proj", "down_proj"


def put_experts(part: nn.Module, matrices: list[list[PackedMatrix]]) -> None:
    """Have experts compute with these panels, one for each expert, and not with parameters."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for name in matrices_of(part):
        weights = getattr(part, name)
        delattr(part, name)
        setattr(part, name, ShownWeight(weights.dtype, weights.device, tuple(weights.shape)))
    part.matrices = matrices
    part.config._experts_implementation = NAME


def _packed(part: nn.Module, name: str, quantize: str | None) -> list[PackedMatrix]:
    """The panels of parameter `name`: a matrix for each expert."""
    weights = getattr(part, name).detach()
    weights = weights.transpose(1, 2) if part.is_transposed else weights
    biases = getattr(part, f"{name}_bias").detach() if part.has_bias else [None] * len(weights)
    return [PackedMatrix.of(*expert, quantize) for expert in zip(weights, biases, strict=True)]


def experts_forward(
    part: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' interface: rows [N, D], and of each its experts [N, k] and their weights."""
    result, (ups, downs) = torch.zeros_like(hidden_states), part.matrices
    for number in top_k_index.unique().tolist():  # rising
        if number >= len(ups):  # a number for no expert
            continue
        rows, places = torch.where(top_k_index == number)
        inner = ups[number](hidden_states[rows]).to(result.dtype)
        inner = part._apply_gate(inner) if part.has_gate else part.act_fn(inner)
        found = downs[number](inner).to(result.dtype)
        if part.has_post_expert_norm:
            found = part.post_expert_norm(found)
        weighted = found * top_k_weights[rows, places, None]
        result.index_add_(0, rows, weighted.to(result.dtype))
    return result
