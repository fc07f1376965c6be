"""Somebody else's drafter with a limit to its time: it may hang, and the server must not.

    engine's thread                     the drafter's thread
    propose(…) ── call ───────────────→ inner.propose(…)
       ↓ waits, `limit_s` at most          ↓
    a draft ←──────────────── result ── or TimeoutError, and the request goes on without it

If a call takes too long, an exception is raised in its thread, which ends a loop in Python. A call
that blocks outside of Python (a socket, a kernel) cannot be ended. Until it returns, every further
call fails at once; afterwards the drafter works again. The limit costs two thread switches a call.
"""

import ctypes
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from inspect import getfile, unwrap
from types import TracebackType
from typing import Any

import torch

from messages import Draft

from .base import Drafter, restoring_settings


class _Interrupt(BaseException):
    """Ends a call that takes too long. It is no Exception, because drafters may catch those."""


def line_of(error: BaseException, file: str, *methods: Any) -> str:
    """Where somebody's file failed: the last line of it that ran, or else where a method begins.

    Of `methods` the first in this file counts. Example: " (mine.py, line 12)".
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file][-1:]
    codes = [getattr(unwrap(method), "__code__", None) for method in methods]
    lines += [code.co_firstlineno for code in codes if code and code.co_filename == file]
    return f" ({file}, line {lines[0]})" if lines else ""


class TimedDrafter(Drafter):
    """`inner`, called in one separate thread.

    Raises TimeoutError when a call is late, and RuntimeError when the drafter wants to exit.
    """

    def __init__(self, inner: Drafter, limit_s: float) -> None:
        self._inner, self._limit_s = inner, limit_s
        self.name, self.needs_hidden = inner.name, inner.needs_hidden  # type: ignore[misc]
        self.hidden_layers, self.drafts_at_once = inner.hidden_layers, inner.drafts_at_once
        self.num_step_weights = getattr(inner, "num_step_weights", 0)
        for name in ("open", "propose_batch", "observe", "guess", "evidence"):
            if hasattr(inner, name):
                setattr(self, name, partial(self._call, getattr(inner, name)))
        self._unclosed: list[Any] = []  # states, until the drafter can be spoken to again
        self._start()

    def _start(self) -> None:
        self._is_hanging = False
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        serve, name = partial(_serve, self._calls), f"drafter {self.name}"
        # A daemon: a drafter that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        self._thread.start()

    def line_of(self, error: Exception, name: str) -> str:
        """Where the drafter failed in its method `name`, or in one that the base class calls."""
        kind, other = type(self._inner), "open" if name == "observe" else "propose"
        return line_of(error, getfile(kind), *(getattr(kind, n, None) for n in (name, other)))

    def propose(self, state: Any, max_tokens: int) -> Draft:
        return self._call(self._inner.propose, state, max_tokens)

    def close(self, state: Any) -> None:
        if self._is_hanging:
            self._unclosed.append(state)
        else:
            self._call(self._inner.close, state)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_hanging:
            if self._thread.is_alive():
                raise self._late("still busy with an earlier call")
            self._start()
            while self._unclosed and not self._is_hanging:
                with suppress(Exception):  # another request's affair
                    self._call(self._inner.close, self._unclosed.pop())
        future: Future[Any] = Future()
        self._calls.put((future, method, arguments))
        try:
            return future.result(self._limit_s)
        except TimeoutError as error:
            if future.done():  # raised by the drafter itself
                raise
            self._is_hanging = True
            late = self._late(f"a call took longer than {self._limit_s:g} s (--drafter-timeout)")
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupt))
            self._calls.put(None)  # its thread ends when it can
            raise late from error

    def _late(self, message: str) -> TimeoutError:
        """An error with the traceback of where the drafter's thread is now."""
        frame, where = sys._current_frames().get(self._thread.ident or 0), None
        while frame:
            where = TracebackType(where, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        return TimeoutError(message).with_traceback(where)


def _serve(calls: "queue.SimpleQueue[Any]") -> None:
    """Make the calls, until there is None: then one of them took too long."""
    torch.set_num_threads(1)  # of this thread: a second pool would take the target's cores
    with suppress(_Interrupt):  # what ends a loop may come when it has just ended
        while (call := calls.get()) is not None:
            future, method, arguments = call
            try:
                future.set_result(restoring_settings()(method)(*arguments))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # sys.exit() in a drafter ends nothing else
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
