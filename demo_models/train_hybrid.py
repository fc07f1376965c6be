"""Make the embedded hybrid of the embedded target: most of its attention becomes recurrent.

`hybrid/` is of Qwen3.5's kind: three layers of four are gated delta nets, which keep one state in
the place of keys, and every fourth is attention. It is not trained from nothing:

    copied          embeddings, MLPs, norms, and the attention of every fourth layer: the same
                    numbers in Qwen3.5's form (norms less 1; gates of 1/2, so outputs doubled)
    stage layers    each new layer learns what the attention gave that stood in its place,
                    reading what that attention read (MOHAWK, arXiv 2408.10189)
    stage hybrid    the whole model but its embeddings learns the target's probabilities
    stage mtp       the MTP head, copied from the target's, learns the hybrid's probabilities

    python demo_models/train_hybrid.py --work /tmp/hybrid                            # everything
    python demo_models/train_hybrid.py --work /tmp/toy --out /tmp/model --smoke      # a toy

Each stage goes on from its last checkpoint. The last line on stdout is JSON with the figures.

Sources: gated delta networks, arXiv 2412.06464. Not covered: a GPU, several processes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for train_dflash: drafters/

import torch
import train
import train_dflash
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpModel

PERIOD = 4  # every fourth layer keeps its attention, the last one among them
SHARE = 0.85  # of the loss of stage hybrid: against the target's probabilities; the rest: the text
RATES = {"layers": 3e-3, "hybrid": 1.5e-3, "mtp": 1.5e-3}
TOKENS = {"layers": 0.5e6, "hybrid": 1.25e6, "mtp": 0.5e6}
HEAD = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}  # in transformers' words
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
        mtp_num_hidden_layers=1,
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
    hybrid.set_attn_implementation("train")
    hybrid.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    copy_norm(hybrid.model.norm, target.model.norm)
    for new, old in zip(hybrid.model.layers, target.model.layers, strict=True):
        copy_block(new, old)
    return hybrid


@torch.no_grad()
def convert_head(hybrid: PreTrainedModel, target: PreTrainedModel) -> MtpModel:
    """The target's MTP head in the hybrid's form."""
    for name, value in HEAD.items():
        setattr(hybrid.config, name, value)
    head = MtpModel(hybrid, 1)
    old = MtpModel.from_pretrained(target).layers[0].float()
    new = head.layers[0]
    for name in ("enorm", "hnorm", "post_norm"):
        copy_norm(getattr(new, name), getattr(old, name))
    new.eh_proj.load_state_dict(old.eh_proj.state_dict())
    copy_block(new.mtp_block, old.mtp_block)
    return head


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
            train.hidden_states(target, ids[:, :-1])
        errors = [
            (layer(given) - wanted).square().mean() / wanted.var()
            for layer, (given, wanted) in zip(new, seen, strict=True)
        ]
        return sum(errors) / len(errors)

    return loss


def in_float32(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The trainer computes in bfloat16, which a CPU without instructions for it does slowly."""

    def wrapped(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return loss(ids)

    return wrapped


def stage(
    name: str, module: nn.Module, args: argparse.Namespace, size: train.Size
) -> train.Trainer:
    """A trainer with AdamW alone: Muon computes in bfloat16, here for longer than all else."""
    trainer = train.Trainer(name, module, args.work, size, args)
    trainer.optimizers = [torch.optim.AdamW(trainer.params, betas=(0.9, 0.95), weight_decay=0.01)]
    trainer.base_rates = [RATES[name]]
    return trainer


def run(args: argparse.Namespace, size: train.Size) -> dict[str, object]:
    """All stages; returns the figures."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    corpus = train_dflash.Texts(args.work / "data", size, args.target)
    target = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=torch.float32, attn_implementation="train"
    ).requires_grad_(False)
    hybrid = convert(target).requires_grad_(False)
    for layer in hybrid.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.requires_grad_(True)
    layers = stage("layers", hybrid, args, size)
    layers.run(corpus, in_float32(layers_loss(hybrid, target)))
    for layer in target.model.layers:
        layer.self_attn._forward_hooks.clear()

    hybrid.requires_grad_(True).model.embed_tokens.requires_grad_(False)
    whole = stage("hybrid", hybrid, args, size)
    whole.run(corpus, in_float32(lambda ids: train.distillation_loss(hybrid, target, ids, SHARE)))
    head = convert_head(hybrid.requires_grad_(False).eval(), target)
    head.requires_grad_(False).layers.requires_grad_(True)
    mtp = stage("mtp", head, args, size)
    mtp.run(corpus, in_float32(head_loss(head, hybrid)))
    return export(hybrid, head, corpus, args, [layers, whole, mtp])


def head_loss(head: MtpModel, hybrid: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """That of the target's own head."""

    def loss(ids: Tensor) -> Tensor:
        losses = train.mtp_losses(head, hybrid, ids)
        return sum(w * part for w, part in zip(train.MTP_WEIGHTS, losses, strict=True))

    return loss


def export(
    hybrid: PreTrainedModel,
    head: MtpModel,
    corpus: train.Corpus,
    args: argparse.Namespace,
    stages: list[train.Trainer],
) -> dict[str, object]:
    """Write the folder, with a config like the published ones', and measure what stands in it."""
    for name in HEAD:
        delattr(hybrid.config, name)
    train.write_folder(hybrid, head, corpus, args.out)
    figures = train.figures(args.out, corpus, 4 if args.smoke else 120)
    figures["mtp_parameters"] = sum(p.numel() for p in head.layers.parameters())
    figures["stages"] = {
        t.name: {"tokens": t.tokens, "steps": t.step, "minutes": round(t.seconds / 60, 1)}
        for t in stages
    }
    (args.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def main() -> None:
    """Run all stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = Path(__file__).parent
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and token files")
    parser.add_argument("--target", default=str(folder / "target"))
    parser.add_argument("--out", type=Path, default=folder / "hybrid")
    for name, tokens in TOKENS.items():
        parser.add_argument(f"--{name}", type=float, default=tokens, help="tokens of this stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a toy, to see that every stage runs")
    args = parser.parse_args()
    args.stage, args.tokens, args.compile, base = None, None, False, train.FULL
    tokens = {name: getattr(args, name) for name in TOKENS}
    if args.smoke:
        tokens, base = dict.fromkeys(TOKENS, 4e3), train.SMOKE
    batch = min(base.batch_tokens, 2048)
    print(json.dumps(run(args, replace(base, tokens=tokens, batch_tokens=batch))))


if __name__ == "__main__":
    main()
