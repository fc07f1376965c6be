"""The blocks in C++ (native.cpp), for --compile: without Python between a block's operations.

In Python a block of one row spends as much time between its matrix products and its attention as in
them. The compiled stack does the same steps in one call. It rounds in another order, so its bits
are its own: `calibrate` checks them like any others. What it does not know (other norms than RMS
norms, soft caps, other activations than silu and gelu by tanh) stays in Python.

The code is compiled once for each CPU and version of torch, and kept in the user's cache.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from messages import in_short

from .int8 import Int8Weights
from .linear import Weights

LOG = logging.getLogger("serving.native")
PROGRESS = logging.getLogger("serving.progress")

_SOURCE = Path(__file__).with_suffix(".cpp")
# No product is added without being rounded first, so that Python's integers give the same bits. No
# -ffast-math: it would let the compiler choose the order of sums.
_FLAGS = "-O3 -march=native -std=c++20 -fPIC -shared -ffp-contract=off -fno-math-errno".split()
_FLAGS += ["-fno-trapping-math"]
_SECONDS = 300
_is_loaded = is_used = False


def why_not() -> str | None:
    """Why nothing can be compiled here, in a sentence; None if it can."""
    if platform.system() != "Linux":
        return "--compile is for Linux only"
    if compiler() is None:
        return "--compile needs a C++ compiler (g++, clang++, or what CXX names)"
    return None


def compiler() -> str | None:
    """The path of the C++ compiler, if there is one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next(filter(None, map(shutil.which, names)), None)


def use(wanted: bool | None) -> None:
    """Let what is built from now on use it: True, False, or None for where it can be had.

    Raises ValueError, with a sentence, if it is wanted and cannot be had.
    """
    global is_used
    is_used = False
    try:
        if wanted is not False:
            load()
            is_used = True
    except ValueError as error:
        if wanted:
            raise
        LOG.info("the blocks run in Python: %s", error)


def load() -> None:
    """Compile what is not in the cache, and load it. Raises ValueError, with a sentence."""
    global _is_loaded
    if _is_loaded:
        return
    if reason := why_not():
        raise ValueError(reason)
    file = _cache() / f"{_key()}.so"
    try:
        _open(file)
    except OSError:  # none yet, or a damaged one
        PROGRESS.info("compiling the blocks, once for this machine")
        _compile(file)
        try:
            _open(file)
        except OSError as error:
            reason = in_short(error)
            raise ValueError(f"--compile: what was compiled cannot be loaded: {reason}") from error
    _is_loaded = True


def _open(file: Path) -> None:
    """Raises OSError."""
    if not file.exists():
        raise FileNotFoundError(file)
    torch.classes.load_library(str(file))


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "speculative-decoding" / "compiled"


def _key() -> str:
    """Of all that the compiled code depends on."""
    cpu = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
    flags = [line for line in cpu if line.startswith(("flags", "Features", "model name"))]
    parts = [_SOURCE.read_text("utf-8"), torch.__version__, str(compiler()), *_FLAGS, *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(file: Path) -> None:
    """To a file beside first: several processes may do so at once."""
    root = Path(torch.__file__).parent
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            libraries = [f"-L{root}/lib", "-ltorch_cpu", "-lc10", *_threads(root / "lib")]
            command = [compiler(), *_FLAGS, abi, *include, _SOURCE, "-o", made, *libraries]
            subprocess.run(
                list(map(str, command)), check=True, capture_output=True, text=True,
                timeout=_SECONDS,
            )  # fmt: skip
            made.replace(file)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), "")
        raise ValueError(f"--compile: the compiler failed: {first[:200]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--compile: {error}") from error


def _threads(folder: Path) -> list[str]:
    """Torch's own threads, where it brings their library: a second one would fight with it."""
    own = sorted(folder.glob("libgomp*.so*"))
    return ["-fopenmp", "-Wl,--as-needed", str(own[0])] if own else []


# --------------------------------------------------------------------------------- the stack

_ACTIVATIONS = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True}  # whether it is gelu
_WIDEST_HEAD = 512
# By how much of the largest number a block may differ: a few roundings of its type. Measured were
# 1.2e-6 and .02, and for integers, which may be rounded up or down, .004 and .07.
_ROUNDINGS = {torch.float32: 2e-5, torch.bfloat16: 0.06}
_JUMPS = 0.03


class NativeStack:
    """Blocks of block.py, compiled; they share the weights and the cache with those."""

    def __init__(self, blocks: Sequence[Any], kinds: Sequence[str]) -> None:
        """kinds[i] is block i's kind of attention."""
        first = blocks[0]
        sizes = first.num_heads, first.num_kv_heads, first.head_dim, first.scaling
        self._stack = torch.classes.speculative.Stack(*sizes)
        self._kinds, self._layers = list(dict.fromkeys(kinds)), [b.layer_idx for b in blocks]
        for block, kind in zip(blocks, kinds, strict=True):
            norms = [getattr(block, name) for name in _NORMS]
            weights = [torch.empty(0) if norm is None else norm.weight for norm in norms]
            epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
            is_gelu = _ACTIVATIONS[block.activation_name]
            kind_index = self._kinds.index(kind)
            self._stack.begin(kind_index, block.is_gated, is_gelu, weights, epsilons)
            for i, layer in enumerate((block.qkv, block.out, block.gate_up, block.down)):
                layer.compute.add_to(self._stack, i)

    def __call__(
        self,
        x: Tensor,
        begin: int,
        end: int,
        ropes: dict[str, tuple[Tensor, Tensor]],
        masks: dict[str, Tensor],
        buffers: tuple[list[Tensor], list[Tensor]],
        rows: "Rows",
        read: Tensor | None = None,
    ) -> Tensor:
        """Blocks `begin` to `end` - 1 of x [N, D] -> [N, D]; `buffers` are the cache's.

        `read` is what the first one's attention reads, if that is not x, normed.
        """
        cos, sin = ([ropes[kind][i] for kind in self._kinds if ropes] for i in range(2))
        return self._stack.run(
            x, begin, end, cos, sin, [masks[kind] for kind in self._kinds], *buffers, *rows, read
        )

    def buffers(self, cache: Any) -> tuple[list[Tensor], list[Tensor]] | None:
        """The cache's keys and values [slots, heads, capacity, head_dim], if it has them by now."""
        layers = [cache.layers[i] for i in self._layers]
        if not all(layer.is_initialized for layer in layers):
            return None
        return [layer.keys for layer in layers], [layer.values for layer in layers]


