"""The embedded hybrid, made of the embedded target: most of its attention becomes recurrent.

It is of Qwen3.5's kind: three layers of four are gated delta nets, which keep one state in the
place of keys, and every fourth is attention. It is not trained from nothing: embeddings, MLPs,
norms and the attention of every fourth layer are the target's numbers in Qwen3.5's form (norms less
1; gates of 1/2, so outputs doubled), and a delta net begins with the attention's projections. Then
it is distilled like a draft model (recipe.py).

Source: gated delta networks, arXiv 2412.06464.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .heads import OF_MODELS, SHARED, Draft
from .recipe import TRAIN, Data

PERIOD = 4  # every fourth layer keeps its attention, the last one among them


def config_of(target: PreTrainedModel) -> Qwen3_5TextConfig:
    """Heads of the target's number and width of value, with keys half as wide."""
    own = target.config
    rope = dict(own.rope_parameters["full_attention"], partial_rotary_factor=1.0)
    shared = {name: getattr(own, name) for name in (*SHARED, *OF_MODELS)}
    return Qwen3_5TextConfig(
        full_attention_interval=PERIOD, dtype="float32", linear_key_head_dim=own.head_dim // 2,
        linear_num_key_heads=own.num_attention_heads, linear_value_head_dim=own.head_dim,
        linear_num_value_heads=own.num_attention_heads, **shared | {"rope_parameters": rope},
    )  # fmt: skip


def copy_heads(new: nn.Module, old: nn.Module) -> None:
    """Let a gated delta net begin with an attention's projections.

    Of queries and keys it takes the half that the rotation turns slowest: what reads content.
    Heads forget after about 4, 16, 64, … tokens. The convolution begins as the token itself.
    """
    heads, half = new.num_v_heads, old.head_dim // 4

    def slow(weight: Tensor, norm: nn.Module) -> Tensor:
        parts = (weight.unflatten(0, (-1, old.head_dim)) * norm.weight[:, None]).chunk(2, 1)
        return torch.cat([part[:, half:] for part in parts], 1)

    def shared(x: Tensor) -> Tensor:
        """[heads of keys, n, D] -> [heads · n, D]"""
        return x.repeat_interleave(heads // len(x), 0).flatten(0, 1)

    query, key = slow(old.q_proj.weight, old.q_norm), slow(old.k_proj.weight, old.k_norm)
    value = shared(old.v_proj.weight.unflatten(0, (-1, old.head_dim)))
    new.in_proj_qkv.weight.copy_(torch.cat([query.flatten(0, 1), shared(key), value]))
    new.out_proj.weight.copy_(old.o_proj.weight)
    new.A_log.zero_()
    new.dt_bias.copy_(torch.tensor([0.25 / 4**i for i in range(heads)]).expm1().log())
    new.in_proj_a.weight.mul_(0.1)
    new.conv1d.weight.mul_(0.1)[:, :, -1] += 1.0


@torch.no_grad()
def convert(target: PreTrainedModel) -> Qwen3_5ForCausalLM:
    """The hybrid before its training."""
    hybrid, weights = Qwen3_5ForCausalLM(config_of(target)), target.state_dict()
    hybrid.set_attn_implementation(TRAIN)
    for name, weight in weights.items():
        if "norm" in name:
            weights[name] = weight - 1  # Qwen3.5's norms multiply by 1 + weight
        elif "q_proj" in name:  # behind each head's queries stands its gate
            heads = weight.unflatten(0, (-1, target.config.head_dim))
            weights[name] = torch.cat([heads, torch.zeros_like(heads)], 1).flatten(0, 1)
        elif "o_proj" in name:
            weights[name] = 2 * weight  # a gate of 0 lets one half through
    missing, _ = hybrid.load_state_dict(weights, strict=False)
    assert all(".linear_attn." in name for name in missing), missing
    for new, old in zip(hybrid.model.layers, target.model.layers, strict=True):
        if hasattr(new, "linear_attn"):
            copy_heads(new.linear_attn, old.self_attn)
    return hybrid


class Hybrid(Draft):
    """All of it but the embeddings learns what the target says."""

    share_of_places, muon, OTHERS = 0.5, 0.0, 0  # the whole of a small vocabulary, and half a text

    def __init__(self, target: PreTrainedModel, data: Data, plan: Any) -> None:
        self.module, self.origin = convert(target), plan.target
        self.module.model.embed_tokens.requires_grad_(False)
        self.words, self.logits = torch.arange(target.config.vocab_size), self.module.lm_head
