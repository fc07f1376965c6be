"""What all drafters are trained by: states of answers, one loss, acceptance by position.

    answers ─→ states of the target ─→ training ─→ the public layout
                                          └─→ shares of drafts that are right up to token 1, 2, …

From a place i of a text, whose states are known, and token i + 1, which is pending, drafts are made
of tokens i + 2, i + 3, …. Draft number s (from 0) is compared with what the target chooses behind
token i + 1 + s. While drafting a head reads its own outputs, so heads are run over several steps
from many places at once (training-time test, arXiv 2503.01840):

    step 0    h₀ ← (states of the target at i, token i + 1)     sees the keys of step 0 up to i
    step s    hₛ ← (hₛ₋₁, token i + 1 + s)                      and its own of steps 1 … s

The tokens in between are the text's: a draft counts only where all before it were right.
"""

import ctypes
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tools import write_whole

from . import answers
from .answers import Text

HELD_OUT = 40  # one text in so many of a file is for validation
MEASURED = 64  # held-out texts
TOLD_TOKENS = 200_000  # between two lines of the log
CONSTANT = 0.6  # of the training, before the learning rate falls
TRIED = 6  # steps, to know what one takes
PATIENCE, GAIN = 4, 0.004  # measurements in which tokens a pass have to rise by so much
# transformers' matmul, softmax, matmul: faster to train through than sdpa, on a CPU in bfloat16.
TRAIN = "eager"


# ------------------------------------------------------------------------------------ numbers
def fast_dtype() -> torch.dtype:
    """bfloat16 where the device computes it by itself; elsewhere it is slower than float32."""
    is_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    on_cpu = torch.get_default_device().type == "cpu"
    return torch.bfloat16 if is_fast or not on_cpu else torch.float32


def keep_memory() -> None:
    """Let glibc hand freed memory out again.

    It maps large blocks anew each time, which takes a third of a step over a large vocabulary.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        most_maps, trim_threshold = -4, -1
        mallopt(most_maps, 0)
        mallopt(trim_threshold, 2**31 - 1)


def mixed() -> torch.autocast:
    """Mixed precision, where that is fast."""
    enabled = fast_dtype() == torch.bfloat16
    return torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=enabled)


def additive(seen: Tensor) -> Tensor:
    """What is seen, as bools [B, T, S] -> a mask [B, 1, T, S]."""
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None]


def causal(length: int) -> Tensor:
    """[1, T, T]: a token sees its past and itself."""
    return torch.ones(1, length, length, dtype=torch.bool).tril()


def every_state(target: PreTrainedModel, ids: Tensor) -> tuple[Tensor, ...]:
    """All states of a target [B, T, D] in whole texts [B, T], without gradients.

    It attends by sdpa, which is half as fast again as TRAIN where nothing is trained.
    """
    return target.get_decoder()(ids, use_cache=False, output_hidden_states=True).hidden_states


def pick(x: Tensor, places: Tensor) -> Tensor:
    """x [B, T, D] at places [B, m] -> [B, m, D]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


# ------------------------------------------------------------------------------------- states
def make_states(
    target: PreTrainedModel, work: Path, layers: tuple[int, ...], num_tokens: float = inf
) -> Path:
    """The target's states of texts, one file for each of answers. Returns their folder.

    They are [tokens, layers + 1, D] in bfloat16. `layers` count as transformers' hidden_states do,
    and the last one is always there: what the output layer reads.
    """
    folder = work / "-".join(["states", *map(str, layers)])
    for file in tqdm(answers.files(work / "answers", num_tokens), desc="states", unit=" files"):
        states = folder / f"{file.stem}.npy"
        if not states.exists():
            found = states_of(target, [text.tokens for text in answers.load(file)], layers)
            write_whole(states, partial(np.save, arr=found.cpu().view(torch.int16).numpy()))
    return folder


@torch.inference_mode()
def states_of(target: PreTrainedModel, texts: list[np.ndarray], layers: tuple[int, ...]) -> Tensor:
    """[tokens, layers + 1, D] bfloat16 of all texts, one behind the other."""
    result: dict[int, Tensor] = {}
    for part in np.split(np.argsort(list(map(len, texts))), range(16, len(texts), 16)):
        ids = padded([torch.from_numpy(texts[i].astype(np.int64)) for i in part])
        # Pads come last, so nothing sees them.
        hidden = every_state(target, ids)
        found = torch.stack([hidden[i] for i in (*layers, -1)], 2).bfloat16()
        result |= {i: row[: len(texts[i])] for i, row in zip(part, found, strict=True)}
    return torch.cat([result[i] for i in range(len(texts))])


def padded(rows: list[Tensor]) -> Tensor:
    """Rows of several lengths [t, …] -> [B, T, …], on the device in use."""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(torch.get_default_device())


