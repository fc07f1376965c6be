"""The kernels' C code: compiled once for each CPU, compiler and source, stored in the user's cache.

Any C compiler will do: what CC names, gcc, clang or cc, or what `pip install ziglang` brings.
Without one, transformers' modules run, which is slower; `load` says why.
"""

import ctypes
import hashlib
import logging
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from runtime.folders import own_folder
from runtime.values import in_short

if TYPE_CHECKING:  # functions import it: runtime/models/ahead.py needs this file before
    import torch
    from torch import Tensor

LOG = logging.getLogger("kernels")
PROGRESS = logging.getLogger("progress.once")  # shown on a terminal, too

_FOLDER = Path(__file__).parent / "c"
# Every flag that could let a compiler choose how numbers are rounded is off.
_FLAGS = (
    "-O3 -march=native -std=gnu11 -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-pthread"
).split()
_SLOWEST = "blocks", "k_blocks", "linear"
_LINKING = "-shared", "-pthread", "-Wl,-Bsymbolic"
_SECONDS = 300
LANES = 16  # outputs of a panel
# As in linear.h.
FORMS = "FLOAT", "FLOAT16", "HALF", "Q8", "Q4", "Q4M", "Q5", "Q5M", "Q4K", "Q5K", "Q6K"
_MOST_INPUTS = 1 << 24
Shape = tuple[int, int]  # of a matrix: outputs, inputs
_library: ctypes.CDLL | None = None
_failure = ""  # why there is none
_outside: ContextVar[int | None] = ContextVar("outside", default=None)  # a thread's, in `exclusive`
is_used = False


def empty_f32(*shape: int) -> "Tensor":
    """Memory for numbers that C writes: torch's defaults may be of another type and device."""
    import torch

    return torch.empty(shape, dtype=torch.float32, device="cpu")


def num_threads() -> int:
    """How many threads compute a call: as many as torch has outside `exclusive`."""
    import torch

    return _outside.get() or torch.get_num_threads()


@contextmanager
def exclusive() -> Iterator[None]:
    """Within it torch computes in the calling thread, between calls of kernels.

    Its other threads wait busily for a while for what comes next, and would take the cores from
    the kernels'. Where kernels are not used, it computes with all.
    """
    import torch

    if not is_used:
        yield
        return
    before, token = torch.get_num_threads(), _outside.set(num_threads())
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)
        _outside.reset(token)


def are_used() -> bool:
    """Whether what is built now computes with the kernels: `setup` has decided."""
    return is_used


def why_not() -> str | None:
    """Why nothing can be compiled here, in a sentence; None if it can."""
    if platform.system() != "Linux":
        return "the kernels are for Linux only"
    if not compiler():
        return "the kernels need a C compiler (gcc, clang, what CC names, or `pip install ziglang`)"
    return None


def compiler() -> list[str]:
    """The C compiler's command; empty if there is none. Raises ValueError for a wrong CC."""
    command = os.environ.get("CC")
    try:
        named = [shlex.split(command)] if command else [["gcc"], ["clang"], ["cc"], ["g++"]]
    except ValueError as error:
        raise ValueError(f"CC is no command: {in_short(error)}") from error
    for name, *rest in filter(None, named):
        if path := shutil.which(name):
            return [path, *rest]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else []


def use(wanted: bool) -> None:
    """Let models built from now on use the kernels if they are `wanted` and compile."""
    global is_used
    try:
        is_used = wanted and bool(load())
    except ValueError as error:
        is_used = False
        _tell(str(error))


def _failed(reason: str) -> ValueError:
    """The error for this reason, which is given from now on: to try again would take a while."""
    global _failure
    _failure = reason
    return ValueError(reason)


@cache
def _tell(reason: str) -> None:
    """Say once, and not for each model, why the kernels are not used."""
    LOG.warning("the models run in transformers' modules, which is slower: %s", reason)


def load(compiles: bool = True) -> ctypes.CDLL:
    """The library, compiled if it is not in the cache. Raises ValueError, with a sentence.

    What has failed is not tried again in this process, and what a compiler has refused not in the
    next one, either.
    """
    global _library
    if _library is not None:
        return _library
    if reason := _failure or why_not():
        raise ValueError(reason)
    try:
        place = own_folder() / f"{_key()}.so"
        if (file := _whole(place)) is None:
            if (refused := place.with_suffix(".refused")).exists():
                raise _failed(f"the compiler failed before (remove {refused} to try again)")
            if not compiles:
                raise ValueError("the kernels are not compiled yet")
            try:
                _compile(place)
            except ValueError as error:
                refused.touch()
                raise _failed(str(error)) from error
            file = _whole(place) or open(place, "rb")  # another process may be between the two
        with file:  # what was hashed; the number stays, as another file of it would pass for this
            library = ctypes.CDLL(f"/proc/self/fd/{os.dup(file.fileno())}")
        library.describe.restype = ctypes.c_char_p
        _library = library
        return library
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        raise _failed(f"the kernels cannot be compiled: {in_short(error)}") from error


