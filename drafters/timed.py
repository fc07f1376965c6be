"""Somebody else's drafter with a limit to its time: it may hang, and the server must not.

    engine's thread                     the drafter's thread
    propose(…) ── call ───────────────→ inner.propose(…)
       ↓ waits, `limit_s` at most          ↓
    a draft ←──────────────── result ── or a Fault, and the request goes on without it

What a drafter makes may do anything where it is looked at. So its own thread looks at drafts and
errors, and makes plain copies of them. A state is only handed back to the drafter.

If a call takes too long, an exception is raised in its thread, which ends a loop in Python. A call
that blocks outside of Python (a socket, a kernel) cannot be ended. Until it returns, every further
call fails at once; afterwards the drafter works again. The limit costs two thread switches a call.
"""

import ctypes
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partialmethod
from inspect import getfile, unwrap
from types import FrameType
from typing import Any

import torch

from runtime.values import in_short

from .base import Drafter

# What torch computes by, of the process or the thread: how each is read, and how it is set.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
]
_END_S = 0.1  # until a loop in Python has ended


@contextmanager
def restoring_settings(changed: set[str]) -> Iterator[None]:
    """Restore torch's settings behind a drafter that changes them, as loaders of models do.

    The target and the other drafters compute by them, too. It costs some ten microseconds. What was
    restored is added to `changed` by name, such as "default dtype".
    """
    before = [read() for read, _ in _SETTINGS]
    try:
        yield
    finally:
        for known, (read, put) in zip(before, _SETTINGS, strict=True):
            if read() != known:
                put(known)
                changed.add(read.__name__.partition("_")[2].replace("_", " "))


class _Interrupt(BaseException):
    """Ends a call that takes too long. It is no Exception, because drafters may catch those."""


class Fault(Exception):
    """What went wrong with a drafter, in plain words; a note has the traceback, for the log."""

    places: Sequence[tuple[str, int]] = ()  # files and lines that ran, the innermost last

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """That of any error. Never raises, but it may take for ever."""
        fault = cls(in_short(error))
        with suppress(BaseException):
            fault.places = _places(traceback.walk_tb(error.__traceback__))
            fault.add_note("".join(traceback.format_exception(error)))
        return fault


def _places(frames: Iterable[tuple[FrameType, int]]) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in frames]


def line_of(error: Exception, file: str, *methods: Any) -> str:
    """Where somebody's file failed: the last line of it that ran, or else where a method begins.

    Of `methods` the first in this file counts. Example: " (mine.py, line 12)".
    """
    lines = [line for name, line in getattr(error, "places", ()) if name == file][-1:]
    codes = [getattr(unwrap(method), "__code__", None) for method in methods]
    lines += [code.co_firstlineno for code in codes if code and code.co_filename == file]
    return f" ({file}, line {lines[0]})" if lines else ""


class TimedDrafter(Drafter):
    """`inner`, called in one separate thread. Whatever goes wrong, and a late call, is a Fault."""

    is_from_file = True

    def __init__(self, inner: Drafter, limit_s: float) -> None:
        self._inner, self._limit_s, kind = inner, limit_s, type(inner)
        self.name = str.__str__(inner.name)  # type: ignore[misc]
        self.needs_hidden = bool(inner.needs_hidden)
        self.hidden_layers = tuple(map(int, inner.hidden_layers)) if self.needs_hidden else ()
        self.block_size = int(inner.block_size)
        self.num_step_weights, self._can_guess = int(inner.num_step_weights), inner.can_guess
        self.is_asked_alone = kind.propose_batch is Drafter.propose_batch
        self._file, self._begins = getfile(kind), dict[str, str]()  # where a method does
        for name in ("open", "propose_batch", "observe", "guess", "close"):
            names = name, "open" if name == "observe" else "propose"
            methods = [getattr(kind, each, None) for each in names]
            self._begins[name] = line_of(Fault(""), self._file, *methods)
        self._unclosed: list[Any] = []  # states, until the drafter can be spoken to again
        self.changed_settings = set[str]()  # of torch, which were restored
        self._start()

    def _start(self) -> None:
        self._is_hanging = False
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        given, name = (self._inner, self._calls, self.changed_settings), f"drafter {self.name}"
        # A daemon: a drafter that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=_serve, args=given, name=name, daemon=True)
        self._thread.start()

    def line_of(self, error: Exception, method: str) -> str:
        """Where the drafter failed in this method, or in one that the base class calls."""
        return line_of(error, self._file) or self._begins[method]

    @property
    def can_guess(self) -> bool:
        return self._can_guess

    def call(self, method: str, *arguments: Any, then: Callable[[Any], Any] | None = None) -> Any:
        """What `then` makes of what the drafter's method returns: its thread does both."""
        if method == "close" and self._is_hanging:
            self._unclosed += arguments
            return None
        if method == "observe":  # a copy: other drafters and the prefix cache have the same
            state, verdict = arguments
            hidden = None if verdict.hidden is None else verdict.hidden.clone()
            arguments = state, replace(verdict, tokens=[*verdict.tokens], hidden=hidden)
        if method in ("observe", "close"):
            then = id  # what it returns ends there
        if self._is_hanging:
            if self._thread.is_alive():
                raise self._late("still busy with an earlier call")
            self._start()
            while self._unclosed and not self._is_hanging:
                with suppress(Exception):  # another request's affair
                    self.close(self._unclosed.pop())
        future: Future[Any] = Future()
        self._calls.put((future, method, arguments, then))
        try:
            return future.result(self._limit_s)
        except TimeoutError:
            self._is_hanging = True
            late = self._late(f"a call took longer than {self._limit_s:g} s")
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupt))
            self._calls.put(None)  # its thread ends when it can
            self._thread.join(_END_S)  # mostly now, and the next text finds it free
            raise late from None

    open = partialmethod(call, "open")
    propose = partialmethod(call, "propose")
    observe = partialmethod(call, "observe")
    close = partialmethod(call, "close")
    guess = partialmethod(call, "guess")
    evidence = partialmethod(call, "evidence")

    def _late(self, message: str) -> Fault:
        """A fault with the place where the drafter's thread is now."""
        fault, frame = Fault(message), sys._current_frames().get(self._thread.ident or 0)
        fault.places = _places(traceback.walk_stack(frame))[::-1] if frame else ()
        fault.add_note("".join(f"  {file}, line {line}\n" for file, line in fault.places))
        return fault


def _serve(inner: Drafter, calls: "queue.SimpleQueue[Any]", changed: set[str]) -> None:
    """Make the calls, until there is None: then one of them took too long."""
    torch.set_num_threads(1)  # of this thread: a second pool would take the target's cores
    with suppress(_Interrupt):  # what ends a loop may come when it has just ended
        while (call := calls.get()) is not None:
            future, method, arguments, then = call
            try:
                act = restoring_settings(changed)(getattr(inner, method))
                future.set_result(then(act(*arguments)) if then else act(*arguments))
            except BaseException as error:  # sys.exit() in a drafter ends nothing else
                future.set_exception(Fault.of(error))
