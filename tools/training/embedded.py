"""The embedded target, from text that every machine has.

The target is a dense `MellumConfig`: mathematically Qwen3, and the one small dense family whose MTP
layer transformers loads and runs unpatched, so that the same folder serves this project and
`generate(use_mtp=True)`. Its MTP layer, its draft model and its DFlash head come from recipe.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MellumConfig, MellumForCausalLM, PreTrainedModel

from .corpus import MIX, VOCAB_SIZE, Corpus
from .heads import save_model
from .recipe import TRAIN, Training

REAL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64}
REAL |= {"num_attention_heads": 3, "num_key_value_heads": 1}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32}
TOY |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def new_target(sizes: dict[str, int]) -> MellumForCausalLM:
    layers = sizes["num_hidden_layers"]
    config = MellumConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, tie_word_embeddings=True,
        sliding_window=None, layer_types=["full_attention"] * layers, mlp_layer_types=["dense"] *
        layers, num_mtp_layers=0,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        eos_token_id=0, pad_token_id=0, dtype="float32", attn_implementation=TRAIN, **sizes,
    )  # fmt: skip
    return MellumForCausalLM(config)


def next_token_loss(model: PreTrainedModel, ids: Tensor, begin: int = 0) -> Tensor:
    """Mean nats per token of ids [B, T] behind number `begin`, each given all before it."""
    hidden = model.get_decoder()(ids[:, :-1], use_cache=False)[0][:, begin:]
    logits = model.get_output_embeddings()(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, begin + 1 :].flatten())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, corpus: Corpus, num_windows: int) -> dict[str, float]:
    """Nats per token of each source, on windows of 512 tokens (31 of them only context)."""
    found = {}
    for source in MIX:
        windows = corpus.held_out(source, num_windows, 513).split(1)
        losses = [float(next_token_loss(model, ids, 31)) for ids in windows]
        found[source] = round(sum(losses) / len(losses), 3)
    return found


def train(plan: Any) -> dict[str, Any]:
    """Train the target, or go on from its checkpoints, and write its folder. Returns figures."""
    corpus = Corpus(plan.work / "data", plan.corpus_bytes)
    target = new_target(TOY if plan.is_toy else REAL)
    num_steps = int(plan.tokens / plan.batch_tokens)
    training = Training(target, plan.work / "target.pt", num_steps, 3e-3, muon=0.02)

    def loss_of(number: int) -> Tensor:
        done = number / num_steps  # short windows are cheaper, and copying forms there
        length = 128 if plan.is_toy else 256 if done < 0.65 else 512 if done < 0.9 else 1024
        ids = corpus.windows(number, plan.batch_tokens // length, length + 1)
        return next_token_loss(target, ids)

    training.run(loss_of)
    figures = {
        "tokens": num_steps * plan.batch_tokens,
        "parameters": sum(weight.numel() for weight in target.parameters()),
        "held_out_nats_per_token": held_out_loss(target, corpus, 4 if plan.is_toy else 120),
    }
    save_model(target, plan.out, str(corpus.folder))
    return figures
