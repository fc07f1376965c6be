"""A quick start and a good end: the core imports this before torch, which takes seconds to import.

Too little memory, too few threads or Ctrl-C is one line and an exit status, not a traceback. While
transformers is imported, what it brings for compiling and for training on several machines stays
out: a thousand modules, and more than a second. Meanwhile ahead.py reads weights.
"""

import functools
import gc
import importlib
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from runtime import plug

_IS_COMMAND = sys.argv[0].endswith("speculative_decoding.py")
_SIGNS = "allocate memory", "bad_alloc", "can't start new thread", "out of memory", "map segment"
_COMPILER = "torch._dynamo"
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"  # what transformers imports of it


def is_shortage(error: BaseException) -> bool:
    """Whether there was too little memory or no thread left, and no fault of the program."""
    kinds = MemoryError, SystemError  # the latter where Python had no memory to raise the former
    return isinstance(error, kinds) or any(sign in str(error) for sign in _SIGNS)


def report_shortage(error: BaseException) -> int:
    """Print the last line of the error's message. Returns the exit status."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    print_error(f"too little memory, or too few threads: {reason[:300]}")
    return 2


def print_error(reason: str) -> None:
    """One line on stderr, written at once: the server's log may be written at the same time."""
    print(f"error: {reason}\n", end="", file=sys.stderr)


def end_ahead() -> None:
    """Give back what was read ahead, if anything was, and nobody has opened."""
    if ahead := sys.modules.get("runtime.models.ahead"):
        ahead.end()


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: handles what ends the process, mostly an import that failed."""
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130)
    if is_shortage(error):
        raise SystemExit(report_shortage(error))
    sys.__excepthook__(kind, error, trace)


class _Compiler(ModuleType):
    """Stands for torch's compiler, until anything else than to mark functions is asked of it.

    An import of a part of the compiler comes here, too: first the compiler itself is imported.
    """

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """The function itself, from a decorator with arguments or without."""
        return function if callable(function) else _Compiler.disable

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "find_", "invalidate_")):  # what importlib asks of finders, too
            raise AttributeError(name)
        return getattr(self.create_module(ModuleSpec(_COMPILER, None)), name)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_part = name.startswith(f"{_COMPILER}.") and name != _ALONE
        return ModuleSpec(name, self) if is_part else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
            sys.meta_path.remove(self)
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module was run when it was imported."""


def _cached(*given: Any, **options: Any) -> Any:
    """lru_cache. transformers reads the names in its 2,600 files once, and no lines before them."""
    if not given or getattr(given[0], "__name__", "") != "create_import_structure_from_path":
        return lru_cache(*given, **options)
    names = given[0].__globals__
    usual = names["fetch__all__"]
    names["fetch__all__"] = lambda text: usual(text[text.rfind("\n__all__") + 1 :])
    return lru_cache(None)(given[0])


sys.excepthook = _hook  # an import may fail for lack of memory
# Until a command runs, a signal ends the process at once: an exception could be lost in an import.
if any(word.startswith("--port") for word in sys.argv[1:]) and sys.argv[0].endswith(".py"):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# torch's threads occupy the cores. Those of numpy and tokenizers would take turns with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
gc.set_threshold(10_000)  # the imports make 600,000 objects, which stay
if _IS_COMMAND and (ahead := plug("runtime.models.ahead")):
    ahead.begin(sys.argv[1:])
if "transformers" not in sys.modules and _COMPILER not in sys.modules:
    import torch.distributed

    sys.meta_path.insert(0, compiler := _Compiler(_COMPILER))
    compiler.__path__ = [f"{torch.__path__[0]}/_dynamo"]
    sys.modules[_COMPILER] = compiler
    is_available, lru_cache = torch.distributed.is_available, functools.lru_cache
    torch.distributed.is_available, functools.lru_cache = lambda: False, _cached
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401

    torch.distributed.is_available, functools.lru_cache = is_available, lru_cache
if not _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)
