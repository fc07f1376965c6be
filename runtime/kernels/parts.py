"""What a decoder layer of transformers is made of, recognised by the names of its parts.

That two models with the same parts may still differ (a multiplier here, a skipped rotation there)
is why code that computes with them compares both, and keeps the module unless they agree.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Names of norms before attention, after it, before the MLP and after it.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama, Qwen, Mistral, Phi-3, …
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    ("ln_1", None, "ln_2", None),  # GPT-2
    (
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),  # Gemma 2 and 3
)  # fmt: skip
_ATTENTIONS = "self_attn", "attn", "linear_attn"
# Linear layers that make queries, keys and values, and the one behind attention.
_PROJECTIONS = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("qkv_proj",), "o_proj"),
    (("c_attn",), "c_proj"),
)
# Of a gated delta net, beside its out_proj; the first makes queries, keys and values.
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_DELTA = {*DELTA_PROJECTIONS, "out_proj", "conv1d", "norm"}
# Linear layers before the activation, the one behind it, the activation.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj", "act_fn"),
    (("gate_up_proj",), "down_proj", "activation_fn"),
    (("c_fc",), "c_proj", "act"),
)


@dataclass(frozen=True)
class Parts:
    """The modules of a decoder layer, by what they do."""

    attention: nn.Module
    qkv: list[nn.Module]
    out: nn.Module
    qk_norms: list[nn.Module]  # of queries and of keys, or none
    up: list[nn.Module]  # gate and up, in one or two modules, or up alone
    down: nn.Module
    activation: nn.Module
    norms: tuple[nn.Module | None, ...]  # before attention, after it, before the MLP, after it
    gates: tuple[nn.Module, ...] = ()  # a layer whose sigmoid attention is multiplied by

    @property
    def is_recurrent(self) -> bool:
        """Whether a gated delta net stands where others attend."""
        return _names(self.attention) == _DELTA

    @property
    def fits(self) -> bool:
        """Whether there are as many queries, keys and values as attention reads."""
        groups = getattr(self.attention, "num_key_value_groups", 1)
        made = sum(shape_of(layer)[0] for layer in self.qkv)
        return made * groups == shape_of(self.out)[1] * (groups + 2)

    def with_gates(self) -> "Parts":
        """The parts with q_proj split in two: Qwen3.5's has a gate beside each head's query."""
        query, *others = self.qkv
        made = linear_of(query)
        if made is None or made[1] is not None or len(made[0]) % (2 * self.attention.head_dim):
            return self
        halves = made[0].detach().unflatten(0, (-1, 2, self.attention.head_dim)).unbind(1)
        query, gate = (_linear(half.flatten(0, 1)) for half in halves)
        return replace(self, qkv=[query, *others], gates=(gate,))

    @property
    def is_gated(self) -> bool:
        """Whether the activation's result is multiplied by another projection of the same input."""
        return sum(shape_of(layer)[0] for layer in self.up) == 2 * shape_of(self.down)[1]


def parts_of(layer: nn.Module, besides: tuple[str, ...] = ()) -> Parts | None:
    """A layer's parts, if it consists of those of a block that is known, and of no others.

    `besides` are names of children that the caller sees to.
    """
    names = _names(layer) - set(besides)
    attention = next((name for name in _ATTENTIONS if name in names), "")
    norms = next((n for n in _NORMS if {*n} - {None} == names - {attention, "mlp"}), None)
    if not attention or norms is None or "mlp" not in names:
        return None
    attended, mlp = getattr(layer, attention), layer.mlp
    qk_names = _names(attended) & {"q_norm", "k_norm"}
    linear = next((p for p in _PROJECTIONS if {*p[0], p[1]} == _names(attended) - qk_names), None)
    if is_recurrent := _names(attended) == _DELTA:
        linear = DELTA_PROJECTIONS, "out_proj"
    elif not all(hasattr(attended, name) for name in ("head_dim", "layer_idx", "scaling")):
        return None
    inner = next((p for p in _MLPS if {*p[0], *p[1:]} == _names(mlp)), None)
    if linear is None or inner is None or len(qk_names) == 1:
        return None
    parts = Parts(
        attended, [getattr(attended, name) for name in linear[0]], getattr(attended, linear[1]),
        [getattr(attended, name) for name in sorted(qk_names, reverse=True)],
        [getattr(mlp, name) for name in inner[0]], getattr(mlp, inner[1]), getattr(mlp, inner[2]),
        tuple(name and getattr(layer, name) for name in norms),
    )  # fmt: skip
    linears = [*parts.qkv, parts.out, *parts.up, parts.down]
    every_norm = [norm for norm in (*parts.norms, *parts.qk_norms) if norm is not None]
    if not (all(map(shape_of, linears)) and all(map(norm_of, every_norm))):
        return None
    if is_recurrent or parts.fits:
        return parts
    gated = parts.with_gates() if len(parts.qkv) == 3 else parts
    return gated if gated.fits else None


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer of a weight [out, in]."""
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _names(module: nn.Module) -> set[str]:
    """The names of a module's children, without dropouts, which do nothing here."""
    return {name for name, child in module.named_children() if type(child) is not nn.Dropout}


@dataclass(frozen=True)
class Norm:
    """x over the root of its mean square, times weight; of a layer norm, less its mean first."""

    epsilon: float
    weight: Tensor | None
    bias: Tensor | None = None
    is_layer_norm: bool = False


def linear_of(layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """A linear layer's weight [out, in] and bias; None for other layers and for packed ones."""
    if type(layer) is nn.Linear:
        return layer.weight, layer.bias
    if type(layer) is Conv1D:  # GPT-2's: a linear layer with its weight transposed
        return layer.weight.T, layer.bias
    return None


def shape_of(layer: nn.Module) -> tuple[int, int] | None:
    """(outputs, inputs) of a linear layer, packed or not; None for other layers."""
    if (panels := getattr(layer, "panels", None)) is not None:
        return panels.outputs, panels.inputs
    linear = linear_of(layer)
    return None if linear is None else tuple(linear[0].shape)


@torch.no_grad()
def norm_of(module: nn.Module) -> Norm | None:
    """What a norm does; None where it is of no known kind.

    Some RMS norms multiply by their weight, some by 1 + weight: a trial tells.
    """
    if type(module) is nn.LayerNorm:
        return Norm(module.eps, module.weight, module.bias, True)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if epsilon is None or getattr(module, "weight", None) is None:
        return None
    scale = module.weight.detach()
    x = torch.linspace(-1, 1, len(scale), dtype=torch.float32).to(scale)[None]
    # The sum is one of float32, whatever type the weight has: 1.0034 is no bfloat16.
    for weight, exact in ((scale, scale), (1 + scale, 1 + scale.float())):
        if is_same(nn.functional.rms_norm(x, weight.shape, weight, epsilon), module(x)):
            return Norm(epsilon, exact)
    return None


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """Equal but for some roundings of their type, relative to the largest number."""
    if actual.shape != expected.shape:
        return False
    roundings = 32 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return float((actual - expected).abs().max()) <= roundings
