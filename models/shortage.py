"""Too little memory, or too few threads, is one line and exit 2, not a traceback.

Importing torch may take more memory than there is. So the core imports this file before torch. It
also keeps other libraries from starting more threads, and Python from looking for garbage
too often. Signals end the process well from here on.
"""

import gc
import os
import signal
import sys
from types import TracebackType

_SIGNS = (
    "allocate memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",  # of a library
    "out of memory",
)


def is_shortage(error: BaseException) -> bool:
    """Whether there was too little memory or no thread left, and no fault of the program."""
    kinds = MemoryError, SystemError  # the latter where Python had no memory to raise the former
    return isinstance(error, kinds) or any(sign in str(error) for sign in _SIGNS)


def report_shortage(error: BaseException) -> int:
    """Print the last line of the error's message. Returns the exit status."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
    tell_error(f"too little memory, or too few threads: {reason[:300]}")
    return 2


def tell_error(reason: str) -> None:
    """One line on stderr, written at once: the server's log may be written at the same time."""
    print(f"error: {reason}\n", end="", file=sys.stderr)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: handles what ends the process, mostly an import that failed."""
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130)
    if is_shortage(error):
        raise SystemExit(report_shortage(error))
    sys.__excepthook__(kind, error, trace)


def _interrupted(*_: object) -> None:
    try:
        os.write(2, b"interrupted\n")  # a print may be under way
    finally:
        os._exit(130)


def raise_interrupts() -> None:
    """Let Ctrl-C raise a KeyboardInterrupt from here on, where it ended the process so far."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


sys.excepthook = _hook
# Until a command runs a signal ends it at once, in good order. torch is imported for seconds, and
# an exception could be lost there (in a __del__).
if sys.argv[0].endswith(".py") and any(word.startswith("--port") for word in sys.argv[1:]):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
elif sys.argv[0].endswith(("08_speculative_decoding.py", "-m")):  # -m: a benchmark's package
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, say
        signal.signal(signal.SIGINT, _interrupted)
# torch's threads occupy the cores. Those of numpy and tokenizers would take turns with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch and transformers make 600,000 objects that stay. Python would look through them again and
# again while it imports, for an eighth of that time.
gc.set_threshold(10_000)

# Last, as from here on an import may fail for lack of memory.
from . import ahead  # noqa: E402

if sys.argv[0].endswith("08_speculative_decoding.py"):
    ahead.begin(sys.argv[1:])
from . import lean  # noqa: E402, F401
