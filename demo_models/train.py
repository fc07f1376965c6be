"""Train the embedded models from text that every machine has: target with MTP head, and draft.

One run goes: collect text → train the tokenizer → target → unlearn its loops → MTP head (target
frozen) → draft (distilled from the target) → write Hugging Face folders → measure held-out loss.
Every stage saves a checkpoint in `--work` and continues from it, so the same command after an
interruption goes on where it stopped.

    python demo_models/train.py --work /tmp/train                  # everything, into demo_models/
    python demo_models/train.py --work /tmp/train --stage target   # one stage
    python demo_models/train.py --work /tmp/smoke --out /tmp/toy --smoke   # a toy in under a minute

Text: the running Python's standard library, the sources of the installed requirements, the prose of
their docstrings, and demo_models/synthetic.py. One source file in 20 (by md5 of its path) is held
out, with its docstrings. The last line on stdout is one JSON document with the figures.

The target is a dense `MellumConfig`: mathematically Qwen3, and the one small dense family whose MTP
head transformers loads and runs unpatched, so that the same folder serves this project and
`generate(use_mtp=True)`. The MTP head is trained unrolled over three draft steps (arXiv 2412.19437;
training-time test: arXiv 2503.01840), the draft with knowledge distillation.

Not covered: multi-machine training, a GPU (it would run there, but nothing is tuned for it).
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import platform
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kernels/ lies there
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost 10x on busy cores

import numpy as np
import synthetic
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpModel

from kernels.weights import computes_bfloat16

PACKAGES = (
    "torch transformers numpy flask werkzeug jinja2 click waitress huggingface_hub tokenizers tqdm "
    "networkx fsspec rich pygments filelock packaging typer anyio"
).split()
MAX_PACKAGE_BYTES = 45_000_000  # the transformers sources repeat each other: a part is enough
# Share of the training windows that each source gives.
MIX = {"library": 0.42, "packages": 0.13, "tests": 0.06, "prose": 0.14, "synthetic": 0.25}
VOCAB_SIZE = 4096
END = "<|endoftext|>"
MTP_WEIGHTS = (1.0, 0.8, 0.6)  # the loss weight of draft step 1, 2, 3


@dataclass(frozen=True)
class Size:
    """Everything that differs between the real run and the smoke run."""

    target: dict
    draft: dict
    tokens: dict[str, float]  # stage -> tokens to train on
    batch_tokens: int = 4096
    corpus_bytes: int | None = None


FULL = Size(
    target=dict(hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=3,
    num_key_value_heads=1, head_dim=64), draft=dict(hidden_size=128, intermediate_size=384,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64),
    tokens={"target": 27e6, "mtp": 3.2e6, "draft": 5e6},
)  # fmt: skip
SMOKE = Size(
    target=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32), draft=dict(hidden_size=32, intermediate_size=64,
    num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32),
    tokens={"target": 12e3, "mtp": 6e3, "draft": 6e3}, batch_tokens=1024, corpus_bytes=400_000,
)  # fmt: skip

# Elsewhere bfloat16 is slower than float32.
FAST = torch.bfloat16 if computes_bfloat16() else torch.float32


def in_bfloat16() -> torch.autocast:
    """Mixed precision, where this CPU computes bfloat16 by itself."""
    return torch.autocast("cpu", torch.bfloat16, enabled=FAST == torch.bfloat16)


# -------------------------------------------------------------------------------------------- text


def held_out(path: str) -> bool:
    """Whether the file at `path` (relative to its root) is held out: 1 in 20, the same anywhere."""
    return int(hashlib.md5(path.encode()).hexdigest(), 16) % 20 == 0


def source_files() -> Iterator[tuple[str, str, str]]:
    """(source, relative path, text) of every Python file that is used."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    roots = [("library", stdlib, stdlib)]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            folder = Path(spec.submodule_search_locations[0])
            roots.append(("packages", folder, folder.parent))
    for source, folder, base in roots:
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(base).as_posix()
            parts = set(path.relative_to(base).parts)
            if parts & {"site-packages", "pydoc_data", "__pycache__", "_vendor", "lib2to3"}:
                continue
            if "encodings" in parts and path.stat().st_size > 9_000:  # tables of characters
                continue
            try:
                text = path.read_text("utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            is_test = bool(parts & {"test", "tests", "testing", "idle_test"})
            if is_test and source == "packages":
                continue
            yield ("tests" if is_test else source), relative, text


def docstrings(text: str) -> Iterator[str]:
    """A Python source's docstrings that read as prose: three lines or more, mostly letters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            doc = ast.get_docstring(node)
            if (
                doc
                and doc.count("\n") >= 2
                and sum(c.isalpha() or c == " " for c in doc) > 0.8 * len(doc)
            ):
                yield doc + "\n"


def collect(size: Size) -> dict[tuple[str, str], list[tuple[str, bool]]]:
    """(source, "train" | "held_out") -> documents, each with whether an end of text follows."""
    documents: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    files = sorted(source_files(), key=lambda f: hashlib.md5(f[1].encode()).digest())
    taken, limit = {"library": 0, "tests": 0, "packages": 0}, size.corpus_bytes or 1 << 60
    for source, path, text in files:
        if taken[source] > min(limit, MAX_PACKAGE_BYTES if source == "packages" else limit):
            continue
        taken[source] += len(text)
        part = "held_out" if held_out(path) else "train"
        documents.setdefault((source, part), []).append((text, True))
        documents.setdefault(("prose", part), []).extend((d, True) for d in docstrings(text))
    from pydoc_data import topics

    for name, text in topics.topics.items():
        part = "held_out" if held_out(name) else "train"
        documents.setdefault(("prose", part), []).extend([(text, True)] * 3)
    synthetic_chars = 100_000 if size.corpus_bytes else 14_000_000
    documents["synthetic", "train"] = synthetic.documents(0, synthetic_chars)
    documents["synthetic", "held_out"] = synthetic.documents(1, 60_000)
    return documents


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, 4096 entries; id 0 is the end of text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END, model_max_length=2048
    )


class Corpus:
    """Token streams by source, with where each document starts; windows are drawn from them."""

    mix = MIX

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder = folder
        if not (folder / "done").exists():
            self._build(size)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.streams = {tuple(p.stem.split(".")): np.load(p) for p in folder.glob("*.tokens.npy")}
        self.starts = {tuple(p.stem.split(".")): np.load(p) for p in folder.glob("*.starts.npy")}

    def _build(self, size: Size) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        documents = collect(size)
        sample = [
            t for (_, part), docs in documents.items() if part == "train" for t, _ in docs[::3]
        ]
        tokenizer = self.new_tokenizer(sample)
        tokenizer.save_pretrained(folder)
        for (source, part), docs in documents.items():
            ids: list[int] = []
            starts: list[int] = []
            for i in tqdm(
                range(0, len(docs), 256), desc=f"tokens of {source}, {part}", leave=False
            ):
                chunk = docs[i : i + 256]
                encoded = tokenizer([t for t, _ in chunk], return_attention_mask=False)["input_ids"]
                for tokens, (_, ends) in zip(encoded, chunk, strict=True):
                    starts.append(len(ids))
                    ids += tokens
                    ids += [tokenizer.eos_token_id] if ends else tokenizer("\n\n")["input_ids"]
            np.save(folder / f"{source}.{part}.tokens.npy", np.array(ids, dtype=np.uint16))
            np.save(folder / f"{source}.{part}.starts.npy", np.array(starts))
        (folder / "done").touch()

    def new_tokenizer(self, texts: list[str]) -> PreTrainedTokenizerFast:
        """What the texts are told in."""
        return train_tokenizer(iter(texts))

    def windows(self, step: int, seed: int, batch: int, length: int) -> Tensor:
        """[batch, length] ids of step `step`; the same for the same seed, whatever ran before."""
        rng = np.random.default_rng([seed, step])
        sources = rng.choice(list(self.mix), size=batch, p=list(self.mix.values()))
        rows = []
        for source in sources:
            stream, starts = (
                self.streams[source, "train", "tokens"],
                self.starts[source, "train", "starts"],
            )
            last = len(stream) - length - 1
            at = rng.integers(last)
            if (
                rng.random() < 0.5
            ):  # prompts begin where documents begin: let half of the windows do so
                at = min(rng.choice(starts), last)
            rows.append(stream[at : at + length])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


# ------------------------------------------------------------------------------------------ models


def attention(module, query, key, value, mask, scaling, dropout=0.0, **_):  # noqa: ANN001, ANN003
    """matmul, softmax, matmul: on a CPU in bf16 30 % faster to train through than sdpa.

    query [B, H, T, D]; key, value [B, Hkv, S, D]; mask additive [1, 1, T, S].
    """
    b, h, t, d = query.shape
    groups, s = key.shape[1], key.shape[2]
    scores = (query.reshape(b, groups, h // groups * t, d) @ key.transpose(-1, -2)).view(b, h, t, s)
    weights = torch.softmax(scores * scaling + mask, -1).to(query.dtype)
    out = weights.view(b, groups, h // groups * t, s) @ value
    return out.view(b, h, t, d).transpose(1, 2).contiguous(), None


AttentionInterface.register("train", attention)


def target_config(size: Size, **extra) -> MellumConfig:  # noqa: ANN003
    layers = size.target["num_hidden_layers"]
    return MellumConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, tie_word_embeddings=True,
        sliding_window=None, layer_types=["full_attention"] * layers, mlp_layer_types=["dense"] *
        layers, num_mtp_layers=1, mtp_layer_types=["full_attention"], mtp_mlp_layer_types=["dense"],
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        eos_token_id=0, pad_token_id=0, dtype="float32", **size.target, **extra,
    )  # fmt: skip


def draft_config(size: Size) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, tie_word_embeddings=True,
        sliding_window=None, use_sliding_window=False, rope_parameters={"rope_type": "default",
        "rope_theta": 10000.0}, eos_token_id=0, pad_token_id=0, dtype="float32", **size.draft,
    )  # fmt: skip


def causal(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[B, T] -> post-norm hidden states [B, T, D]."""
    length = ids.shape[1]
    return model.model(
        ids,
        attention_mask=causal(length)[None, None],
        position_ids=torch.arange(length)[None],
        use_cache=False,
    ).last_hidden_state


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.lm_head.weight).float()


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean nats per token of ids[:, 1:], each given what stands before it."""
    logits = logits_of(model, hidden_states(model, ids[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Mean over all positions of −Σ p log q; both [..., V]."""
    return -(probs * torch.log_softmax(logits, -1)).sum(-1).mean()


