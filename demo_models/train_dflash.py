"""Train a DFlash head for the embedded target, from its training texts and what it writes itself.

One run goes: texts → the target's own texts → training → a folder that `--dflash` loads. Every
stage writes to `--work` as it goes, and goes on from there when the command is given again.

    python demo_models/train_dflash.py --work /tmp/dflash                    # everything
    python demo_models/train_dflash.py --work /tmp/toy --out /tmp/head --smoke   # in a minute

A block [anchor, mask, mask, …] stands at each of some random places of a text. Its layers see the
target's states of all places before the anchor, and the block:

    target's states    s₀ s₁ … sₐ₋₁ │ sₐ …           context of the block at a: all before a
    block              anchor xₐ, masks at a + 1, …, a + W − 1
    learns             the target's probabilities after xₐ, xₐ₊₁, …    weights 1, .78, .61, …

Those who draft do not know xₐ₊₁ when they draft xₐ₊₂, so what can be learnt is its distribution
whatever stands between. Early tokens count more, as a wrong one makes all that follow worthless.

Source: arXiv 2602.06036. Not covered: a GPU, several processes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import exp
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # drafters/ lies there

import numpy as np
import torch
import train
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafters.dflash import BlockConfig, DFlashHead

BLOCK_SIZE, NUM_LAYERS, MASK = 8, 2, 0  # the end of a text is nobody's anchor: it is the mask
DECAY = 4.0  # places until a weight has fallen to 1/e
ANCHORS = 4  # one in so many places of a window
FIRST = 4  # places that are never anchors, for want of a context
OWN_SHARE = 0.7  # of the windows: the target's own texts
NUM_OWN, OWN_BATCH, PREFIX, NEW = 110_000, 128, 40, 216  # tokens; texts at once; of each text
_SIZE = {"batch_tokens": 1024, "corpus_bytes": 3_000_000}
_SHARED = (  # what a head's config takes from its target's
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "attention_bias",
)  # fmt: skip


class Texts(train.Corpus):
    """The target's training texts in its own tokens, and what it writes, once that is there."""

    def __init__(self, folder: Path, size: train.Size, tokenizer: str) -> None:
        self._name = tokenizer
        super().__init__(folder, size)
        if ("own", "train", "tokens") in self.streams:
            self.mix = {name: (1 - OWN_SHARE) * share for name, share in train.MIX.items()}
            self.mix["own"] = OWN_SHARE

    def new_tokenizer(self, texts: list[str]) -> train.PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(self._name)


