"""A mixture of experts that writes a dense model's text: every expert is a copy of its MLP.

A token takes two experts of eight, which a router of small noise chooses, and adds their equal
results with weights that sum to 1. So the text is the dense model's, but for roundings, and drafts
are accepted as they are there. Yet a pass over more tokens reads more experts, as in any mixture.

    folder = folder_of("smollm2")  # for --model; made once, 2.8 GB in the cache's folder

Routers are blind to what all tokens have in common: otherwise most would choose the same experts.
Not covered: dense models other than Llamas without biases.
"""

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

import tools as bench
from runtime.models.catalogue import cache_folder
from runtime.models.loading import load_pretrained
from server.options import Options

SIZES = {"num_local_experts": 8, "num_experts_per_tok": 2}


def folder_of(name: str) -> str:
    """Where the mixture is that is made of the model of that name; it is made if need be."""
    folder = cache_folder() / f"mixture-of-{Path(name).name}"
    if not folder.exists():
        dense = load_pretrained(name, Options(model=name, dtype="float32"))
        texts = [dense.tokenizer(text)["input_ids"] for text in bench.flat(bench.CHATS).values()]
        mixture = mixture_of(dense.model, texts)
        mixture.generation_config.eos_token_id = sorted(dense.eos_ids)
        shutil.rmtree(part := folder.with_suffix(".part"), ignore_errors=True)
        mixture.save_pretrained(part)
        dense.tokenizer.save_pretrained(part)
        part.rename(folder)
    return str(folder)


@torch.no_grad()
def mixture_of(dense: PreTrainedModel, texts: list[list[int]]) -> MixtralForCausalLM:
    """The mixture of a Llama. What tokens have in common is read from `texts`, their ids."""
    known = MixtralConfig().to_dict().keys() - {"model_type", "architectures"}
    fields = {name: value for name, value in dense.config.to_dict().items() if name in known}
    mixture = MixtralForCausalLM(MixtralConfig(**fields | SIZES)).to(dense.dtype)
    kept = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    odd = mixture.load_state_dict(kept, strict=False)
    assert not odd.unexpected_keys and all(".mlp." in name for name in odd.missing_keys), odd
    chance = torch.Generator().manual_seed(0)
    layers = zip(mixture.model.layers, dense.model.layers, common(dense, texts), strict=True)
    for layer, (old, shared) in ((new.mlp, rest) for new, *rest in layers):
        both = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
        layer.experts.gate_up_proj.copy_(both.expand_as(layer.experts.gate_up_proj))
        down = old.mlp.down_proj.weight
        layer.experts.down_proj.copy_(down.expand_as(layer.experts.down_proj))
        noise = 0.02 * torch.randn(layer.gate.weight.shape, generator=chance)
        layer.gate.weight.copy_(noise - torch.outer(noise @ shared, shared))
    return mixture.eval()


def common(dense: PreTrainedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    """The direction of the mean of what each layer's MLP is given: unit vectors."""
    sums: dict[nn.Module, torch.Tensor] = {}

    def add(mlp: nn.Module, given: tuple[torch.Tensor]) -> None:
        sums[mlp] = sums.get(mlp, 0) + given[0].float().sum((0, 1))

    hooks = [layer.mlp.register_forward_pre_hook(add) for layer in dense.model.layers]
    for text in texts:
        dense(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return [nn.functional.normalize(sums[layer.mlp], dim=0) for layer in dense.model.layers]
