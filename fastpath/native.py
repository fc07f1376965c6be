"""The blocks in C++ (native.cpp), for --compile: without Python between a block's operations.

In Python a block of a small model spends more time between its matrix products than in them. The
compiled stack does the same steps in one call. It rounds in another order, so its bits are its own:
`calibrate` checks them like any others. Its attention reads the keys that a token sees and no
others, so its bits cannot depend on the token's company. What the stack does not know (other norms
than RMS norms, norms over all heads at once, soft caps, other activations than silu and gelu by
tanh) stays in Python.

The code is compiled once for each CPU, compiler and version of torch, and kept in the user's cache.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from messages import in_short

from .activation import ROWS
from .int8 import Int8Weights
from .linear import Weights

LOG = logging.getLogger("serving.native")
PROGRESS = logging.getLogger("serving.progress.once")  # told on a terminal, too

_SOURCE = Path(__file__).with_suffix(".cpp")
# No -ffast-math: it would let the compiler choose the order of sums.
_FLAGS = "-O3 -march=native -std=c++20 -fPIC -shared -fno-math-errno -fno-trapping-math".split()
_SECONDS = 300
_is_loaded = is_used = False


def why_not() -> str | None:
    """Why nothing can be compiled here, in a sentence; None if it can."""
    if platform.system() != "Linux":
        return "--compile is for Linux only"
    if not compiler():
        return "--compile needs a C++ compiler (g++, clang++, or what CXX names)"
    return None


def compiler() -> list[str]:
    """The command of the C++ compiler; empty if there is none."""
    given = os.environ.get("CXX")
    for name, *rest in [shlex.split(given)] if given else [["g++"], ["clang++"], ["c++"]]:
        if path := shutil.which(name):
            return [path, *rest]
    return []


def use(wanted: bool | None) -> None:
    """Let what is built from now on use it: True, False, or None for where it can be had.

    Raises ValueError, with a sentence, if it is wanted and cannot be had.
    """
    global is_used
    is_used = False
    try:
        if wanted is not False:
            load(again=bool(wanted))
            is_used = True
    except ValueError as error:
        if wanted:
            raise
        # A machine without a compiler is nothing to worry about; one whose compiler fails is.
        level = logging.WARNING if why_not() is None else logging.INFO
        LOG.log(level, "the blocks run in Python: %s", error)


def load(again: bool = True) -> None:
    """Compile what is not in the cache, and load it. Raises ValueError, with a sentence.

    What failed once is tried only `again` if that is asked for: it takes a while.
    """
    global _is_loaded
    if _is_loaded:
        return
    if reason := why_not():
        raise ValueError(reason)
    try:
        file = _cache() / f"{_key()}.so"
        if _is_whole(file):
            _open(file)
        else:
            failed = file.with_suffix(".failed")
            if failed.exists() and not again:
                raise ValueError(f"it failed before (remove {failed} to try again)")
            try:
                _compile(file)
                _open(file)
            except (OSError, ValueError):
                failed.touch()
                raise
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ValueError(f"--compile: {in_short(error.__cause__ or error)}") from error
    _is_loaded = True


def _open(file: Path) -> None:
    torch.classes.load_library(str(file))


def _cache() -> Path:
    """A folder of the user's own: what lies there is run."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "speculative-decoding" / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to others, or others may write there")
    return folder


def _is_whole(file: Path) -> bool:
    """Whether it is what was compiled: half a library would end the process."""
    digest = file.with_suffix(".sha256")
    if not (file.exists() and digest.exists()):
        return False
    return hashlib.sha256(file.read_bytes()).hexdigest() == digest.read_text("utf-8")