@torch.inference_mode()
def write_texts(name: str, corpus: Texts, work: Path, num_tokens: int) -> None:
    """Let the target go on with beginnings of its training texts; every other batch is sampled."""
    folder, target = work / "own", AutoModelForCausalLM.from_pretrained(name, dtype=train.FAST)
    folder.mkdir(exist_ok=True)
    batch = min(OWN_BATCH, -(-num_tokens // NEW))
    files = [folder / f"{i:04d}.npy" for i in range(-(-num_tokens // (batch * NEW)))]
    for i, file in enumerate(tqdm(files, desc="the target's own texts")):
        if file.exists():
            continue
        prefixes = corpus.windows(20_000_000 + i, 0, batch, PREFIX)
        torch.manual_seed(i)
        ids = target.generate(
            prefixes, attention_mask=torch.ones_like(prefixes), max_new_tokens=NEW,
            do_sample=i % 2 == 1, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
        )  # fmt: skip
        np.save(file.with_suffix(".part.npy"), ids.numpy().astype(np.uint16))
        file.with_suffix(".part.npy").rename(file)
    rows = [row for file in files for row in np.load(file)]
    ends = [PREFIX + int(np.argmax(np.append(row[PREFIX:], 0) == 0)) + 1 for row in rows]
    rows = [row[:end] for row, end in zip(rows, ends, strict=True)]
    starts = np.cumsum([0, *map(len, rows)])[:-1]
    np.save(corpus.folder / "own.train.starts.npy", starts)
    np.save(corpus.folder / "own.train.tokens.npy", np.concatenate(rows))


def new_head(target: PreTrainedModel) -> DFlashHead:
    """A head that begins as the last layers of the target, which must be of Qwen3's kind."""
    own, layers = target.config, target.model.layers
    ids, rope = (2, len(layers) - 3, len(layers) - 1), own.rope_parameters
    layer = AutoConfig.for_model(
        "qwen3",
        num_hidden_layers=NUM_LAYERS,
        rope_parameters=rope.get("full_attention", rope),
        **{name: getattr(own, name) for name in _SHARED},
    )
    layer._attn_implementation = "sdpa"
    head = DFlashHead(BlockConfig(layer, BLOCK_SIZE, MASK, ids, len(layers)))
    with torch.no_grad():
        nn.init.normal_(head.fc.weight, std=0.01)
        head.fc.weight.unflatten(1, (len(ids), -1))[:, 1] += torch.eye(own.hidden_size)
        for new, old in zip(head.layers, layers[-NUM_LAYERS:], strict=True):
            new.load_state_dict(old.state_dict())
        head.hidden_norm.load_state_dict(layers[-2].input_layernorm.state_dict())
        head.norm.load_state_dict(target.model.norm.state_dict())
    return head


def rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, n, heads, d], rotated to where rope's cos and sin [B, n, d] say that it stands."""
    (cos, sin), halves = rope, x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat([-halves[1], halves[0]], -1) * sin[:, :, None]


def run_layer(
    layer: nn.Module, x: Tensor, context: Tensor, rope: list[tuple[Tensor, Tensor]], seen: Tensor
) -> Tensor:
    """One layer over blocks x [B, A, W, D]; `seen` [B, A, T]: what they see of context [B, T, D].

    `rope` is that of the blocks' places [B, A · W], and of the context's.
    """
    own, (num, size), read = layer.self_attn, x.shape[1:3], layer.input_layernorm(x).flatten(1, 2)

    def heads(name: str, given: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[B, n, D] -> [B, n, heads, d], normed and rotated."""
        found = getattr(own, f"{name}_proj")(given).unflatten(-1, (-1, own.head_dim))
        return found if name == "v" else rotated(getattr(own, f"{name}_norm")(found), rope)

    groups, shape = own.num_key_value_groups, (num, size)
    query = heads("q", read, rope[0]).unflatten(1, shape).unflatten(3, (-1, groups))
    key, value = (heads(name, read, rope[0]).unflatten(1, shape) for name in "kv")
    old_key, old_value = (heads(name, context, rope[1]) for name in "kv")
    old = torch.einsum("bawkgd,btkd->bkgawt", query, old_key).float()
    old = old.masked_fill(~seen[:, None, None, :, None], -torch.inf)
    new = torch.einsum("bawkgd,bavkd->bkgawv", query, key).float()
    weights = torch.softmax(torch.cat([old, new], -1) * own.scaling, -1).to(value.dtype)
    old, new = weights.split([context.shape[1], size], -1)
    out = torch.einsum("bkgawt,btkd->bawkgd", old, old_value)
    out = out + torch.einsum("bkgawv,bavkd->bawkgd", new, value)
    x = x + own.o_proj(out.flatten(3))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def block_logits(
    head: DFlashHead, target: PreTrainedModel, states: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """[B, A, W - 1, V] of blocks at anchors [B, A] of texts [B, T] with states [B, T, L · D]."""
    context, size = head.hidden_norm(head.fc(states)), head.config.block_size
    block = torch.full((*anchors.shape, size), head.config.mask_token_id)
    block[..., 0] = ids.gather(1, anchors)
    x = target.get_input_embeddings()(block)
    every = torch.arange(states.shape[1])
    at = (anchors[..., None] + torch.arange(size)).flatten(1)
    rope = [head.rotary_emb(x, at), head.rotary_emb(x, every[None])]
    seen = every < anchors[..., None]
    for layer in head.layers:
        x = run_layer(layer, x, context, rope, seen)
    return train.logits_of(target, head.norm(x[:, :, 1:]))


@torch.no_grad()
def read(target: PreTrainedModel, head: DFlashHead, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the head reads of texts [B, T], [B, T, L · D]; and the target's logits [B, T, V]."""
    hidden = target.model(
        ids,
        attention_mask=train.causal(ids.shape[1])[None, None],
        position_ids=torch.arange(ids.shape[1])[None],
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    states = torch.cat([hidden[i + 1] for i in head.config.target_layer_ids], -1)
    return states, train.logits_of(target, hidden[-1])


def loss_of(head: DFlashHead, target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The loss on windows [B, T]: cross entropy against the target's probabilities, in nats."""
    weights = torch.tensor([exp(-k / DECAY) for k in range(BLOCK_SIZE - 1)])

    def loss(ids: Tensor) -> Tensor:
        states, logits = read(target, head, ids)
        free = ids.shape[1] - BLOCK_SIZE - FIRST
        places = torch.rand(len(ids), free).topk(ids.shape[1] // ANCHORS).indices + FIRST
        judged = places[..., None] + torch.arange(BLOCK_SIZE - 1)
        rows = torch.arange(len(ids))[:, None, None]
        wanted = torch.softmax(logits[rows, judged], -1)
        found = torch.log_softmax(block_logits(head, target, states, ids, places), -1)
        return ((wanted * found).sum(-1) * -weights).sum(-1).mean() / weights.sum()

    return loss


@torch.no_grad()
def acceptance(head: DFlashHead, target: PreTrainedModel, corpus: Texts) -> list[float]:
    """The share of places in greedy texts from which 1, 2, … drafted tokens in a row are right.

    The texts go on with beginnings that are held out.
    """
    stream, size = corpus.streams["library", "held_out", "tokens"].astype(np.int64), BLOCK_SIZE
    begins = np.linspace(0, len(stream) - PREFIX, 48).astype(int)
    prefixes = torch.from_numpy(np.stack([stream[at : at + PREFIX] for at in begins]))
    target.set_attn_implementation("sdpa")
    ids = target.generate(
        prefixes, attention_mask=torch.ones_like(prefixes), max_new_tokens=96, min_new_tokens=96,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    target.set_attn_implementation("train")
    anchors = torch.arange(PREFIX, ids.shape[1] - size + 1).expand(len(ids), -1)
    states, _ = read(target, head, ids)
    right = []
    for one in (slice(i, i + 1) for i in range(len(ids))):
        drafted = block_logits(head, target, states[one], ids[one], anchors[one]).argmax(-1)
        right.append(drafted == ids[one].unfold(1, size, 1)[:, PREFIX:, 1:])
    shares = torch.cat(right).cumprod(-1).float().mean((0, 1))
    return [round(float(share), 4) for share in shares]


def main() -> None:
    """Run all stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = Path(__file__).parent
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and token files")
    parser.add_argument("--target", default=str(folder / "target"))
    parser.add_argument("--out", type=Path, default=folder / "target_dflash")
    parser.add_argument("--tokens", type=float, default=10e6, help="to train on")
    parser.add_argument("--own", type=int, default=NUM_OWN, help="tokens that the target writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a toy, to see that every stage runs")
    args = parser.parse_args()
    args.stage, args.compile, size = "dflash", False, replace(train.FULL, **_SIZE)
    if args.smoke:
        args.tokens, args.own, size = 2e3, 8 * NEW, train.SMOKE
    print(json.dumps(run(args, size)))


def run(args: argparse.Namespace, size: train.Size) -> dict[str, object]:
    """All stages; returns the figures."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    target.requires_grad_(False)
    corpus = Texts(args.work / "data", size, args.target)
    if ("own", "train", "tokens") not in corpus.streams:
        write_texts(args.target, corpus, args.work, args.own)
        corpus = Texts(args.work / "data", size, args.target)
    target.set_attn_implementation("train")
    head = new_head(target)
    trainer = train.Trainer("dflash", head, args.work, size, args)
    trainer.run(corpus, loss_of(head, target))
    head.eval().config.save(head, args.out)
    shares = acceptance(head, target, corpus)
    minutes = round(trainer.seconds / 60, 1)
    figures = {"tokens": trainer.tokens, "steps": trainer.step, "minutes": minutes}
    return figures | {"accepted": shares, "tokens_per_pass": round(1 + sum(shares), 3)}


if __name__ == "__main__":
    main()
