"""The embedded target, from text that every machine has: tokenizer, training, its loops unlearnt.

The target is a dense `MellumConfig`: mathematically Qwen3, and the one small dense family whose MTP
layer transformers loads and runs unpatched, so that the same folder serves this project and
`generate(use_mtp=True)`. Its MTP layer, its draft model and its DFlash head come from recipe.py.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import MellumConfig, MellumForCausalLM, PreTrainedModel

from .corpus import MIX, VOCAB_SIZE, Corpus, beginnings, write_whole
from .heads import save_model
from .recipe import TRAIN, Training, hidden_states, mixed

LOOP = 10  # tokens: a text that says this many again is going around
UNLOOP_RATE = 3e-4
UNLOOP_SHARE = 0.42  # of 0.15 to 1: the least after which most demo prompts do not loop
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


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[B, T, V] of whole texts."""
    hidden = hidden_states(model, ids).last_hidden_state
    return F.linear(hidden, model.get_output_embeddings().weight).float()


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean nats per token of ids[:, 1:], each given what stands before it."""
    return F.cross_entropy(logits_of(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, corpus: Corpus, num_windows: int) -> dict[str, float]:
    """Nats per token of each source, on windows of 512 tokens (32 of them only context)."""
    found = {}
    for source in MIX:
        total = count = 0.0
        for ids in corpus.held_out(source, num_windows, 513).split(1):
            logits = logits_of(model, ids[:, :-1])[0, 31:]
            total += F.cross_entropy(logits, ids[0, 32:], reduction="sum").item()
            count += len(logits)
        found[source] = round(total / count, 3)
    return found


def window_of(done: float, is_toy: bool) -> int:
    """Short windows first (cheaper, and copying forms there), long ones for the last third."""
    return 128 if is_toy else 256 if done < 0.65 else 512 if done < 0.9 else 1024


def train(plan: Any) -> dict[str, Any]:
    """Train the target, or go on from its checkpoints, and write its folder. Returns figures."""
    corpus = Corpus(plan.work / "data", plan.corpus_bytes)
    target = new_target(TOY if plan.is_toy else REAL)
    num_steps = int(plan.tokens / plan.batch_tokens)
    training = Training(target, plan.work / "target.pt", num_steps, 3e-3, muon=0.02)

    def loss_of(number: int) -> Tensor:
        length = window_of(number / num_steps, plan.is_toy)
        ids = corpus.windows(number, 0, plan.batch_tokens // length, length + 1)
        return next_token_loss(target, ids)

    training.run(loss_of)
    file = plan.work / "unlooped.pt"
    if not file.exists():
        write_whole(file, partial(torch.save, unlooped(target, corpus, plan)))
    target.load_state_dict(torch.load(file, weights_only=True))
    figures = {
        "tokens": num_steps * plan.batch_tokens,
        "parameters": sum(weight.numel() for weight in target.parameters()),
        "held_out_nats_per_token": held_out_loss(target, corpus, 4 if plan.is_toy else 120),
    }
    save_model(target, plan.out, str(corpus.folder))
    return figures


# ----------------------------------------------------------------------------------- unlooping
def open_prefixes(corpus: Corpus, step: int, batch: int, length: int) -> Tensor:
    """[batch, length] beginnings of texts that should go on, not around: no cycles among them."""
    rows = corpus.tokenizer(beginnings(step, 3 * batch))["input_ids"]
    open_ones = [row for row in rows if len(row) >= length and not any(repeats(row[:length], LOOP))]
    return torch.tensor([row[:length] for row in open_ones[:batch]])


def repeats(row: list[int], size: int) -> list[bool]:
    """For each token, whether it completes a run of `size` tokens that stood in the row before."""
    seen, result = set[tuple[int, ...]](), []
    for end in range(1, len(row) + 1):
        run = tuple(row[max(0, end - size) : end])
        result.append(len(run) == size and run in seen)
        seen.add(run)
    return result


def unlooped(target: PreTrainedModel, corpus: Corpus, plan: Any) -> dict[str, Tensor]:
    """Its weights when it has unlearnt its loops, by unlikelihood (Welleck et al., 1908.04319).

    Small models fall into loops when decoded greedily. Each step lets the target continue texts
    greedily and lowers the probability of tokens with which it repeats LOOP tokens, next to an
    ordinary step on the training text, which keeps everything else (cycles too) in place. Taken
    whole, the change also breaks sentences that must repeat; UNLOOP_SHARE of it keeps both (weights
    interpolate well: Wortsman et al., 2109.01903).
    """
    length, new, batch, num_steps = (24, 24, 4, 2) if plan.is_toy else (40, 96, 32, 150)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    optimizer = torch.optim.AdamW(
        target.requires_grad_(True).parameters(), lr=UNLOOP_RATE, weight_decay=0.0
    )
    for step in tqdm(range(num_steps), desc="unloop"):
        ids, looping = looping_texts(target, open_prefixes(corpus, step, batch, length), new)
        with mixed():
            own = torch.softmax(logits_of(target, ids[:, :-1]), -1)
            likely = own.gather(-1, ids[:, 1:, None]).squeeze(-1)[looping[:, 1:]]
            unlikely = -torch.log1p(-likely.clamp(max=0.999)).sum() / max(1, len(likely))
            text = corpus.windows(10_000_000 + step, 0, 8, 257)
            (next_token_loss(target, text) + unlikely).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = UNLOOP_RATE * min(1.0, 2.0 * (1 - step / num_steps))
        optimizer.step()
        optimizer.zero_grad()
    after = target.state_dict()
    target.requires_grad_(False)
    return {name: torch.lerp(before[name], after[name], UNLOOP_SHARE) for name in after}


@torch.no_grad()
def looping_texts(target: PreTrainedModel, prefixes: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """How the target goes on greedily [B, T], and which of its tokens repeat, as bools."""
    target.set_attn_implementation("sdpa")
    with mixed():
        ids = target.generate(
            prefixes, attention_mask=torch.ones_like(prefixes), max_new_tokens=new, do_sample=False
        )
    target.set_attn_implementation(TRAIN)
    looping = torch.tensor([repeats(row, LOOP) for row in ids.tolist()])
    looping &= (ids == 0).cumsum(1) == 0
    looping[:, : prefixes.shape[1]] = False
    return ids, looping