def distillation_loss(
    student: PreTrainedModel, teacher: PreTrainedModel, ids: Tensor, share: float
) -> Tensor:
    """`share` of it is cross-entropy against the frozen teacher, the rest against the text.

    Every other position is judged, as for the MTP head.
    """
    judged = slice(int(ids[0, 0]) % 2, None, 2)
    with torch.no_grad():
        hidden = hidden_states(teacher, ids[:, :-1])[:, judged]
        probs = torch.softmax(logits_of(teacher, hidden), -1)
    logits = logits_of(student, hidden_states(student, ids[:, :-1])[:, judged])
    hard = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:][:, judged].flatten())
    return share * soft_cross_entropy(logits, probs) + (1 - share) * hard


class UnrolledKeys:
    """What the head's attention sees at draft step k: the true rows, then its own earlier steps.

    Stands where a KV cache would: at step k it hands over [true rows | step 2 | … | step k], so
    that one mask [causal | diagonal | …] lets row j see true rows up to j and only its own
    recursive rows, exactly as when drafting.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, Tensor]:  # noqa: ANN002, ANN003
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def mtp_losses(head: MtpModel, target: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The soft cross-entropy of draft steps 1, 2, 3 against the frozen target.

    Row j at step k reads the embedding of token j + k and the hidden state of step k − 1 (at step
    1 the target's own at j), and predicts what the target predicts at j + k. Only every other
    position is judged: the vocabulary's logits are most of the cost.
    """
    parity = int(ids[0, 0]) % 2
    steps, length = len(MTP_WEIGHTS), ids.shape[1] - len(MTP_WEIGHTS)
    with torch.no_grad():
        hidden = hidden_states(target, ids)
        probs = torch.softmax(logits_of(target, hidden[:, parity::2]), -1)
    keys, losses = UnrolledKeys(), []
    state, mask = hidden[:, :length], causal(length)
    diagonal = torch.full((length, length), float("-inf")).fill_diagonal_(0.0)
    for k in range(1, steps + 1):
        embeds = head.embed_tokens(ids[:, k : k + length])
        kind = {"layer_type": "full_attention"} if head.has_per_layer_rope else {}
        rope = head.rotary_emb(embeds, torch.arange(k, k + length)[None], **kind)
        state = head.layers[0](
            embeds, state, position_embeddings=rope, attention_mask=mask[None, None],
            position_ids=None, past_key_values=keys,
        )  # fmt: skip
        first = (parity - k) % 2
        logits = logits_of(target, state[:, first::2])
        begin = (first + k - parity) // 2
        losses.append(soft_cross_entropy(logits, probs[:, begin : begin + logits.shape[1]]))
        mask = torch.cat([mask, diagonal], dim=1)
    return losses


