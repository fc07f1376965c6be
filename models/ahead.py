"""Lays out the matrices of GGUF files in panels while torch and transformers are imported.

    begin  →  threads open the files and lay out  →  open_file, GgufFile.laid_out  →  end

An import takes seconds on one core, and reading needs neither of the two. Whether a file's matrices
are used as they are is decided later: what nobody asks for is given back when its file is closed.
An error here is no error: who opens the file, or reads the matrix, meets it again.
"""

import os
import sys
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise
from threading import Thread

from .gguf_file import GgufFile, Tensor

_PIECE = 1 << 22  # bytes that are read at once: each time a thread waits for the import's
_SWITCH_S = 0.0005  # how long it waits at most
_ELSE = {"-h", "--help", "--help-all", "--device", "--engine", "--no-kernels", "--quantize"}
# Tensors whose rows llama.cpp has put into another order, by family.
_MOVED = {"llama": ("attn_q.weight", "attn_k.weight")}
_Job = tuple[GgufFile, Tensor, Future]
_files: dict[str, GgufFile] = {}  # until somebody opens them
_opening: list[Thread] = []
_usual_s = sys.getswitchinterval()


def begin(words: list[str]) -> None:
    """Begin with the models that a command line names, the target first. Returns at once."""
    given = {"--model": "", "--draft-model": "", "--dtype": "auto"}
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        given[option] = value if equals else following
    is_packed = given["--dtype"] in ("auto", "packed") and not os.path.exists("/dev/nvidiactl")
    if given["--model"] and is_packed and not given.keys() & _ELSE:
        sys.setswitchinterval(_SWITCH_S)
        names = given["--model"], given["--draft-model"]
        _opening.append(Thread(target=_open, args=names, daemon=True))
        _opening[0].start()


def open_file(path: str) -> GgufFile:
    """A GGUF file, with what was laid out of it. Raises BadFile."""
    for thread in _opening:
        thread.join()
    return _files.pop(path, None) or GgufFile(path)


def end() -> None:
    """Give back what nobody has opened."""
    while _opening:
        _opening.pop().join()
        sys.setswitchinterval(_usual_s)
    while _files:
        _files.popitem()[1].close()


def _open(target: str, draft: str) -> None:
    """Open the files that are on this machine, and let threads work on their matrices."""
    with suppress(Exception):
        import kernels

        from .catalogue import on_disk

        kernels.load(compiles=False)
        jobs = deque[_Job]()
        for path in dict.fromkeys(on_disk(target, draft)):
            file = _files[path] = GgufFile(path)
            moved = _MOVED.get(file.metadata.get("general.architecture"), ())
            for tensor in sorted(file.tensors.values(), key=lambda tensor: -tensor.num_bytes):
                if tensor.form and len(tensor.shape) == 2 and not tensor.name.endswith(moved):
                    made = file.ahead[tensor.name] = Future()
                    jobs.append((file, tensor, made))
        for _ in range(max(1, len(os.sched_getaffinity(0)) - 1)):  # the import has a core
            Thread(target=_work, args=(jobs,), daemon=True).start()


def _work(jobs: deque[_Job]) -> None:
    """Lay out one matrix after another, until there is none left or all are given back."""
    from kernels import lay_out

    while jobs:
        with suppress(IndexError):  # another thread was faster
            file, tensor, made = jobs.popleft()
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(lay_out(tensor.form, tensor.shape, file.rows(tensor, _PIECE)))
                except BaseException as error:
                    made.set_exception(error)
            made = None  # who works on the next one holds none