class Rows(NamedTuple):
    """Where the N rows of a forward stand, as native.cpp takes it."""

    slots: Tensor  # [N] in the cache; -1: the row is not written
    positions: Tensor  # [N]
    places: Tensor  # [N] among the queries [B, T]; -1: the row has none
    others: Tensor  # slots that are attended to where they do not lie side by side, else empty
    sizes: list[int]  # B, T, the first slot, the number of keys

    @classmethod
    def of(cls, where: Any, num_rows: int) -> "Rows":
        """From a place of forward.py."""
        ragged, count = getattr(where, "ragged", None), sum(where.counts)
        first, last = where.slots[0], where.slots[-1]
        if ragged is None:
            positions = torch.arange(where.end - num_rows, where.end)
            slots = torch.full((num_rows,), first)
            slots[: num_rows - count] = -1  # pads stand on the left
            sizes = [1, num_rows, first, where.kv_length]
            return cls(slots, positions, torch.arange(num_rows), torch.empty(0).long(), sizes)
        slots = torch.full((num_rows,), -1)
        slots[:count] = where.padded.written[0]
        places = torch.where(slots < 0, -1, ragged.real)
        is_compact = where.slots == list(range(first, last + 1))
        others = torch.tensor([] if is_compact else where.slots, dtype=torch.long)
        sizes = [*ragged.padded.shape, first, where.kv_length]
        return cls(slots, where.positions[0], places, others, sizes)


_NORMS = "input_norm", "out_norm", "mlp_norm", "down_norm", "qk_norm"


def native_stack(
    blocks: Sequence[Any], kinds: Sequence[str], ropes: Any, masks: Any
) -> NativeStack | None:
    """The blocks compiled, where that was asked for, if it knows them and computes the same."""
    if not is_used or not all(map(_is_known, blocks)):
        return None
    shapes = {(b.num_heads, b.num_kv_heads, b.head_dim, b.scaling) for b in blocks}
    if len(shapes) > 1:
        return None
    stack = NativeStack(blocks, kinds)
    return stack if _computes_the_same(stack, blocks, kinds, ropes, masks) else None


def _is_known(block: Any) -> bool:
    norms = [getattr(block, name) for name in _NORMS]
    linears = [layer.compute for layer in (block.qkv, block.out, block.gate_up, block.down)]
    return (
        not block.wide_norms
        and block.softcap is None
        and block.activation_name in _ACTIVATIONS
        and block.head_dim % 2 == 0
        and block.head_dim <= _WIDEST_HEAD
        and all(norm is None or type(norm).__name__ == "RMSNorm" for norm in norms)
        and all(isinstance(linear, Weights) and linear.can_be_native for linear in linears)
    )


@torch.inference_mode()
def _computes_the_same(
    stack: NativeStack, blocks: Sequence[Any], kinds: Sequence[str], ropes: Any, masks: Any
) -> bool:
    """Whether each block gives what it gives in Python, but for roundings."""
    first, count = blocks[0], 8
    positions = torch.arange(count)
    shape = 1, first.num_kv_heads, count, first.head_dim
    like = first.like
    buffers = tuple([like.new_zeros(shape) for _ in blocks] for _ in range(2))
    rope = {kind: tuple(t[0, :count, 0] for t in tables) for kind, tables in ropes.items()}
    mask = {kind: table.of(positions[None], 0, count) for kind, table in masks.items()}
    rows = Rows(positions * 0, positions, positions, positions[:0], [1, count, 0, count])
    random = torch.Generator().manual_seed(0)
    width = first.down.compute.out_features * (1 + first.has_other_inputs)
    x = torch.randn(count, width, generator=random).to(like.dtype) / 64
    is_integer = isinstance(first.qkv.compute, Int8Weights)
    tolerance = _ROUNDINGS[x.dtype] + (_JUMPS if is_integer else 0)
    for i, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        tables = tuple(t[:, :count] for t in ropes[kind]) if ropes else None
        expected = block.run(x[None], tables, mask[kind], None)[0]
        read, x = block.read(x) if block.has_other_inputs else (None, x)
        actual = stack(x, i, i + 1, rope, mask, buffers, rows, read)
        # x is so small that its roundings hide nothing of what the block adds.
        largest = float((expected - x).abs().max())
        difference = float((actual - expected).abs().max())
        if not difference <= tolerance * largest:
            LOG.info("--compile: block %d differs by %.2g of %.2g", i, difference, largest)
            return False
    return True