# ---------------------------------------------------------------------------------------- training


class Trainer:
    """Muon for hidden matrices, AdamW for the rest; warm up, stay flat to 40 %, fall to zero."""

    def __init__(
        self, name: str, module: torch.nn.Module, work: Path, size: Size, args: argparse.Namespace
    ) -> None:
        self.name, self.module, self.work, self.size, self.args = name, module, work, size, args
        self.total_tokens = args.tokens if args.tokens and args.stage == name else size.tokens[name]
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and "embed_tokens" not in n]
        rest = [p for n, p in named if p.ndim != 2 or "embed_tokens" in n]
        self.optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05)]
        self.optimizers.append(torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, fused=True))
        self.base_rates = [0.02, 3e-3]
        self.params = matrices + rest
        self.step = self.tokens = 0
        self.seconds = 0.0

    @property
    def path(self) -> Path:
        return self.work / f"{self.name}.pt"

    def save(self) -> None:
        state = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        state["module"] = {
            n: p.detach() for n, p in self.module.named_parameters() if p.requires_grad
        }
        state["optimizers"] = [o.state_dict() for o in self.optimizers]
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def resume(self) -> bool:
        """Load the last checkpoint; True if its training was complete."""
        if not self.path.exists():
            return False
        state = torch.load(self.path)
        self.module.load_state_dict(state["module"], strict=False)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        return self.tokens >= self.total_tokens

    def _set_rates(self) -> None:
        done = self.tokens / self.total_tokens
        scale = min((self.step + 1) / 60, 1.0) * min(1.0, (1.0 - done) / 0.6)
        for optimizer, base in zip(self.optimizers, self.base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = base * max(scale, 0.0)

    def _context(self) -> int:
        """Short windows first (cheaper, and copying forms there), long ones for the last third."""
        if self.size is SMOKE:
            return 128
        done = self.tokens / self.total_tokens
        return 256 if done < 0.65 else 512 if done < 0.9 or self.name != "target" else 1024

    def run(self, corpus: Corpus, loss_of: Callable[[Tensor], Tensor]) -> None:
        """Train until `total_tokens`, saving every 200 steps."""
        if self.resume():
            return
        self.module.train()
        # The MTP head's unrolled steps take longer to compile than compiling them saves.
        compile_it = self.args.compile and self.name == "target"
        compiled = torch.compile(loss_of, dynamic=False) if compile_it else loss_of
        bar = tqdm(
            total=int(self.total_tokens),
            initial=self.tokens,
            desc=self.name,
            unit="tok",
            unit_scale=True,
        )
        extra = 1 if self.name != "mtp" else len(MTP_WEIGHTS)
        smooth = None
        with (self.work / f"{self.name}.jsonl").open("a") as log:
            while self.tokens < self.total_tokens:
                began = time.perf_counter()
                length = self._context()
                batch = self.size.batch_tokens // length
                ids = corpus.windows(self.step, self.args.seed, batch, length + extra)
                self._set_rates()
                with in_bfloat16():
                    loss = compiled(ids)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.params, 1.0)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                self.step += 1
                self.tokens += batch * length
                self.seconds += time.perf_counter() - began
                smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
                bar.update(batch * length)
                bar.set_postfix(loss=f"{smooth:.3f}")
                if self.step % 50 == 0:
                    row = {
                        "step": self.step,
                        "tokens": self.tokens,
                        "loss": smooth,
                        "s": self.seconds,
                    }
                    print(json.dumps(row), file=log, flush=True)
                if self.step % 200 == 0:
                    self.save()
        self.save()
        bar.close()


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, corpus: Corpus, source: str, num_windows: int = 120
) -> float:
    """Nats per token on evenly spaced held-out windows of 512 tokens (32 of them only context)."""
    stream = corpus.streams[source, "held_out", "tokens"].astype(np.int64)
    length = min(513, len(stream) - 1)
    total = count = 0.0
    for at in np.linspace(0, len(stream) - length, num_windows).astype(int):
        ids = torch.from_numpy(stream[at : at + length])[None]
        logits = logits_of(model, hidden_states(model, ids[:, :-1]))[0, 31:]
        total += F.cross_entropy(logits, ids[0, 32:], reduction="sum").item()
        count += len(logits)
    return total / count


