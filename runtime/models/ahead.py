"""Lays out the matrices of GGUF files in panels while torch and transformers are imported.

    begin  →  threads open the files and lay out  →  open_file, GgufFile.panels  →  end

An import takes seconds on one core, and reading needs neither of the two. Whether a file's matrices
are used as they are is decided later: what nobody asks for is given back when its file is closed.
An error here is no error: who opens the file, or reads the matrix, meets it again.
"""

import os
import re
import sys
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise

from .gguf_file import FORMS, GgufFile, Tensor

# How long a thread waits at most for the import's.
_SWITCH_S, _USUAL_S = 0.0005, sys.getswitchinterval()
_ELSE = {"-h", "--help", "--device", "--engine", "--no-kernels"}
# Tensors whose rows llama.cpp has put into another order, by family.
_MOVED = {"llama": ("attn_q.weight", "attn_k.weight")}
_LAYER = re.compile(r"blk\.\d+|.*", re.DOTALL)  # in a tensor's name
_files: dict[str, GgufFile] = {}  # until somebody opens them
_begun: dict[ThreadPoolExecutor, Future[None]] = {}


def begin(words: list[str]) -> None:
    """Begin with the models that a command line names, the target first. Returns at once."""
    given = {"--model": "", "--draft-model": "", "--dtype": "auto"}
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        given[option] = value if equals else following
    is_packed = given["--dtype"] in ("auto", "packed") and not os.path.exists("/dev/nvidiactl")
    if given["--model"] and is_packed and not given.keys() & _ELSE:
        sys.setswitchinterval(_SWITCH_S)
        pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1))  # the import has a core
        _begun[pool] = pool.submit(_open, pool, given["--model"], given["--draft-model"])


def open_file(path: str) -> GgufFile:
    """A GGUF file, with what was laid out of it. Raises BadFile."""
    wait(_begun.values())
    return _files.pop(path, None) or GgufFile(path)


def end() -> None:
    """Give back what nobody has opened."""
    wait(_begun.values())
    while _files:
        _files.popitem()[1].close()
    while _begun:
        _begun.popitem()[0].shutdown(wait=False, cancel_futures=True)
        sys.setswitchinterval(_USUAL_S)


def _open(pool: ThreadPoolExecutor, target: str, draft: str) -> None:
    """Open the files that are on this machine, and let threads work on their matrices."""
    with suppress(Exception):
        from runtime.kernels import load

        from . import catalogue, gguf_hub

        load(compiles=False)
        target, its_draft = catalogue.PAIRS.get(target, (target, ""))
        for name in dict.fromkeys((target, draft or its_draft)):
            path = gguf_hub.on_disk(name) if gguf_hub.is_named(name) else name
            file = _files[path] = GgufFile(path)
            moved = _MOVED.get(file.metadata.get("general.architecture"), ())
            # A task is a layer: after each one, a thread waits until the import's lets it go on.
            layers = defaultdict[tuple[int, str], list[Tensor]](list)
            for tensor in file.tensors.values():
                is_matrix = tensor.type.name in FORMS and len(tensor.shape) == 2
                if is_matrix and not tensor.name.endswith(moved):
                    layers[tensor.part, _LAYER.match(tensor.name)[0]].append(tensor)
            for tensors in sorted(layers.values(), key=lambda ts: -sum(t.num_bytes for t in ts)):
                made = pool.submit(file.lay_out, tensors)
                file.ahead |= dict.fromkeys((tensor.name for tensor in tensors), made)
