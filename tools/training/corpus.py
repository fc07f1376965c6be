"""Text that every machine has, in tokens: what the embedded target is trained on.

    library     the running Python's standard library           tests   its tests
    packages    the sources of the installed requirements       prose   their docstrings
    synthetic   what synthetic.py writes

One source file in 20 (by md5 of its path) is held out, with its docstrings.
"""

import ast
import hashlib
import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tools import write_whole

from . import synthetic

PACKAGES = (
    "torch transformers numpy flask werkzeug jinja2 click waitress huggingface_hub tokenizers tqdm "
    "networkx fsspec rich pygments filelock packaging typer anyio"
).split()
MAX_PACKAGE_BYTES = 45_000_000  # the transformers sources repeat each other: a part is enough
# Share of the training windows that each source gives.
MIX = {"library": 0.42, "packages": 0.13, "tests": 0.06, "prose": 0.14, "synthetic": 0.25}
VOCAB_SIZE = 4096
END = "<|endoftext|>"
LITTLE = 400_000  # bytes of a source, where a little text is enough
Documents = dict[tuple[str, str], list[tuple[str, bool]]]


def _number(name: str) -> int:
    return int(hashlib.md5(name.encode()).hexdigest(), 16)


def _part(name: str) -> str:
    """Whether a file is trained on or held out: 1 in 20, the same anywhere."""
    return "train" if _number(name) % 20 else "held_out"


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
            if not (is_test and source == "packages"):
                yield "tests" if is_test else source, path.relative_to(base).as_posix(), text


def docstrings(text: str) -> Iterator[str]:
    """A Python source's docstrings that read as prose: three lines or more, mostly letters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            doc = ast.get_docstring(node) or ""
            letters = sum(c.isalpha() or c == " " for c in doc)
            if doc.count("\n") >= 2 and letters > 0.8 * len(doc):
                yield doc + "\n"


@cache
def collect(limit: int | None = None) -> Documents:
    """(source, "train" | "held_out") -> documents, each with whether an end of text follows."""
    documents: Documents = {}
    taken, most = {"library": 0, "tests": 0, "packages": 0}, limit or 1 << 60
    for source, path, text in sorted(source_files(), key=lambda f: f"{_number(f[1]):032x}"):
        if taken[source] > min(most, MAX_PACKAGE_BYTES if source == "packages" else most):
            continue
        taken[source] += len(text)
        part = _part(path)
        documents.setdefault((source, part), []).append((text, True))
        documents.setdefault(("prose", part), []).extend((d, True) for d in docstrings(text))
    from pydoc_data import topics

    for name, text in topics.topics.items():
        documents.setdefault(("prose", _part(name)), []).extend([(text, True)] * 3)
    documents["synthetic", "train"] = synthetic.documents(0, 100_000 if limit else 14_000_000)
    documents["synthetic", "held_out"] = synthetic.documents(1, 60_000)
    return documents


def beginnings(number: int, count: int) -> list[str]:
    """Texts to go on with, each number others: half of them begin where a document begins."""
    rng, found, documents = random.Random(number), [], collect(LITTLE)
    for source in rng.choices(list(MIX), list(MIX.values()), k=count):
        text, _ = rng.choice(documents[source, "train"])
        at = rng.choice([0, rng.randrange(max(1, len(text) - 400))])
        found.append(text[at : at + 400])
    return found


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, 4096 entries; id 0 is the end of text."""
    bpe, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END, model_max_length=2048
    )


class Corpus:
    """Token streams by source, with where each document starts; windows are drawn from them."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """What `folder` holds, or made now: of at most so many bytes a source."""
        self.folder, file = folder, folder / "tokens.npz"
        if not file.exists():
            streams = self._tokenised(collect(limit))
            write_whole(file, lambda part: np.savez(part, **streams))
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        with np.load(file) as data:
            self.streams = dict(data)

    def _tokenised(self, documents: Documents) -> dict[str, np.ndarray]:
        parts = (docs for (_, part), docs in documents.items() if part == "train")
        tokenizer = train_tokenizer(text for docs in parts for text, _ in docs[::3])
        tokenizer.save_pretrained(self.folder)
        streams, gap = {}, tokenizer("\n\n")["input_ids"]
        for (source, part), docs in documents.items():
            ids, starts = list[int](), list[int]()
            for text, ends in tqdm(docs, desc=f"tokens of {source}, {part}", leave=False):
                starts.append(len(ids))
                ids += tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if ends else gap)
            streams[f"{source} {part}"] = np.array(ids, np.uint16)
            streams[f"{source} {part} starts"] = np.array(starts)
        return streams

    def windows(self, step: int, batch: int, length: int) -> Tensor:
        """[batch, length] ids of step `step`; the same whatever ran before.

        Half of the windows begin where documents begin, as prompts do.
        """
        rng, rows = np.random.default_rng(step), []
        for source in rng.choice(list(MIX), size=batch, p=list(MIX.values())):
            stream = self.streams[f"{source} train"]
            last = len(stream) - length - 1
            at = rng.integers(last)
            if rng.random() < 0.5:
                at = min(rng.choice(self.streams[f"{source} train starts"]), last)
            rows.append(stream[at : at + length])
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(torch.get_default_device())

    def held_out(self, source: str, num_windows: int, length: int) -> Tensor:
        """[num_windows, length]: evenly spaced windows of what is held out."""
        stream = self.streams[f"{source} held_out"].astype(np.int64)
        length = min(length, len(stream) - 1)
        begins = np.linspace(0, len(stream) - length, num_windows).astype(int)
        windows = np.stack([stream[at : at + length] for at in begins])
        return torch.from_numpy(windows).to(torch.get_default_device())