# --------------------------------------------------------------------------------------- unlooping


def open_prefixes(corpus: Corpus, step: int, seed: int, batch: int, length: int) -> Tensor:
    """[batch, length] beginnings of texts that should go on, not around: no cycles among them.

    A third is real text; the rest are tables, facts, paragraphs and programs, cut at random places.
    """
    rng = random.Random(seed * 1_000_003 + step)
    writers = [synthetic.table, synthetic.facts, synthetic.prose, synthetic.program]
    rows: list[list[int]] = []
    real = corpus.windows(step, seed + 1, batch, length).tolist()
    while len(rows) < batch:
        row = rng.choice(real)
        if rng.random() < 0.67:
            ids = corpus.tokenizer(rng.choice(writers)(rng))["input_ids"]
            begin = rng.choice([0, 0, rng.randint(0, max(0, len(ids) - length))])
            row = ids[begin : begin + length]
        if len(row) == length and not any(repeats(row, LOOP)):
            rows.append(row)
    return torch.tensor(rows)


LOOP = 10  # tokens: a text that says this many again is going around


def repeats(row: list[int], size: int) -> list[bool]:
    """For each token, whether it completes a run of `size` tokens that stood in the row before."""
    seen: set[tuple[int, ...]] = set()
    result = []
    for end in range(1, len(row) + 1):
        run = tuple(row[max(0, end - size) : end])
        result.append(len(run) == size and run in seen)
        seen.add(run)
    return result


