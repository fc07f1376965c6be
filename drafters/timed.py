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
from typing import Any

from messages import Draft

from .base import Drafter


class _Interrupt(BaseException):
    """Ends a call that takes too long. It is no Exception, because drafters may catch those."""


def line_of(error: BaseException, file: str) -> str:
    """Where somebody's file failed: the last line of it that ran. Empty if none did.

    Example: " (mine.py, line 12)".
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({file}, line {frames[-1].lineno})" if frames else ""


class TimedDrafter(Drafter):
    """`inner`, called in one thread of its own.

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

    def line_of(self, error: Exception) -> str:
        """Where the drafter failed; what it returned is the affair of its `propose`."""
        code = type(self._inner).propose.__code__
        place = line_of(error, sys.modules[type(self._inner).__module__].__file__ or "")
        is_late = isinstance(error, TimeoutError)
        return place or ("" if is_late else f" ({code.co_filename}, line {code.co_firstlineno})")

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
                raise TimeoutError("still busy with an earlier call")
            self._start()
            while self._unclosed and not self._is_hanging:
                with suppress(Exception):  # another request's affair
                    self._call(self._inner.close, self._unclosed.pop())
        future: Future[Any] = Future()
        self._calls.put((future, method, arguments))
        try:
            return future.result(self._limit_s)
        except TimeoutError as error:
            if future.done():  # the drafter's own
                raise
            self._is_hanging = True
            frame = sys._current_frames().get(self._thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame else ""
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupt))
            self._calls.put(None)  # its thread ends when it can
            message = f"{method.__name__} did not return within {self._limit_s:g} s"
            late = TimeoutError(message)
            late.add_note(f"It was here:\n{where}")
            raise late from error


def _serve(calls: "queue.SimpleQueue[Any]") -> None:
    """Make the calls, until there is None: then one of them took too long."""
    with suppress(_Interrupt):  # what ends a loop may come when it has just ended
        while (call := calls.get()) is not None:
            future, method, arguments = call
            try:
                future.set_result(method(*arguments))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # sys.exit() in a drafter ends nothing else
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