def _key() -> str:
    """Of all that the compiled code depends on."""
    cpu = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
    flags = [line for line in cpu if line.startswith(("flags", "Features", "model name"))]
    asked = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, timeout=60)
    parts = [_SOURCE.read_text("utf-8"), torch.__version__, asked.stdout, *_command(), *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _command() -> list[str]:
    """How to compile, without the name of what is made."""
    root = Path(torch.__file__).parent
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{root}/lib", "-ltorch_cpu", "-lc10", *_threads(root / "lib")]
    return [*compiler(), *_FLAGS, abi, *include, str(_SOURCE), *libraries]


def _threads(folder: Path) -> list[str]:
    """Torch's own threads, where it brings their library: a second one would fight with it.

    clang++ would bring one. Without threads only the reading of long prompts is slower.
    """
    own = sorted(folder.glob("libgomp*.so*"))
    is_clang = any("clang" in Path(part).resolve().name for part in compiler())
    return ["-fopenmp", "-Wl,--as-needed", str(own[0])] if own and not is_clang else []


def _compile(file: Path) -> None:
    """To a file beside first: several processes may do so at once. Raises ValueError or OSError."""
    PROGRESS.info("compiling the blocks for this machine (10 to 30 s, once)")
    for left in file.parent.glob("tmp*"):  # by a process that was killed meanwhile
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        done = subprocess.run(
            [*_command(), "-o", str(made)], capture_output=True, text=True, timeout=_SECONDS,
            env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
        if done.returncode:
            said = done.stderr.splitlines() or ["it said nothing"]
            first = next((line for line in said if "error" in line), said[-1])
            raise ValueError(f"--compile: the compiler failed: {first[:200]}")
        digest = made.with_suffix(".sha256")
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), "utf-8")
        made.replace(file)
        digest.replace(file.with_suffix(".sha256"))


# --------------------------------------------------------------------------------- the stack

PROMPT_ROWS = ROWS[-1]  # from so many rows of one text on torch's attention is faster
_NORMS = "input_norm", "out_norm", "mlp_norm", "down_norm", "qk_norm"
_ACTIVATIONS = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True}  # whether it is gelu
_WIDEST_HEAD = 512  # as in native.cpp
# By how much of the largest number a block may differ: some roundings of its type. Measured were
# 1.2e-6 and .02 (.06 with large biases), and with integers, which may jump, .004 and .07 (.14).
_ROUNDINGS = {torch.float32: 2e-5, torch.bfloat16: 0.15}
_JUMPS = 0.05