def unloop(target: PreTrainedModel, corpus: Corpus, args: argparse.Namespace, steps: int) -> None:
    """Unlearn the model's own loops by sequence-level unlikelihood (Welleck et al., 1908.04319).

    Small models fall into loops when decoded greedily. Each step lets the target continue texts
    greedily and lowers the probability of tokens with which it repeats LOOP tokens, next to an
    ordinary step on the training text, which keeps everything else (cycles too) in place. Taken
    whole, the change also breaks sentences that must repeat; UNLOOP_SHARE of it keeps both (weights
    interpolate well: Wortsman et al., 2109.01903).
    """
    path = args.work / "unloop.pt"
    if not path.exists():
        before = {name: value.clone() for name, value in target.state_dict().items()}
        length, new, batch = (24, 24, 4) if args.smoke else (40, 96, 32)
        optimizer = torch.optim.AdamW(target.parameters(), lr=UNLOOP_RATE, weight_decay=0.0)
        bar = tqdm(range(steps), desc="unloop")
        for step in bar:
            target.set_attn_implementation("sdpa")
            with torch.no_grad(), in_bfloat16():
                prefixes = open_prefixes(corpus, step, args.seed, batch, length)
                ids = target.generate(
                    prefixes, attention_mask=torch.ones_like(prefixes), max_new_tokens=new,
                    do_sample=False,
                )  # fmt: skip
            target.set_attn_implementation("train")
            ended = (ids == 0).cumsum(1) > 0
            looping = torch.tensor([repeats(row, LOOP) for row in ids.tolist()]) & ~ended
            looping[:, :length] = False
            text = corpus.windows(10_000_000 + step, args.seed, 8, 257)
            with in_bfloat16():
                own = torch.softmax(logits_of(target, hidden_states(target, ids[:, :-1])), -1)
                likely = own.gather(-1, ids[:, 1:, None]).squeeze(-1)[looping[:, 1:]]
                ordinary = next_token_loss(target, text)
            unlikely = -torch.log1p(-likely.clamp(max=0.999)).sum() / max(1, len(likely))
            (ordinary + unlikely).backward()
            torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = UNLOOP_RATE * min(1.0, 2.0 * (1 - step / steps))
            optimizer.step()
            optimizer.zero_grad()
            share = looping[:, length:].float().mean().item()
            bar.set_postfix(looping=f"{share:.2f}", loss=f"{ordinary.item():.2f}")
        after = target.state_dict()
        mixed = {name: torch.lerp(before[name], after[name], UNLOOP_SHARE) for name in after}
        torch.save(mixed, path)
    target.load_state_dict(torch.load(path))