@dataclass
class Batch:
    """Some texts [B, T] with their states, padded at the end."""

    tokens: Tensor  # [B, T]
    states: Tensor  # [B, T, layers · D]
    final: Tensor  # [B, T, D]
    begins: Tensor  # [B]: the first place whose drafts are the answer's tokens
    lengths: Tensor  # [B]

    @property
    def every(self) -> Tensor:
        """[B, T]: all places."""
        return torch.arange(self.tokens.shape[1]).expand(len(self.tokens), -1)

    def is_judged(self, places: Tensor, step: int) -> Tensor:
        """Whether draft number `step` from these places belongs to the answer."""
        return (places >= self.begins[:, None]) & (places + 1 + step < self.lengths[:, None])


class Data:
    """Texts of so many answered tokens, and their states, the latter left on disk."""

    def __init__(self, work: Path, states: Path, num_tokens: float = inf) -> None:
        self.work = work
        self.train: list[tuple[Text, np.ndarray]] = []
        self.held_out: list[tuple[Text, np.ndarray]] = []
        for file in answers.files(work / "answers", num_tokens):
            texts, whole = answers.load(file), np.load(states / f"{file.stem}.npy", mmap_mode="r")
            ends = np.cumsum([len(text.tokens) for text in texts])
            # A text is held out by its number in the file, so that more files move none of them.
            for i, (text, end) in enumerate(zip(texts, ends, strict=True)):
                part = self.train if i % HELD_OUT else self.held_out
                part.append((text, whole[end - len(text.tokens) : end]))
        self.num_tokens = sum(len(text.tokens) for text, _ in self.train)

    def batch(self, texts: list[tuple[Text, np.ndarray]]) -> Batch:
        """Some texts with their states, in memory."""
        ids = [torch.from_numpy(text.tokens.astype(np.int64)) for text, _ in texts]
        read = [torch.from_numpy(np.array(own)).view(torch.bfloat16) for _, own in texts]
        states = padded(read).float()
        numbers = torch.tensor([[text.prompt_length, len(text.tokens)] for text, _ in texts])
        flat, last = states[:, :, :-1].flatten(2), states[:, :, -1]
        return Batch(padded(ids), flat, last, (numbers[:, 0] - 2).clamp(min=0), numbers[:, 1])

    def batches(self, num_tokens: int, first: int) -> Iterator[Batch]:
        """Batches of texts of like lengths for ever, from batch number `first` on."""
        lengths = np.array([len(text.tokens) for text, _ in self.train])

        def groups() -> Iterator[np.ndarray]:
            for rng in map(np.random.default_rng, count()):
                order = np.argsort(lengths + rng.uniform(0, 24, len(lengths)), kind="stable")
                steps = np.diff(np.cumsum(lengths[order]) // num_tokens)
                parts = np.split(order, np.flatnonzero(steps) + 1)
                yield from (parts[i] for i in rng.permutation(len(parts)))

        for group in islice(groups(), first, None):
            yield self.batch([self.train[i] for i in group])

    def commonest(self, size: int) -> Tensor:
        """The ids [size] of the commonest words in rising order.

        A file keeps them, so that a checkpoint's stay when there are more texts.
        """
        file = self.work / "words.npy"
        if not file.exists():
            counts = np.bincount(np.concatenate([text.tokens for text, _ in self.train]))
            write_whole(file, partial(np.save, arr=np.argsort(-counts, kind="stable")[:size]))
        return torch.from_numpy(np.load(file)).sort().values.to(torch.get_default_device())


# ----------------------------------------------------------------------------------- students
class Student(ABC):
    """A drafter that learns: what is trained, what it drafts from a place, and how it is saved."""

    num_steps = 4  # drafts from one place: the K that it learns for
    weights: tuple[float, ...] = (1.0, 0.8, 0.64, 0.51)  # of the steps' losses
    share_of_places = 0.5  # of a text, that drafts start from: neighbours teach much the same
    muon = 0.0  # that optimizer's rate for the matrices inside; 0: they are AdamW's, too
    module: nn.Module  # weights without requires_grad are the target's
    words: Tensor  # [V']: the target's ids of its logits, at this step
    logits: Callable[[Tensor], Tensor]  # of what `steps` gives: [n, D] -> [n, V']

    @staticmethod
    def layers_of(num_layers: int) -> tuple[int, ...]:
        """Which of the target's hidden_states it reads, beside the last one."""
        return ()

    @abstractmethod
    def steps(self, batch: Batch, places: Tensor) -> Iterator[Tensor]:
        """For each step what its logits are made of, [B, m, D] at `places` [B, m]."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the public layout."""


Run = Callable[[Tensor, Tensor, Tensor, Tensor, DynamicLayer], Tensor]


def unroll(student: Student, run: Run, first: Tensor, batch: Batch, places: Tensor) -> Iterator:
    """Let a layer read its own outputs: h [B, m, D] after each step from `places` [B, m].

    run(embeds, hidden, positions, mask, keys) gives the next h; positions count from the place.
    """
    keys, length, count = DynamicLayer(), batch.tokens.shape[1], places.shape[1]
    hidden, at, seen = first, batch.every, causal(length).expand(len(places), -1, -1)
    own = torch.eye(count, dtype=torch.bool).expand(len(places), -1, -1)
    for step in range(student.num_steps):
        read = (at + 1 + step).clamp(max=length - 1)
        embeds = student.module.embed_tokens(batch.tokens.gather(1, read))
        hidden = run(embeds, hidden, at + step, additive(seen), keys)
        if step == 0:  # from every place, since later steps see its keys; then some go on
            hidden, at, seen = pick(hidden, places), places, pick(seen, places)
        seen = torch.cat([seen, own], -1)
        yield hidden


# -------------------------------------------------------------------------- loss and acceptance
def judged(
    student: Student, rows: Tensor, batch: Batch, places: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step its loss (nats a token) and, as bools [B, m], which drafts the text has.

    The loss is the cross entropy against the target's probabilities over the student's words. What
    the text has is the target's choice in greedy texts, in sampled ones less often. `rows` [V, D]
    are those of the target's output layer for all words.
    """
    last = batch.tokens.shape[1] - 1
    for step, hidden in enumerate(student.steps(batch, places)):
        if step == 0:  # by now the student has chosen the words of this batch
            own_rows = rows[student.words]
        valid, at = batch.is_judged(places, step), (places + 1 + step).clamp(max=last)
        scores = student.logits(hidden[valid]).float()
        with torch.no_grad():
            wanted = (pick(batch.final, at)[valid].to(rows.dtype) @ own_rows.T).float()
            agrees, following = torch.zeros_like(valid), (at + 1).clamp(max=last)
            chosen = student.words[scores.argmax(-1)]
            agrees[valid] = chosen == batch.tokens.gather(1, following)[valid]
        # A sum over none is 0, where the mean would be no number.
        loss = F.cross_entropy(scores, torch.softmax(wanted, -1), reduction="sum")
        yield loss / max(1, len(scores)), agrees


def some_places(batch: Batch, number: int, share: float) -> Tensor:
    """[B, m] in rising order: some of the places of each text that give tokens of the answer."""
    useful, rng = batch.is_judged(batch.every, 0), np.random.default_rng(number)
    chance = useful + torch.from_numpy(rng.random(useful.shape)).to(useful.device)
    count = max(1, int(share * int(useful.sum(1).float().mean())))
    return chance.topk(count).indices.sort().values


@torch.no_grad()
def acceptance(student: Student, rows: Tensor, data: Data) -> list[float]:
    """The share of places in held-out texts from which 1, 2, … drafts in a row are right."""
    texts = data.held_out[:: max(1, len(data.held_out) // MEASURED)]
    right, total = np.zeros(student.num_steps), 0
    for at in range(0, len(texts), answers.BATCH):
        batch = data.batch(texts[at : at + answers.BATCH])
        with mixed():
            found = [agrees for _, agrees in judged(student, rows, batch, batch.every)]
        fits = batch.is_judged(batch.every, student.num_steps)  # all drafts have a token to meet
        running = torch.stack(found).cumprod(0) * fits
        right += running.sum((1, 2)).cpu().numpy()
        total += int(fits.sum())
    return [round(float(share) / max(total, 1), 4) for share in right]


# ----------------------------------------------------------------------------------- training
def rate_at(done: float) -> float:
    """The learning rate after this share of the training, as a share of the largest."""
    return min(1.0, done / 0.02, max(0.02, (1 - done) / (1 - CONSTANT)))


class Training:
    """Weights on their way, kept in a checkpoint; a slow average of them is what comes out."""

    def __init__(
        self, module: nn.Module, file: Path, num_steps: int, rate: float, muon: float = 0.0
    ) -> None:
        """New, or where the checkpoint `file` is; `muon` is that optimizer's rate for matrices."""
        self.module, self.file, self.num_steps = module, file, num_steps
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        # In the order of the module, as the optimizers' states are saved by number.
        inner = [n for n, p in self.trained.items() if muon and p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in self.trained.items() if n not in inner]
        decays = {0.01: [p for p in rest if p.dim() > 1], 0.0: [p for p in rest if p.dim() < 2]}
        groups = [{"params": own, "weight_decay": decay} for decay, own in decays.items()]
        self.optimizers = [(rate, torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95)))]
        if inner:
            matrices = [self.trained[name] for name in inner]
            self.optimizers += [(muon, torch.optim.Muon(matrices, lr=muon, weight_decay=0.05))]
        self.average = {n: p.detach().clone() for n, p in self.trained.items()}
        self.number, self.ends_at = 0, inf  # steps done, and where the end is if that is early
        if file.exists():
            saved = torch.load(file, weights_only=True)
            self._load(saved["weights"])
            states = saved["optimizers"].values()
            for (_, optimizer), state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)  # whose rate each step sets
            self.average, self.number = saved["average"], saved["number"]
            if saved.get("num_steps") == num_steps:  # else there is more to learn from
                self.ends_at = saved["ends_at"]

    @property
    def last(self) -> int:
        """The number of the last step."""
        return min(self.num_steps, self.ends_at)

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            self.trained[name].copy_(weight)

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "weights": {name: weight.detach() for name, weight in self.trained.items()},
            "optimizers": {i: own.state_dict() for i, (_, own) in enumerate(self.optimizers)},
            "average": self.average,
            "number": self.number,
            "num_steps": self.num_steps,
            "ends_at": self.ends_at,
        }
        write_whole(self.file, partial(torch.save, state))

    def run(self, loss_of: Callable[[int], Tensor], tell: Any = dict, every: int = 200) -> None:
        """Train to the end, with loss_of(number) for each step; `tell` now and then what is learnt.

        What `tell` returns is a score, if anything. Where it stops rising, the learning rate falls
        from there on, and training ends with that. Afterwards the module has its averaged weights.
        """
        scores = list[float]()
        bar = tqdm(initial=self.number, total=self.last, desc=self.file.stem)
        while self.number < self.last:
            bar.set_postfix(loss=f"{self.step(loss_of):.3f}")
            bar.update()
            if self.number % every == 0 or self.number == self.last:
                scores.append(tell() or inf)
                if max(scores[-PATIENCE:]) < max(scores[:-PATIENCE], default=0.0) + GAIN:
                    if (end := int(self.number / CONSTANT) + 1) < self.last:
                        self.ends_at = bar.total = end
                self.save()
        self._load(self.average)
        self.module.requires_grad_(False)

    def step(self, loss_of: Callable[[int], Tensor]) -> float:
        """One step of training; returns its loss."""
        for rate, optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at((self.number + 1) / self.last)
        with mixed():
            loss = loss_of(self.number)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        for _, optimizer in self.optimizers:
            optimizer.step()
        share = min(0.999, (1 + self.number) / (10 + self.number))
        for name, weight in self.trained.items():
            self.average[name].lerp_(weight.detach(), 1 - share)
        self.number += 1
        return float(loss.detach())


