"""The decoder block of Qwen3.5's recurrent layers, fused: a gated delta net and an MLP.

    x → norm → queries, keys, values │ z │ b │ a
        queries, keys, values → convolution → rule (decay by a, step by b) → norm · silu(z)
        → out → + x → MLP as in block.py

It computes what transformers' module computes, with the states that recurrent.py keeps for each row
of the cache. One linear layer does the work of four, and torch's functions are called as they are:
in the module each call of each function is looked at, for those that have to be steady.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from kernels.parts import Parts, RMSNorm, linear_of

from .activation import sigmoid, silu, softplus
from .attention import Ragged
from .block import FusedBlock, Rope
from .linear import Kind, Weights
from .recurrent import GatedDelta, RecurrentLayer

RULE = GatedDelta.name


class DeltaBlock(FusedBlock):
    """Takes the place of a decoder block with a gated delta net."""

    is_recurrent = True

    def set_attention(self, parts: Parts) -> None:
        """What the rule needs to know."""
        net = parts.attention
        self._layer: RecurrentLayer | None = getattr(net, "recurrent", None)
        # Without a cache by transformers' own function, so that a comparison is of all else.
        self._scan_alone = inspect.unwrap(type(net).forward).__globals__[RULE]
        self._widths = [len(linear_of(layer)[0]) for layer in parts.qkv]
        self._parts = [net.key_dim, net.key_dim, net.value_dim]
        self._head_dims = [net.head_k_dim, net.head_k_dim, net.head_v_dim]
        self._taps = net.conv1d.weight.detach().squeeze(1).clone()
        self._bias = None if net.conv1d.bias is None else net.conv1d.bias.detach().clone()
        self._rate = -net.A_log.detach().float().exp()
        self._shift = net.dt_bias.detach().clone()
        self._norm = RMSNorm(net.norm.weight.clone(), net.norm.variance_epsilon)

    def run(
        self,
        x: Tensor,
        rope: Rope | None,
        mask: Tensor | None,
        cache: Any,
        ragged: Ragged | None = None,
    ) -> Tensor:
        """What `read` takes -> [B, T, D], or [N, D] with `ragged`; states go to the cache."""
        read, x = self.read(x)
        joined = self.qkv.compute(read)
        mixed, z, b, a = (joined if ragged is None else joined[None]).split(self._widths, -1)
        convolve, scan = _convolve_alone, self._scan_alone
        if cache is not None:
            convolve, scan = self._layer.convolve, self._layer.scan
        mixed = silu(convolve(mixed.transpose(1, 2), self._taps, self._bias)).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (-1, width))
            for part, width in zip(mixed.split(self._parts, -1), self._head_dims, strict=True)
        )
        decay = self._rate * softplus(a.float() + self._shift)
        options = {"g": decay, "beta": sigmoid(b), "use_qk_l2norm_in_kernel": True}
        out, _ = scan(query, key, value, **options)
        out = self._norm(out) * silu(z.unflatten(-1, out.shape[-2:]).float())
        out = out.to(x.dtype).flatten(-2)
        return self.finish(x, out if ragged is None else out[0])

    def join(self, kind: Kind = Weights) -> None:
        """Pack the weights, and let go of the module."""
        super().join(kind)
        if self._layer is not None:
            self._layer.leave_module()

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **_: Any) -> Tensor:
        """As transformers calls it; the cache is the core's, or none."""
        return self.run(hidden_states, None, None, past_key_values)


def _convolve_alone(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, C, T], weight [C, k] -> [B, C, T], of texts that begin here."""
    x = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(x, weight[:, None], bias, groups=len(weight))
