"""What the tasks stand on: a small language model in numpy, its KV cache, noise, and a picture.

Tasks import it (`from course.lab import …`). Nothing here must be changed to solve one.

    model = Model("target")              # demo_models/target, which tests compare with transformers
    row = model.open()                   # a text's row of the cache
    logits = row.read([1442, 12, 1117])  # one pass over three tokens: logits [3, V]
    row.truncate(2)                      # the cache forgets the third
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from operator import eq
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors import deserialize
from tokenizers import Tokenizer

FOLDER = Path(__file__).parent
MODELS = FOLDER.parent / "demo_models"
TOKENIZER = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


def read_mistakes() -> tuple[dict[str, str], list[tuple[str, int, str, str]]]:
    """mistakes.txt: sentences by name, and wrong solutions: (name, task, old code, new code)."""
    name, sentences, wrong = "", dict[str, str](), list[tuple[str, int, str, str]]()
    for line in (FOLDER / "mistakes.txt").read_text("utf-8").splitlines():
        if line.startswith("    "):
            task, _, change = line.strip().partition(" | ")
            old, _, new = change.replace("⏎", "\n").partition(" →")
            wrong.append((name, int(task), old, new.removeprefix(" ")))
        elif line and not line.startswith("#"):
            name, _, sentences[name] = line.partition(": ")
    return sentences, wrong


class Mistake(Exception):
    """What is wrong with a solution: the sentence of this name, and what was got and expected."""

    def __init__(self, mistake: str, picture: str = "", **details: Any) -> None:
        self.sentence, self.picture = read_mistakes()[0][mistake].format(**details), picture
        super().__init__(self.sentence)


def load(path: Path) -> ModuleType:
    """A Python file as a module, whatever it is called. Dataclasses need it in sys.modules."""
    loader = SourceFileLoader("course_file", str(path))
    module = sys.modules[loader.name] = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def path_of(number: int, folder: str = "tasks") -> Path:
    """Where task `number` is, or its solution in the folder "solutions"."""
    paths = [*(FOLDER / folder).glob(f"{number}_*.py")]
    return paths[0] if paths else sys.exit(f"course/{folder} lacks task {number}: restore it")


def verify(draft: list[int], choices: list[int]) -> list[int]:
    """Task 1, solved: the tokens that are kept."""
    return load(path_of(1, "solutions")).verify([*map(int, draft)], [*map(int, choices)])


# ---------------------------------------------------------------------------------- the model
def encode(text: str) -> list[int]:
    """The ids of a text's tokens."""
    return TOKENIZER.encode(text).ids


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens, with line ends written as ⏎."""
    return TOKENIZER.decode(list(tokens)).replace("\n", "⏎")


@cache
def _weights(name: str) -> dict[str, dict[str, np.ndarray]]:
    """The weights in float32, by layer and name; the file has the upper halves of their bits."""
    result = defaultdict[str, dict[str, np.ndarray]](dict)
    for key, stored in deserialize((MODELS / name / "model.safetensors").read_bytes()):
        bits = np.frombuffer(stored["data"], np.uint16).astype(np.uint32) << 16
        layer, _, short = key.removeprefix("model.").removeprefix("layers.").partition(".")
        result[layer][short] = bits.view(np.float32).reshape(stored["shape"])
    return result


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * weight


class Model:
    """A transformer (Qwen3) whose KV cache has rows, each with a length of its own."""

    def __init__(self, name: str, num_rows: int = 1, room: int = 160) -> None:
        """`name` is target or draft; a row holds `room` tokens."""
        config = json.loads((MODELS / name / "config.json").read_text("utf-8"))
        self._size, self._w = config["head_dim"], _weights(name)
        self._layers = [self._w[str(i)] for i in range(config["num_hidden_layers"])]
        self._keys = np.zeros((len(self._layers), num_rows, room, self._size), np.float32)
        self._values = np.zeros_like(self._keys)
        self.held: list[list[int]] = [[] for _ in range(num_rows)]  # the tokens of each row
        self.passes: list[list[list[int]]] = []  # what each pass has read
        self._free = list(range(num_rows))

    def open(self) -> "Row":
        """A free row, which holds nothing."""
        if not self._free:
            raise Mistake("rows")
        return Row(self, self._free.pop(0))

    def read(self, rows: list[int], ids: list[list[int]]) -> np.ndarray:
        """One pass over ids [B, T], behind what the cache rows [B] hold: logits [B, T, V].

        The logits at a token say what may follow it. The cache then holds the tokens, too.
        """
        if len({len(each) for each in ids}) != 1 or len(ids) != len(rows) or not len(ids[0]):
            raise Mistake("rectangle", f"  lengths: {[*map(len, ids)]}")
        self.passes.append([[int(token) for token in tokens] for tokens in ids])
        lengths = np.array([len(self.held[row]) for row in rows])
        at = lengths[:, None] + np.arange(len(ids[0]))  # positions [B, T]
        for row, tokens in zip(rows, self.passes[-1], strict=True):
            self.held[row] += tokens
        return self._forward(np.array(rows), np.array(ids), at)

    def _forward(self, rows: np.ndarray, ids: np.ndarray, at: np.ndarray) -> np.ndarray:
        half = self._size // 2
        angles = at[..., None] * 10000.0 ** (-np.arange(half, dtype=np.float32) / half)
        cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]

        def heads(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            """Norm and rotate x [B, T, heads · size]."""
            x = _norm(x.reshape(*ids.shape, -1, self._size), weight)
            a, b = x[..., :half], x[..., half:]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)

        seen = at.max() + 1
        is_hidden = np.arange(seen) > at[..., None]  # [B, T, seen]: a token sees those before it
        x = self._w["embed_tokens"]["weight"][ids]
        for i, w in enumerate(self._layers):
            h = _norm(x, w["input_layernorm.weight"])
            q = heads(h @ w["self_attn.q_proj.weight"].T, w["self_attn.q_norm.weight"])
            k = heads(h @ w["self_attn.k_proj.weight"].T, w["self_attn.k_norm.weight"])
            self._keys[i, rows[:, None], at] = k[:, :, 0]
            self._values[i, rows[:, None], at] = h @ w["self_attn.v_proj.weight"].T
            keys, values = self._keys[i, rows, :seen], self._values[i, rows, :seen]
            scores = np.einsum("bths,bks->bhtk", q, keys) / self._size**0.5
            scores[np.broadcast_to(is_hidden[:, None], scores.shape)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            out = np.einsum("bhtk,bks->bths", scores, values).reshape(*ids.shape, -1)
            x = x + out @ w["self_attn.o_proj.weight"].T
            h = _norm(x, w["post_attention_layernorm.weight"])
            gate = h @ w["mlp.gate_proj.weight"].T
            gated = gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)
            x = x + gated @ w["mlp.down_proj.weight"].T
        return _norm(x, self._w["norm"]["weight"]) @ self._w["embed_tokens"]["weight"].T


class Row:
    """One text's row of a model's KV cache."""

    def __init__(self, model: Model, index: int) -> None:
        self.model, self.index = model, index

    @property
    def length(self) -> int:
        """How many tokens the cache holds."""
        return len(self.model.held[self.index])

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """One pass over tokens [T], behind what is cached: logits [T, V]."""
        return self.model.read([self.index], [list(tokens)])[0]

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. Nothing is copied or cleared."""
        if not 0 <= length <= self.length:
            raise Mistake("longer", length=length, held=self.length)
        del self.model.held[self.index][length:]


