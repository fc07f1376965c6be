"""The embedded hybrid, made of the embedded target: most of its attention becomes recurrent.

It is of Qwen3.5's kind: three layers of four are gated delta nets, which keep one state in the
place of keys, and every fourth is attention. It is not trained from nothing:

    copied          embeddings, MLPs, norms, and the attention of every fourth layer: the same
                    numbers in Qwen3.5's form (norms less 1; gates of 1/2, so outputs doubled)
    stage layers    each new layer learns what the attention gave that stood in its place,
                    reading what that attention read (MOHAWK, arXiv 2408.10189)
    stage hybrid    the whole model but its embeddings learns the target's probabilities

Source: gated delta networks, arXiv 2412.06464.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .corpus import Corpus
from .embedded import held_out_loss, logits_of, window_of
from .heads import save_model
from .recipe import TRAIN, Training, hidden_states

PERIOD = 4  # every fourth layer keeps its attention, the last one among them
SHARE = 0.85  # of the loss of stage hybrid: against the target's probabilities; the rest: the text
RATES = {"layers": 3e-3, "hybrid": 1.5e-3}
_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "eos_token_id", "pad_token_id", "tie_word_embeddings",
)  # fmt: skip


def config_of(target: PreTrainedModel) -> Qwen3_5TextConfig:
    """Heads of the target's number and width of value, with keys half as wide."""
    own = target.config
    rope = dict(own.rope_parameters["full_attention"], partial_rotary_factor=1.0)
    return Qwen3_5TextConfig(
        full_attention_interval=PERIOD,
        rope_parameters=rope,
        linear_num_key_heads=own.num_attention_heads,
        linear_num_value_heads=own.num_attention_heads,
        linear_key_head_dim=own.head_dim // 2,
        linear_value_head_dim=own.head_dim,
        dtype="float32",
        **{name: getattr(own, name) for name in _COPIED},
    )


def copy_block(new: nn.Module, old: nn.Module) -> None:
    """A decoder layer's norms and MLP, and its attention if the new one has any."""
    new.mlp.load_state_dict(old.mlp.state_dict())
    for name in ("input_layernorm", "post_attention_layernorm"):
        copy_norm(getattr(new, name), getattr(old, name))
    if not hasattr(new, "self_attn"):
        return copy_heads(new.linear_attn, old.self_attn)
    ours, theirs = new.self_attn, old.self_attn
    for name in ("q_norm", "k_norm"):
        copy_norm(getattr(ours, name), getattr(theirs, name))
    heads = theirs.q_proj.weight.unflatten(0, (-1, theirs.head_dim))
    ours.q_proj.weight.copy_(torch.cat([heads, torch.zeros_like(heads)], 1).flatten(0, 1))
    ours.k_proj.weight.copy_(theirs.k_proj.weight)
    ours.v_proj.weight.copy_(theirs.v_proj.weight)
    ours.o_proj.weight.copy_(2 * theirs.o_proj.weight)  # a gate of 0 lets one half through


def copy_norm(new: nn.Module, old: nn.Module) -> None:
    """Qwen3.5's norms multiply by 1 + weight."""
    new.weight.copy_(old.weight - 1)


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
    hybrid = Qwen3_5ForCausalLM(config_of(target))
    hybrid.set_attn_implementation(TRAIN)
    hybrid.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    copy_norm(hybrid.model.norm, target.model.norm)
    for new, old in zip(hybrid.model.layers, target.model.layers, strict=True):
        copy_block(new, old)
    return hybrid


def layers_loss(hybrid: PreTrainedModel, target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The mean over the new layers of their squared error, as a share of what was to be learnt."""
    seen: list[tuple[Tensor, Tensor]] = []
    new = [layer.linear_attn for layer in hybrid.model.layers if hasattr(layer, "linear_attn")]
    for layer, old in zip(hybrid.model.layers, target.model.layers, strict=True):
        if hasattr(layer, "linear_attn"):
            old.self_attn.register_forward_hook(
                lambda _, __, options, out: seen.append((options["hidden_states"], out[0])),
                with_kwargs=True,
            )

    def loss(ids: Tensor) -> Tensor:
        seen.clear()
        with torch.no_grad():
            hidden_states(target, ids[:, :-1])
        errors = [
            (layer(given) - wanted).square().mean() / wanted.var()
            for layer, (given, wanted) in zip(new, seen, strict=True)
        ]
        return sum(errors) / len(errors)

    return loss


def distillation_loss(hybrid: PreTrainedModel, target: PreTrainedModel, ids: Tensor) -> Tensor:
    """SHARE of it is cross entropy against the frozen target, the rest against the text."""
    with torch.no_grad():
        probs = torch.softmax(logits_of(target, ids[:, :-1]), -1).flatten(0, 1)
    logits = logits_of(hybrid, ids[:, :-1]).flatten(0, 1)
    hard = F.cross_entropy(logits, ids[:, 1:].flatten())
    return SHARE * F.cross_entropy(logits, probs) + (1 - SHARE) * hard


def train(target: PreTrainedModel, plan: Any) -> dict[str, Any]:
    """Both stages, from their checkpoints where there are any; writes the folder."""
    corpus = Corpus(plan.work / "data", plan.corpus_bytes, plan.target)
    hybrid = convert(target).requires_grad_(False)
    for layer in hybrid.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.requires_grad_(True)
    figures: dict[str, Any] = {}

    def stage(name: str, loss: Callable[[Tensor], Tensor], tokens: float) -> None:
        num_steps = max(1, int(tokens / plan.batch_tokens))
        training = Training(hybrid, plan.work / f"{name}.pt", num_steps, RATES[name])

        def loss_of(number: int) -> Tensor:
            length = min(512, window_of(number / num_steps, plan.is_toy))
            return loss(corpus.windows(number, 0, max(1, plan.batch_tokens // length), length + 1))

        training.run(loss_of)
        figures[name] = {"steps": training.number, "minutes": round(training.seconds / 60, 1)}

    stage("layers", layers_loss(hybrid, target), 0.3 * plan.tokens)
    for layer in target.model.layers:
        layer.self_attn._forward_hooks.clear()
    hybrid.requires_grad_(True).model.embed_tokens.requires_grad_(False)
    stage("hybrid", lambda ids: distillation_loss(hybrid, target, ids), 0.7 * plan.tokens)
    num_windows = 4 if plan.is_toy else 120
    figures["held_out_nats_per_token"] = held_out_loss(hybrid, corpus, num_windows)
    save_model(hybrid, plan.out, plan.target)
    return figures