UNLOOP_RATE = 3e-4
UNLOOP_SHARE = 0.42  # of 0.15 to 1: the least after which most demo prompts do not loop

# ------------------------------------------------------------------------------------------- stages


MTP_NAMES = {
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.", "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.eh_proj.": "mtp.fc.", "layers.0.post_norm.": "mtp.norm.",
    "layers.0.mtp_block.": "mtp.layers.0.",
}  # fmt: skip


def write_folder(
    model: PreTrainedModel, head: MtpModel | None, corpus: Corpus, folder: Path
) -> None:
    """A Hugging Face folder in bf16, the head's weights in the same safetensors file."""
    from safetensors.torch import load_file, save_file

    if folder.exists():
        shutil.rmtree(folder)
    model.config._attn_implementation = "sdpa"
    model.config.architectures = [type(model).__name__]
    model.to(torch.bfloat16).save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)
    if head is not None:
        weights = load_file(folder / "model.safetensors")
        for name, value in head.state_dict().items():
            for ours, theirs in MTP_NAMES.items():
                if name.startswith(ours):
                    weights[name.replace(ours, theirs)] = value.to(torch.bfloat16).contiguous()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def train_target(corpus: Corpus, size: Size, args: argparse.Namespace) -> Trainer:
    """The target without its head, trained if its stage was asked for."""
    target = MellumForCausalLM(target_config(size, attn_implementation="train"))
    trainer = Trainer("target", target, args.work, size, args)
    if args.stage in ("all", "target"):
        trainer.run(corpus, lambda ids: next_token_loss(target, ids))
    return trainer