def lay_out(form: str, shape: Shape, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """A GGUF tensor's bytes in panels: the same numbers in another order. uint8 [bytes].

    `pieces` are uint8 [rows, bytes of a row] of a matrix [outputs, inputs]; all but the last one
    have whole panels of rows.
    """
    (outputs, inputs), call, number, first = shape, load(), FORMS.index(form), 0
    data = room_for(form, outputs, inputs)
    panels = ctypes.c_void_p(data.ctypes.data)
    for piece in pieces:
        assert first % LANES == 0 and piece.flags.c_contiguous and piece.dtype == np.uint8
        assert first + len(piece) <= outputs
        at = ctypes.c_void_p(piece.ctypes.data)
        call.repack(number, at, first, len(piece), inputs, panels)
        first += len(piece)
    assert first == outputs
    return data


def lay_out_file(file: int, matrices: Sequence[tuple[int, str, Shape]]) -> list[np.ndarray]:
    """Matrices (first byte, form, shape) of a GGUF file in panels. uint8 [bytes] each.

    One call makes all of them: whoever returns to Python has to wait for its other threads. Raises
    OSError, and EOFError where the file ends before a matrix does.
    """
    from .structs import STRUCTS

    made = [_pages_for(form, *shape) for _, form, shape in matrices]
    places = (STRUCTS["file_matrix"] * len(made))(
        *(
            (offset, FORMS.index(form), *shape, panels.ctypes.data)
            for (offset, form, shape), panels in zip(matrices, made, strict=True)
        )
    )
    if (error := load().repack_file(file, places, len(made))) < 0:
        raise EOFError
    if error:
        raise OSError(error, os.strerror(error))
    return made


def room_for(form: str, outputs: int, inputs: int) -> np.ndarray:
    """Memory for a matrix's panels, which are zeros yet, in large pages if possible. uint8."""
    memory = _pages_for(form, outputs, inputs)
    load().use_large_pages(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)))
    return memory


def _pages_for(form: str, outputs: int, inputs: int) -> np.ndarray:
    """Memory as that of `room_for`; C makes its pages large."""
    assert 0 < outputs < 1 << 31 and 0 < inputs <= _MOST_INPUTS
    call = ctypes.PyDLL(None, handle=load()._handle)  # lets no other thread run Python meanwhile
    call.bytes_of.restype = ctypes.c_size_t
    size = call.bytes_of(FORMS.index(form), outputs, inputs)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def compute(name: str, *arguments: Any, threads: int | None = None) -> None:
    """Call a function of the library with `threads` or all; raises what `checked` raises."""
    checked(getattr(load(), name)(*arguments, threads or num_threads()))


def checked(result: int) -> int:
    """The result of a C function. Raises the error that its number stands for in errors.h."""
    if result == -1:
        raise ValueError("the model gave no probabilities to draw from (NaN in its logits?)")
    if result == -2:
        raise MemoryError("no memory for a forward, or to choose a token")
    if result == -3:
        raise IndexError("a forward was asked for a token, a row or a place that is not there")
    return result


def address(
    tensor: "Tensor | None", *shape: int, dtype: "torch.dtype | None" = None
) -> ctypes.c_void_p:
    """A tensor's address for C, which trusts that so many numbers of the type lie in a row.

    NULL for None, and for a tensor without numbers. Without a `shape` the caller knows the size;
    without a `dtype` it is float32.
    """
    import torch

    if tensor is None:
        return ctypes.c_void_p()
    is_asked = tensor.dtype is (dtype or torch.float32)
    assert is_asked and tensor.is_cpu and tensor.is_contiguous(), "not what C reads"
    assert not shape or tensor.shape == shape, f"{list(tensor.shape)} is not {list(shape)}"
    return ctypes.c_void_p(tensor.data_ptr())


def instructions() -> str:
    """The CPU instructions that the library was compiled for."""
    return load().describe().decode()


def _whole(place: Path) -> IO[bytes] | None:
    """The library, opened, if it is as it was compiled: half of one would end the process."""
    digest = place.with_suffix(".sha256")
    if not (place.is_file() and digest.is_file()):  # a pipe would be waited for
        return None
    file = open(place, "rb")
    if hashlib.sha256(file.read()).hexdigest().encode() == digest.read_bytes():
        return file
    return file.close()


def _key() -> str:
    """A hash of all that the compiled code depends on."""
    cpu = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
    flags = [line for line in cpu if line.startswith(("flags", "Features", "model name"))]
    command = [*compiler(), "--version"]
    asked = subprocess.run(command, capture_output=True, errors="replace", timeout=60)
    sources = [path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.[ch]"))]
    parts = [*sources, asked.stdout, *compiler(), *_FLAGS, *_LINKING, *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _run(*arguments: str | Path) -> None:
    """Call the compiler. Raises ValueError for an error in the code, as it would be each time.

    Raises ChildProcessError where it fails otherwise: for lack of memory or room, say.
    """
    done = subprocess.run(
        [*compiler(), *arguments], capture_output=True, errors="replace", timeout=_SECONDS,
        env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.splitlines() or ["it said nothing"]
        first = next((line for line in said if "error" in line), said[-1])
        # A fatal or internal error has another cause.
        is_refused = done.returncode == 1 and re.search(r"\.[ch]:[\d:]+ error: ", done.stderr)
        kind = ValueError if is_refused else ChildProcessError
        raise kind(f"the compiler failed: {first[:200]}")


def _compile(file: Path) -> None:
    """Compile all sources at once, the slowest ones first. Raises what `_run` raises, or OSError.

    The library is made beside its place: several processes may do so at once.
    """
    PROGRESS.info("compiling the C code for this machine (a few seconds, once)")
    for left in file.parent.glob("tmp*"):  # by a process that was killed meanwhile
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        sources = sorted(_FOLDER.glob("*.c"), key=lambda source: source.stem not in _SLOWEST)
        objects = [made.with_name(f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(_run, *_FLAGS, "-x", "c", "-c", "-o"), objects, sources))
        _run(*_LINKING, "-o", made, *objects, "-lm")
        digest = made.with_suffix(".sha256")
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), "utf-8")
        made.replace(file)
        digest.replace(file.with_suffix(".sha256"))
