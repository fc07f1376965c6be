"""A quick start and a good end: the core imports this before torch, which takes seconds to import.

Too little memory, too few threads or Ctrl-C is one line and an exit status, not a traceback.
quick_import.py leaves out what transformers does not need, while ahead.py reads weights.
"""

import gc
import os
import signal
import sys
from types import TracebackType

from runtime import plug

_IS_COMMAND = sys.argv[0].endswith("speculative_decoding.py")
# Of too little memory, or no thread left, which are no faults of the program.
_SIGNS = "allocate memory", "bad_alloc", "can't start new thread", "out of memory", "map segment"


def print_error(reason: str) -> None:
    """One line on stderr, written at once: the server's log may be written at the same time."""
    print(f"error: {reason}\n", end="", file=sys.stderr)


def keep_standard_files() -> None:
    """Open what was closed at the start (`>&-`): no other file may get the number of stdout."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


def end_ahead() -> None:
    """Give back what was read ahead, if anything was, and nobody has opened."""
    if ahead := sys.modules.get("runtime.models.ahead"):
        ahead.end()


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: handles what ends the process, mostly an import that failed."""
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130)
    kinds = MemoryError, SystemError  # the latter where Python had no memory to raise the former
    if isinstance(error, kinds) or any(sign in str(error) for sign in _SIGNS):
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        print_error(f"too little memory, or too few threads: {reason[:300]}")
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)


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
plug("runtime.models.quick_import")
if not _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)