def train_head(
    target: PreTrainedModel,
    corpus: Corpus,
    size: Size,
    args: argparse.Namespace,
    head: MtpModel | None = None,
) -> Trainer:
    """The frozen target's MTP head, new or `head`, trained if its stage was asked for."""
    head = head or MtpModel(target, 1)
    head.requires_grad_(False).layers.requires_grad_(True)
    trainer = Trainer("mtp", head, args.work, size, args)

    def loss_of(ids: Tensor) -> Tensor:
        losses = mtp_losses(head, target, ids)
        return sum(weight * loss for weight, loss in zip(MTP_WEIGHTS, losses, strict=True))

    if args.stage in ("all", "mtp"):
        trainer.run(corpus, loss_of)
    return trainer


def train_draft(
    target: PreTrainedModel, corpus: Corpus, size: Size, args: argparse.Namespace
) -> Trainer:
    """The draft, distilled from the frozen target if its stage was asked for."""
    draft = Qwen3ForCausalLM(draft_config(size))
    draft.config._attn_implementation = "train"
    trainer = Trainer("draft", draft, args.work, size, args)
    if args.stage in ("all", "draft"):
        trainer.run(corpus, lambda ids: distillation_loss(draft, target, ids, 0.7))
    return trainer


def export(
    target: Trainer, head: Trainer, draft: Trainer, corpus: Corpus, args: argparse.Namespace
) -> dict[str, Any]:
    """Write both folders, and measure what stands in them. Returns the figures."""
    write_folder(target.module, head.module, corpus, args.out / "target")
    write_folder(draft.module, None, corpus, args.out / "draft")
    report: dict[str, Any] = {
        "seed": args.seed,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    report["stages"] = {
        t.name: {"tokens": t.tokens, "steps": t.step, "minutes": round(t.seconds / 60, 1)}
        for t in (target, head, draft)
    }
    num_windows = 4 if args.smoke else 120
    for name in ("target", "draft"):
        report[name] = figures(args.out / name, corpus, num_windows)
    mtp_parameters = sum(p.numel() for p in head.module.layers.parameters())
    report["target"]["mtp_parameters"] = mtp_parameters
    return report


def figures(folder: Path, corpus: Corpus, num_windows: int) -> dict[str, Any]:
    """Size, checksum and held-out loss of the model in a folder."""
    weights = (folder / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="train"
    )
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_nats_per_token": {
            source: round(held_out_loss(model, corpus, source, num_windows), 3) for source in MIX
        },
        "sha256": hashlib.sha256(weights).hexdigest(),
        "bytes": len(weights),
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and token files")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where target/ and draft/ go"
    )
    parser.add_argument(
        "--stage",
        choices=["all", "data", "target", "unloop", "mtp", "draft", "export"],
        default="all",
    )
    parser.add_argument(
        "--tokens", type=float, help="tokens for --stage (may be changed when resuming)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--smoke", action="store_true", help="a toy, to see that every stage runs")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="torch.compile: 1.3x",
    )
    args = parser.parse_args()
    if args.smoke and args.out == Path(__file__).parent:
        parser.error("--smoke goes with --out: it would replace the trained models")
    return args


def main() -> None:
    """Run the stages that are asked for; after the last, write folders and figures."""
    args = parse_arguments()
    size = SMOKE if args.smoke else FULL
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    corpus = Corpus(args.work / "data", size)
    target = train_target(corpus, size, args)
    if args.stage in ("data", "target"):
        return
    target.resume()
    unloop(target.module, corpus, args, steps=2 if args.smoke else 150)
    if args.stage == "unloop":  # on its own it must not go on to write the folders
        return
    target.module.requires_grad_(False)
    head = train_head(target.module, corpus, size, args)
    draft = train_draft(target.module, corpus, size, args)
    if args.stage in ("mtp", "draft"):
        return
    head.resume()
    draft.resume()

    report = export(target, head, draft, corpus, args)
    report["seconds"] = round(time.perf_counter() - began, 1)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