def delta_steps(
    state: Tensor, both: Tensor, value: Tensor, decay: Tensor, beta: Tensor, product: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The gated delta rule over the tokens of one text: the state behind them, and the outputs.

    Takes what GatedDelta.prepare in recurrent.py gives [T, …], and returns [H, K, V] and [T, H, V].
    None for heads that the code has no room for.
    """
    if state.shape[1] > _WIDEST_HEAD:
        return None
    inputs = [x.contiguous() for x in (state, both, value, decay, beta, product)]
    after, outputs = torch.ops.speculative.delta_steps(*inputs)
    return after, outputs[:, :, 0]


class NativeStack:
    """Blocks of block.py, compiled; they share the weights and the cache with those."""

    def __init__(
        self, blocks: Sequence[Any], kinds: Sequence[str], windows: dict[str, int | None]
    ) -> None:
        """kinds[i] is block i's kind of attention, windows[kind] how far back it sees."""
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
            what = kind_index, windows[kind] or 0, block.is_gated, is_gelu
            self._stack.begin(*what, weights, epsilons)
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

        Of each kind of attention: `ropes`, cos and signed sin [N, head_dim], and for a prompt's
        block `masks` (PROMPT_ROWS tokens and more of one text), else none. `read` is what the first
        block's attention reads, if that is not x, normed.
        """
        cos, sin = ([ropes[kind][i] for kind in self._kinds if ropes] for i in range(2))
        seen = [masks[kind] for kind in self._kinds if masks]
        return self._stack.run(x, begin, end, cos, sin, seen, *buffers, *rows, read)

    def buffers(self, cache: Any) -> tuple[list[Tensor], list[Tensor]] | None:
        """The cache's keys and values [slots, heads, capacity, head_dim], if it has them by now."""
        layers = [cache.layers[i] for i in self._layers]
        if not all(layer.is_initialized for layer in layers):
            return None
        return [layer.keys for layer in layers], [layer.values for layer in layers]


class Rows(NamedTuple):
    """Where the N rows of a forward stand in the cache, as native.cpp takes it."""

    slots: Tensor  # [N]; -1: the row is a pad
    positions: Tensor  # [N], in the text
    places: Tensor  # [N]: where in the slot a row's keys and values lie
    line: Tensor  # [N, depth]: where those of the text's last tokens lie, up to the row's own

    @classmethod
    def chain(cls, slots: Tensor, positions: Tensor) -> "Rows":
        """All tokens lie where they stand in the text."""
        return cls(slots, positions, positions, positions.new_empty(len(positions), 0))

    @classmethod
    def of(cls, where: Any, num_rows: int) -> "Rows":
        """From a place of forward.py."""
        count = sum(where.counts)
        if getattr(where, "ragged", None) is None:  # pads stand on the left
            slots = torch.full((num_rows,), where.slots[0])
            slots[: num_rows - count] = -1
            return cls.chain(slots, torch.arange(where.end - num_rows, where.end))
        slots = torch.full((num_rows,), -1)
        slots[:count] = where.padded.written[0]
        if where.line is None:
            return cls.chain(slots, where.positions[0])
        return cls(slots, where.positions[0], where.places, where.line)


def native_stack(
    blocks: Sequence[Any],
    kinds: Sequence[str],
    windows: dict[str, int | None],
    ropes: Any,
    masks: Any,
) -> NativeStack | None:
    """The blocks compiled, where that was asked for, if it knows them and computes the same."""
    if not is_used or not ropes or not all(map(_is_known, blocks)):
        return None
    shapes = {(b.num_heads, b.num_kv_heads, b.head_dim, b.scaling) for b in blocks}
    if len(shapes) > 1:
        return None
    try:
        stack = NativeStack(blocks, kinds, windows)
        differs = _difference(stack, blocks, kinds, ropes, masks)
    except Exception as error:  # the blocks in Python are still there
        differs = in_short(error)
    if differs:
        LOG.warning("the blocks run in Python: %s", differs)
    return None if differs else stack


def _is_known(block: Any) -> bool:
    if block.is_recurrent or block.num_gates:
        return False
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
def _difference(
    stack: NativeStack, blocks: Sequence[Any], kinds: Sequence[str], ropes: Any, masks: Any
) -> str | None:
    """Where a block gives something else than in Python, but for roundings."""
    first, like = blocks[0], blocks[0].like
    count = min(8, *(tables[0].shape[1] for tables in ropes.values()))
    positions = torch.arange(count)
    shape = 1, first.num_kv_heads, count, first.head_dim
    buffers = tuple([like.new_zeros(shape) for _ in blocks] for _ in range(2))
    rope = {kind: tuple(t[0, :count, 0] for t in tables) for kind, tables in ropes.items()}
    mask = {kind: table.of(positions[None], 0, count) for kind, table in masks.items()}
    rows = Rows.chain(positions * 0, positions)
    random = torch.Generator().manual_seed(0)
    width = first.down.compute.out_features * (1 + first.has_other_inputs)
    # Small, so that roundings of x hide nothing of what the block adds.
    given = torch.randn(count, width, generator=random).to(like.dtype) / 64
    is_integer = isinstance(first.qkv.compute, Int8Weights)
    tolerance = _ROUNDINGS[like.dtype] + (_JUMPS if is_integer else 0)
    for i, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        tables = tuple(t[:, :count] for t in ropes[kind])
        expected = block.run(given[None], tables, mask[kind], None)[0]
        read, x = block.read(given) if block.has_other_inputs else (None, given)
        actual = stack(x, i, i + 1, rope, {}, buffers, rows, read)
        largest = float((expected - x).abs().max())
        roundings = 2 * torch.finfo(x.dtype).eps * float(x.abs().max())
        difference = float((actual - expected).abs().max())
        if not difference <= tolerance * largest + roundings:
            return f"block {i} differs by {difference:.2g} of {largest:.2g} in C++"
    return None