asked: list[tuple[int, int]] = []  # seeds and positions of all noise so far; the checks look at it


def noise(seed: int, position: int, size: int) -> np.ndarray:
    """Random numbers e [size], exponentially distributed: the same for the same arguments."""
    asked.append((seed, position))
    return np.random.default_rng([seed, position]).exponential(size=size)


# -------------------------------------------------------------------------------- the picture
def picture(
    cached: Sequence[int], pending: int, draft: Sequence[int], choices: Sequence[int],
    words: Callable[[Sequence[int]], str] = decode,
) -> str:  # fmt: skip
    """One cycle: what is cached, the pending token, the draft with ✓ and ✗, the target's choices.

    Choices behind a rejected token are made after a text that will not be written: "…".
    """
    right = [*map(eq, draft, choices), False].index(False)
    marks = ["", *[" ✓"] * right, " ✗", *[""] * len(draft)]
    tokens = [words([token]).strip() or "␣" for token in (pending, *draft, *choices)]
    fed = [*map("".join, zip(tokens, marks[: len(draft) + 1], strict=False))]
    says = [word if i <= right else "…" for i, word in enumerate(tokens[len(fed) :])]
    widths = [max(len(a), len(b), 7) + 2 for a, b in zip(fed, says, strict=True)]
    cells = ["pending", *["draft"][: len(draft)]], fed, ["↓"] * len(fed), says
    begins = ["cached", ("… " if len(cached) > 8 else "") + words(cached[-8:]), "", "it says:"]
    size = max(map(len, begins))
    return "\n".join(
        f"  {begin.ljust(size)} │ {''.join(map(str.ljust, row, widths)).rstrip()}"
        for begin, row in zip(begins, cells, strict=True)
    )