def seconds_a_token(student: Student, rows: Tensor, data: Data, plan: Any) -> float:
    """What a token of training takes, by a few steps. The student is of no use afterwards."""
    training = Training(student.module, plan.work / "none", TRIED, plan.rate, student.muon)
    batches, tokens, began = data.batches(plan.batch_tokens, 0), 0, 0.0
    for number in range(TRIED):
        if number == 1:  # the first step is slow
            began, tokens = time.monotonic(), 0
        batch = next(batches)
        training.step(partial(loss_of, student, rows, batch))
        tokens += int(batch.lengths.sum())
    return (time.monotonic() - began) / tokens


def loss_of(student: Student, rows: Tensor, batch: Batch, number: int) -> Tensor:
    """What step `number` is to make smaller."""
    steps = judged(student, rows, batch, some_places(batch, number, student.share_of_places))
    return sum(w * loss for w, (loss, _) in zip(student.weights, steps, strict=False))


def train(student: Student, rows: Tensor, data: Data, plan: Any) -> dict[str, Any]:
    """Train a student, or go on from its checkpoint. Returns the figures."""
    num_steps = max(1, int(plan.epochs * data.num_tokens / plan.batch_tokens))
    training = Training(
        student.module, plan.work / f"{plan.kind}.pt", num_steps, plan.rate, student.muon
    )
    batches = data.batches(plan.batch_tokens, training.number)

    def tell() -> dict[str, Any]:
        shares = acceptance(student, rows, data)
        rate = round(1 + sum(shares), 3)
        line = {"step": training.number, "accepted": shares, "tokens_per_pass": rate}
        with open(plan.work / f"{plan.kind}.jsonl", "a", encoding="utf-8") as log:
            print(json.dumps(line), file=log)
        tqdm.write(json.dumps(line), file=sys.stderr)
        return line

    tell()
    training.run(
        lambda number: loss_of(student, rows, next(batches), number),
        lambda: tell()["tokens_per_pass"],
        max(100, TOLD_TOKENS // plan.batch_tokens),
    )
    return tell()
