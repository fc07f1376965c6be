"""Train an EAGLE-3 head for a target, from prompts to a folder that `--eagle3` loads.

One run goes: prompts → the target's own answers → its hidden states → training → the head. Every
stage writes to `--work` as it goes, and goes on from there when the command is given again.

    python demo_models/train_eagle3.py --target FOLDER --work /tmp/eagle3            # everything
    python demo_models/train_eagle3.py --target FOLDER --work /tmp/eagle3 --stage answers
    python demo_models/train_eagle3.py --target FOLDER --work /tmp/toy --smoke       # in a minute

A head learns what its target does next, so it is trained on the target's own answers, against the
target's probabilities (not only the chosen tokens). A third of the prompts come from templates and
from texts that Python ships (eagle3_prompts.py). A third the target writes itself: it goes on with
its chat template where a user's words would stand (arXiv 2406.08464). A third ask about paragraphs
of its earlier answers.

Training-time test: while drafting, a head reads its own outputs. So it is run over K steps from
every place in a text, and each step reads what the step before gave:

    step 0    h₀ ← (states of the target at i, token i + 1)     sees the keys of step 0 up to i
    step s    hₛ ← (hₛ₋₁, token i + 1 + s)                      and its own of steps 1 … s

Source: arXiv 2503.01840. Not covered: a GPU, several processes, heads of more than one layer.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost 10x on busy cores
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # drafters/ lies there

import eagle3_prompts
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from train import FAST, in_bfloat16
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafters.eagle3_head import Eagle3Head, HeadConfig, save_head

NUM_STEPS = 4  # of the head from one place: the K that it learns for
STEP_WEIGHT = 0.8  # of a step's loss, relative to the one before
_SHARED = (  # what a head's config takes from its target's
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "attention_bias",
)  # fmt: skip
TOLD_TOKENS = 200_000  # between two lines of the log
HELD_OUT = 40  # one chat in so many is for validation
SHARE_OF_PLACES = 0.5  # of a text, that steps 1, 2, … start from: neighbours teach much the same


@dataclass(frozen=True)
class Plan:
    """What a full run and a toy differ in."""

    num_tokens: int = 3_000_000  # of answers
    max_answer: int = 160  # tokens
    batch: int = 96  # answers at once
    epochs: float = 4.0
    batch_tokens: int = 1024  # of a step of training
    draft_vocab_size: int = 10_240
    learning_rate: float = 2e-3


SMOKE = Plan(4_000, 48, 64, 5.0, 512, 512, 3e-3)


# ---------------------------------------------------------------------------------- answers
@dataclass
class Chats:
    """Texts one behind the other: a prompt in the target's chat template, and its answer."""

    tokens: np.ndarray  # [all] uint16 or uint32
    lengths: np.ndarray  # [chats], of the whole text
    prompt_lengths: np.ndarray  # [chats], how many of its tokens are prompt

    @classmethod
    def load(cls, file: Path) -> "Chats":
        with np.load(file) as data:
            return cls(data["tokens"], data["lengths"], data["prompt_lengths"])

    @property
    def begins(self) -> np.ndarray:
        """[chats]: where each text begins in `tokens`."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)[:-1]])


def write_whole(file: Path, write: Any) -> None:
    """Write a file under another name first, so that none is half there."""
    beside = file.with_suffix(".part" + file.suffix)
    write(beside)
    beside.rename(file)


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: Any, prompts: list[str], max_tokens: int, seed: int | None
) -> Chats:
    """The target's answers to some prompts: greedy, or drawn at T = 1 from a seed."""
    texts = prompts
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=not tokenizer.chat_template,
    )
    sampling: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    outputs = target.generate(
        **batch,
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    rows, width = [], batch["input_ids"].shape[1]
    named = target.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    for mask, output in zip(batch["attention_mask"], outputs, strict=True):
        new = output[width:].tolist()
        length = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        prompt = output[width - int(mask.sum()) : width].tolist()
        rows.append((prompt, new[:length]))
    return Chats(
        np.concatenate([np.array(prompt + new, np.uint32) for prompt, new in rows]),
        np.array([len(prompt) + len(new) for prompt, new in rows], np.uint32),
        np.array([len(prompt) for prompt, _ in rows], np.uint32),
    )


@torch.inference_mode()
def written_by(target: PreTrainedModel, tokenizer: Any, number: int, seed: int) -> list[str]:
    """Up to `number` prompts that a chat model writes in its user's place; else none."""
    if not tokenizer.chat_template:
        return []
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    chat = [{"role": "user", "content": mark}]
    before, after = tokenizer.apply_chat_template(chat, tokenize=False).split(mark)
    begin = tokenizer(before, return_tensors="pt", add_special_tokens=False).input_ids
    end = tokenizer(after, add_special_tokens=False).input_ids[0]
    torch.manual_seed(seed)
    outputs = target.generate(
        begin.expand(number, -1),
        attention_mask=torch.ones(number, begin.shape[1], dtype=torch.long),
        max_new_tokens=64,
        eos_token_id=end,
        pad_token_id=end,
        do_sample=True,
        temperature=0.9,
        top_k=40,  # and no top_p, which would sort all words
    )[:, begin.shape[1] :]
    texts = tokenizer.batch_decode([row for row in outputs if end in row], skip_special_tokens=True)
    return [text.strip() for text in texts if len(text.strip()) > 12]


def paragraphs(files: list[Path], tokenizer: Any) -> list[str]:
    """Paragraphs of prose from answers."""
    found = []
    for chats in map(Chats.load, files):
        ends = chats.begins + chats.lengths
        for begin, end in zip(chats.begins + chats.prompt_lengths, ends, strict=True):
            text = tokenizer.decode(chats.tokens[begin:end], skip_special_tokens=True)
            parts = (" ".join(part.split()) for part in text.split("\n\n"))
            found += [p for p in parts if 150 < len(p) < 500 and p[-1] in ".!?" and "`" not in p]
    return found


def prompts_of(
    number: int, target: PreTrainedModel, tokenizer: Any, work: Path, plan: Plan
) -> list[str]:
    """The prompts of ten batches in a row, from files where they are there, by rising length."""
    file = work / "prompts" / f"{number:03d}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        total, rng = 10 * plan.batch, np.random.default_rng(number)
        made = written_by(target, tokenizer, total // 3, number)
        # Of all answers that are there: a run that goes on reads the prompts in the file.
        texts = paragraphs(_files(work / "answers"), tokenizer)
        rng.shuffle(texts)
        made += [
            eagle3_prompts.about(text, number + i) for i, text in enumerate(texts[: total // 3])
        ]
        ready, begin = eagle3_prompts.prompts(), number * total // 3
        made += [ready[(begin + i) % len(ready)] for i in range(total - len(made))]
        # A batch is padded to its longest prompt, so neighbours get like lengths.
        text = json.dumps(sorted(made, key=len), indent=0, ensure_ascii=False)
        write_whole(file, partial(Path.write_text, data=text, encoding="utf-8"))
    return json.loads(file.read_text("utf-8"))


def make_answers(target: PreTrainedModel, tokenizer: Any, work: Path, plan: Plan) -> None:
    """Answer prompts, a batch a file, until there are enough tokens."""
    folder = work / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(_answered(Chats.load(file)) for file in _files(folder))
    with tqdm(total=plan.num_tokens, initial=done, unit=" tokens", desc="answers") as progress:
        for number in count():
            file = folder / f"{number:05d}.npz"
            if done >= plan.num_tokens:
                break
            if file.exists():
                continue
            begin = number % 10 * plan.batch
            prompts = prompts_of(number // 10, target, tokenizer, work, plan)
            seed = number if number % 3 == 2 else None  # one batch in three is drawn
            chats = answer(
                target, tokenizer, prompts[begin : begin + plan.batch], plan.max_answer, seed
            )
            write_whole(file, partial(_save, chats))
            done += _answered(chats)
            progress.update(_answered(chats))


def _files(folder: Path) -> list[Path]:
    """The answers that are whole."""
    return sorted(file for file in folder.glob("*.npz") if ".part" not in file.name)


def _answered(chats: Chats) -> int:
    return int(chats.lengths.sum() - chats.prompt_lengths.sum())


def _save(chats: Chats, file: Path) -> None:
    np.savez_compressed(file, **vars(chats))


# ----------------------------------------------------------------------------------- states
def make_states(target: PreTrainedModel, work: Path, layer_ids: tuple[int, ...]) -> None:
    """The target's states of all texts, as bfloat16: [tokens, layers + 1, D] a file of answers.

    The last one of each token is what the output layer reads.
    """
    folder = work / "states"
    folder.mkdir(parents=True, exist_ok=True)
    for file in tqdm(_files(work / "answers"), desc="states", unit=" files"):
        states = folder / f"{file.stem}.npy"
        if not states.exists():
            found = states_of(target, Chats.load(file), layer_ids)
            write_whole(states, partial(np.save, arr=found.view(torch.int16).numpy()))


@torch.inference_mode()
def states_of(target: PreTrainedModel, chats: Chats, layer_ids: tuple[int, ...]) -> Tensor:
    """[tokens, layers + 1, D] bfloat16 of all texts, one behind the other."""
    width = target.config.hidden_size
    result = torch.empty(len(chats.tokens), len(layer_ids) + 1, width, dtype=torch.bfloat16)
    order = np.argsort(chats.lengths, kind="stable")
    for part in np.array_split(order, max(1, len(order) // 16)):
        longest = int(chats.lengths[part].max())
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        for row, chat in zip(ids, part, strict=True):
            begin, length = chats.begins[chat], chats.lengths[chat]
            row[:length] = torch.from_numpy(chats.tokens[begin : begin + length].astype(np.int64))
        hidden = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        found = torch.stack([hidden[i] for i in (*layer_ids, -1)], 2).bfloat16()
        for row, chat in zip(found, part, strict=True):  # pads come last, so nothing sees them
            begin, length = chats.begins[chat], chats.lengths[chat]
            result[begin : begin + length] = row[:length]
    return result


@dataclass
class Batch:
    """Some texts [B, T] with their states, padded at the end."""

    tokens: Tensor  # [B, T]
    states: Tensor  # [B, T, layers · D]
    final: Tensor  # [B, T, D]
    begins: Tensor  # [B]: the first place whose state is to give a token of the answer
    lengths: Tensor  # [B]


class Data:
    """All texts and their states, the latter left on disk."""

    def __init__(self, work: Path) -> None:
        files = _files(work / "answers")
        if not files:
            raise SystemExit(f"error: no answers in {work}: run the stages before this one")
        files = [file for file in files if (work / "states" / f"{file.stem}.npy").exists()]
        self.parts = [Chats.load(file) for file in files]
        self.states = [
            np.load(work / "states" / f"{file.stem}.npy", mmap_mode="r") for file in files
        ]
        every = [(p, c) for p, chats in enumerate(self.parts) for c in range(len(chats.lengths))]
        # A chat is held out by its number in the file: adding files moves none to the other side.
        self.train = [(p, c) for p, c in every if c % HELD_OUT]
        self.held_out = [(p, c) for p, c in every if not c % HELD_OUT]

    def lengths(self, chats: list[tuple[int, int]]) -> np.ndarray:
        return np.array([self.parts[p].lengths[c] for p, c in chats])

    def batch(self, chats: list[tuple[int, int]]) -> Batch:
        """Load some texts."""
        lengths = torch.tensor([int(self.parts[p].lengths[c]) for p, c in chats])
        prompts = torch.tensor([int(self.parts[p].prompt_lengths[c]) for p, c in chats])
        longest, (_, layers, width) = int(lengths.max()), self.states[0].shape
        tokens = torch.zeros(len(chats), longest, dtype=torch.long)
        states = torch.zeros(len(chats), longest, layers, width, dtype=torch.bfloat16)
        for b, (p, c) in enumerate(chats):
            begin, length = self.parts[p].begins[c], int(lengths[b])
            own = slice(begin, begin + length)
            tokens[b, :length] = torch.from_numpy(self.parts[p].tokens[own].astype(np.int64))
            read = torch.from_numpy(np.array(self.states[p][own])).view(torch.bfloat16)
            states[b, :length] = read
        flat = states[:, :, :-1].flatten(2)
        return Batch(tokens, flat, states[:, :, -1], (prompts - 2).clamp(min=0), lengths)

    def epochs(self, plan: Plan, first: int) -> Iterator[list[tuple[int, int]]]:
        """Batches of texts of like lengths for ever, from batch number `first` on."""
        number, epoch = 0, 0
        lengths = self.lengths(self.train)
        while True:
            rng = np.random.default_rng(epoch)
            order = np.argsort(lengths + rng.uniform(0, 24, len(lengths)), kind="stable")
            groups, group = [], []
            for i in order:
                group.append(self.train[i])
                if len(group) * lengths[i] >= plan.batch_tokens:
                    groups.append(group)
                    group = []
            for at in rng.permutation(len(groups)):
                if number >= first:
                    yield groups[at]
                number += 1
            epoch += 1


# ------------------------------------------------------------------------------------- head
def draft_vocabulary(data: Data, target: PreTrainedModel, size: int) -> Tensor:
    """The ids [size] of the words that are commonest in the texts, in rising order."""
    counts = np.zeros(target.config.vocab_size, np.int64)
    for chats in data.parts:
        counts += np.bincount(chats.tokens, minlength=len(counts))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def new_head(target: PreTrainedModel, vocabulary: Tensor, layer_ids: tuple[int, ...]) -> Eagle3Head:
    """A head that begins as a part of the target, which must be of Llama's or Qwen3's kind.

    fc hands on the last of the states, the layer is the target's last one (which hardly looks at
    the embedding yet), and the output rows are the target's.
    """
    own, last, width = target.config, target.model.layers[-1], target.config.hidden_size
    rope = own.rope_parameters
    layer = AutoConfig.for_model(
        "qwen3" if hasattr(last.self_attn, "q_norm") else "llama",
        num_hidden_layers=1,
        rope_parameters=rope.get("full_attention", rope),
        head_dim=last.self_attn.head_dim,
        **{name: getattr(own, name) for name in _SHARED},
    )
    layer._attn_implementation = "sdpa"
    config = HeadConfig(layer, len(vocabulary), width, layer_ids, None)
    head = Eagle3Head(config, len(layer_ids))
    with torch.no_grad():
        nn.init.normal_(head.fc.weight, std=0.002)
        head.fc.weight[:, -width:] += torch.eye(width)
        first, weights = head.layers[0], last.state_dict()
        for name in ("q", "k", "v"):
            key = f"self_attn.{name}_proj.weight"
            wide = torch.zeros(len(weights[key]), 2 * width)
            nn.init.normal_(wide[:, :width], std=0.01)
            wide[:, width:] = weights[key]
            weights[key] = wide
        weights["hidden_norm.weight"] = weights["input_layernorm.weight"]
        weights["input_layernorm.weight"] = torch.ones(width)
        first.load_state_dict(weights)
        head.norm.load_state_dict(target.model.norm.state_dict())
        head.lm_head.weight.copy_(target.lm_head.weight[vocabulary])
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    head.embed_tokens = target.get_input_embeddings().requires_grad_(False)
    return head


class Unrolled:
    """The head's layer over several steps from the same places, with the keys of all of them."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head, self.layer = head, head.layers[0]
        self.attention, config = self.layer.self_attn, head.config.layer
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.first: tuple[Tensor, Tensor] | None = None  # keys and values of step 0
        self.later: list[tuple[Tensor, Tensor]] = []  # and those of each later step

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """Pairs (hidden [B, m, D], ids [B, m]) that began at `places` [B, m] -> the next h."""
        x = torch.cat([self.head.embed_tokens(ids).to(hidden.dtype), hidden], -1)
        read, residual = self.layer.read(x)
        cos, sin = self.head.rotary_emb(hidden, positions)
        query = self._rotated(self.attention.q_proj(read), "q_norm", cos, sin)
        key = self._rotated(self.attention.k_proj(read), "k_norm", cos, sin)
        value = self.attention.v_proj(read).unflatten(-1, (-1, query.shape[-1])).transpose(1, 2)
        attended = self._attend(query, key, value, places).transpose(1, 2).flatten(2)
        x = residual + self.attention.o_proj(attended)
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

    def _rotated(self, x: Tensor, norm: str, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, m, heads · d] -> [B, heads, m, d], normed as in Qwen3, rotated to its positions."""
        x = x.unflatten(-1, (-1, cos.shape[-1]))
        x = getattr(self.attention, norm, nn.Identity())(x).transpose(1, 2)
        halves = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-halves[1], halves[0]], -1) * sin[:, None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
        """[B, H, m, d]: softmax over the keys of step 0 up to the place, and one of each step."""
        batch, heads, m, width = query.shape
        groups = heads // self.kv_heads
        if self.first is None:
            self.first = key, value
        else:
            self.later.append((key, value))
        grouped = query.reshape(batch, self.kv_heads, groups * m, width)
        scores = (grouped @ self.first[0].transpose(-1, -2)).view(batch, heads, m, -1).float()
        unseen = torch.arange(scores.shape[-1]) > places[:, None, :, None]
        parts = [scores.masked_fill(unseen, float("-inf"))]
        split = query.unflatten(1, (self.kv_heads, groups))
        for own, _ in self.later:
            parts.append((split * own[:, :, None]).sum(-1).flatten(1, 2)[..., None].float())
        weights = torch.softmax(torch.cat(parts, -1) * width**-0.5, -1).to(query.dtype)
        number = self.first[0].shape[2]
        old = weights[..., :number].reshape(batch, self.kv_heads, groups * m, number)
        out = (old @ self.first[1]).view(batch, heads, m, width)
        for s, (_, own) in enumerate(self.later):
            weight = weights[..., number + s].unflatten(1, (self.kv_heads, groups))[..., None]
            out = out + (weight * own[:, :, None]).flatten(1, 2)
        return out


def unroll(
    head: Eagle3Head, batch: Batch, places: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each step (h [B, m, D], the place whose token it predicts from [B, m], valid [B, m]).

    Step 0 runs from every place, since later steps see its keys; then only `places` [B, m] go on.
    """
    unrolled, length = Unrolled(head), batch.tokens.shape[1]
    every = torch.arange(length).expand(len(batch.tokens), -1)
    hidden, at = head.enter(batch.states.to(head.fc.weight.dtype)), every
    for step in range(NUM_STEPS):
        read = (at + 1 + step).clamp(max=length - 1)  # the token, and the state, to go on from
        hidden = unrolled.step(batch.tokens.gather(1, read), hidden, at + step, at)
        if step == 0:
            wide = places[..., None].expand(-1, -1, hidden.shape[-1])
            hidden, at = hidden.gather(1, wide), places
            read = (at + 1).clamp(max=length - 1)
        valid = (at >= batch.begins[:, None]) & (at + 1 + step < batch.lengths[:, None])
        yield hidden, read, valid


# --------------------------------------------------------------------------------- training
def losses(
    head: Eagle3Head, target_rows: Tensor, batch: Batch, places: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step its loss (nats a token) and, as bools, which drafts are the text's next token.

    The loss is the cross entropy against the target's probabilities over the draft vocabulary.
    `places` [B, m] are where steps 1, 2, … begin; target_rows [draft vocabulary, D] are the rows of
    the target's output layer.
    """
    wide = batch.final.to(target_rows.dtype)
    for hidden, read, valid in unroll(head, batch, places):
        scores = head.logits(hidden[valid]).float()
        with torch.no_grad():
            states = wide.gather(1, read[..., None].expand(-1, -1, wide.shape[-1]))[valid]
            wanted = (states @ target_rows.T).float()
            following = batch.tokens.gather(1, (read + 1).clamp(max=batch.tokens.shape[1] - 1))
            agrees = torch.zeros_like(valid)
            agrees[valid] = head.target_ids[scores.argmax(-1)] == following[valid]
        # A sum over none is 0, where the mean would be no number.
        loss = F.cross_entropy(scores, torch.softmax(wanted, -1), reduction="sum")
        yield loss / max(1, len(scores)), agrees


def some_places(batch: Batch, rng: torch.Generator) -> Tensor:
    """[B, m] in rising order: some of the places of each text that give tokens of the answer."""
    length = batch.tokens.shape[1]
    every = torch.arange(length).expand(len(batch.tokens), -1)
    useful = (every >= batch.begins[:, None]) & (every + 1 < batch.lengths[:, None])
    chance = torch.rand(every.shape, generator=rng) + useful
    count = max(1, int(SHARE_OF_PLACES * int(useful.sum(1).float().mean())))
    return chance.topk(count).indices.sort().values


@torch.no_grad()
def acceptance(head: Eagle3Head, target_rows: Tensor, data: Data, num_chats: int) -> list[float]:
    """The share of places in held-out texts from which 1, 2, … drafts in a row are right.

    Right is what the text goes on with: in greedy texts the target's choice, in sampled ones less.
    """
    head.eval()
    chats = data.held_out[:: max(1, len(data.held_out) // num_chats)]
    right, total = np.zeros(NUM_STEPS), 0
    for at in range(0, len(chats), 16):
        batch = data.batch(chats[at : at + 16])
        length = batch.tokens.shape[1]
        every = torch.arange(length).expand(len(batch.tokens), -1)
        with in_bfloat16():
            found = [agrees for _, agrees in losses(head, target_rows, batch, every)]
        last = every + NUM_STEPS + 1  # the token that the last draft is compared with
        fits = (every >= batch.begins[:, None]) & (last < batch.lengths[:, None])
        running = fits.clone()
        for step, agrees in enumerate(found):
            running &= agrees
            right[step] += int(running.sum())
        total += int(fits.sum())
    head.train()
    return [round(share / max(total, 1), 4) for share in right]


def weights_of(head: Eagle3Head) -> dict[str, Tensor]:
    """The head's own weights, without the target's embeddings."""
    return {k: v for k, v in head.state_dict().items() if not k.startswith("embed_tokens.")}


class Average:
    """A slow average of the weights, which drafts better than the last ones."""

    def __init__(self, head: Eagle3Head, share: float = 0.999) -> None:
        self.share = share
        self.weights = {k: v.clone() for k, v in weights_of(head).items()}

    @torch.no_grad()
    def update(self, head: Eagle3Head, number: int) -> None:
        """Take a little of the weights as they are after step `number`."""
        share = min(self.share, (1 + number) / (10 + number))
        for key, value in weights_of(head).items():
            if value.is_floating_point():
                self.weights[key].lerp_(value, 1 - share)

    @contextmanager
    def worn(self, head: Eagle3Head) -> Iterator[None]:
        """Meanwhile the head has the averaged weights."""
        own = {k: v.clone() for k, v in weights_of(head).items()}
        head.load_state_dict(self.weights, strict=False)
        yield
        head.load_state_dict(own, strict=False)


def rate_at(done: float) -> float:
    """The learning rate after this share of the training, as a share of the largest."""
    return min(1.0, done / 0.02) if done < 0.6 else max(0.02, (1 - done) / 0.4)


class Training:
    """A head on its way: weights, optimizer and place in the data, kept in a checkpoint."""

    def __init__(
        self, target: PreTrainedModel, work: Path, plan: Plan, layer_ids: tuple[int, ...]
    ) -> None:
        """A new head, or the last checkpoint's."""
        self.work, self.plan, self.data = work, plan, Data(work)
        self.num_tokens = int(self.data.lengths(self.data.train).sum())
        self.num_steps = int(plan.epochs * self.num_tokens / plan.batch_tokens)
        vocabulary = draft_vocabulary(self.data, target, plan.draft_vocab_size)
        self.head = new_head(target, vocabulary, layer_ids).train()
        self.trained = [weight for weight in self.head.parameters() if weight.requires_grad]
        matrices = [weight for weight in self.trained if weight.dim() > 1]
        vectors = [weight for weight in self.trained if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.average, self.number = Average(self.head), 0  # steps done
        self.told: list[list[float]] = []  # the losses since the log's last line
        self.file = work / "head.pt"
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            self.head.load_state_dict(saved["head"], strict=False)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.average.weights, self.number = saved["average"], saved["number"]
        # Of the head's own vocabulary: that of a checkpoint stays when there are more texts.
        self.target_rows = target.lm_head.weight[self.head.target_ids].to(FAST)

    def step(self, batch: Batch) -> None:
        """Learn from some texts."""
        rng = torch.Generator().manual_seed(self.number)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * rate_at(self.number / self.num_steps)
        with in_bfloat16():
            found = list(losses(self.head, self.target_rows, batch, some_places(batch, rng)))
            loss = sum(STEP_WEIGHT**s * own for s, (own, _) in enumerate(found))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.average.update(self.head, self.number)
        self.told.append([float(own.detach()) for own, _ in found])
        self.number += 1

    def tell(self) -> None:
        """Write a line of log.jsonl: the losses of late, and what would be accepted now."""
        with self.average.worn(self.head):
            shares = acceptance(self.head, self.target_rows, self.data, 64)
        line = {
            "step": self.number,
            "epoch": round(self.number * self.plan.batch_tokens / self.num_tokens, 2),
            "loss": [round(float(loss), 3) for loss in np.mean(self.told, 0)],
            "accepted": shares,
            "tokens_per_pass": round(1 + sum(shares), 3),
        }
        with open(self.work / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        tqdm.write(json.dumps(line))
        self.told = []

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "head": weights_of(self.head),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.weights,
            "number": self.number,
        }
        write_whole(self.file, partial(torch.save, state))


def train(
    target: PreTrainedModel, work: Path, plan: Plan, layer_ids: tuple[int, ...]
) -> Eagle3Head:
    """Train a head, or go on from the last checkpoint. Returns it with its averaged weights."""
    training = Training(target, work, plan, layer_ids)
    first, last = training.number, training.num_steps
    every = max(100, TOLD_TOKENS // plan.batch_tokens)
    batches, saved_at = training.data.epochs(plan, first), time.monotonic()
    for number in tqdm(range(first, last), initial=first, total=last, desc="head"):
        training.step(training.data.batch(next(batches)))
        if training.number % every == 0 or number + 1 == last:
            training.tell()
        if time.monotonic() - saved_at > 120 or number + 1 == last:
            training.save()
            saved_at = time.monotonic()
    training.head.load_state_dict(training.average.weights, strict=False)
    return training.head.eval()


def main() -> None:
    """Run the stages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, metavar="DIR_OR_HUB_ID")
    parser.add_argument("--verifier", help="the target's public name, where it has another one")
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--out", type=Path, help="where the head goes (default: WORK/head)")
    parser.add_argument("--stage", choices=["answers", "states", "train"], help="only this one")
    parser.add_argument("--smoke", action="store_true", help="a toy, to see all stages run")
    parser.add_argument("--tokens", type=int, help="of answers")
    parser.add_argument("--epochs", type=float)
    given = parser.parse_args()
    plan = SMOKE if given.smoke else Plan()
    chosen = {"num_tokens": given.tokens, "epochs": given.epochs}
    plan = replace(plan, **{name: value for name, value in chosen.items() if value})
    run(given.target, given.work, plan, given.stage, given.out, given.verifier)


def run(
    name: str,
    work: Path,
    plan: Plan,
    stage: str | None = None,
    out: Path | None = None,
    verifier: str | None = None,
) -> None:
    """One stage, or all of them."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    target.requires_grad_(False)
    num_layers = target.config.num_hidden_layers
    if num_layers < 4:
        raise SystemExit(f"error: a head reads three layers, and {name} has {num_layers}")
    layer_ids = (2, num_layers // 2, num_layers - 3)
    if stage in (None, "answers"):
        make_answers(target, tokenizer, work, plan)
    if stage in (None, "states"):
        make_states(target, work, layer_ids)
    if stage in (None, "train"):
        head = train(target, work, plan, layer_ids)
        architectures = target.config.architectures
        names = {"name_or_path": verifier or name, "architectures": architectures}
        save_head(head, out or work / "head", names, NUM_STEPS)


if __name__ == "__main__":
    main()
