"""The sockets of the server, the loop that reads them, and the threads that answer.

    server = Server(app, check, "127.0.0.1", 5000, num_threads=80, max_connections=1000)
    server.start(at_end=ended.set)

What goes through a connection, and how long it may take, is connection.py's to say.
"""

import asyncio
import errno
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from runtime.models.startup import keep_standard_files
from runtime.values import Json, in_short

from .connection import LOG, MAX_HELD_BYTES, Connection, State

MAX_ACCEPTED = 256  # connections that asyncio accepts in one go, each of them an open file
_MAX_ALL_UNREAD_BYTES = 256 << 20
_NUM_READY = 32  # threads that begin with the server; others when they are needed


def _threads(name: str, number: int) -> ThreadPoolExecutor:
    """A pool whose first threads begin now: amid a burst, the loop would wait for their turns."""
    pool, together = ThreadPoolExecutor(number, name), threading.Barrier(min(number, _NUM_READY))
    for _ in range(together.parties):
        pool.submit(together.wait)
    return pool


class _Selector(selectors.DefaultSelector):
    """Opens what a drafter closes of the standard descriptors, before a connection is accepted.

    A connection with the number 2 would be sent the log, and closed by whoever closes stderr again.
    """

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(timeout)
        with suppress(OSError):  # where no file can be opened, there is no connection either
            keep_standard_files()
        return events


class Server:
    """One loop, and all connections.

    `check(environ)` raises RequestError for what is to be refused before its body is read.
    """

    def __init__(
        self, app: Callable[..., Any], check: Callable[[Json], None], host: str, port: int,
        num_threads: int, max_connections: int,
    ) -> None:  # fmt: skip
        """Take the address. Raises OSError, a sentence, if it cannot be had."""
        self.app, self.check = app, check
        self.has_died = False
        self.connections: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}  # without a whole request, oldest first
        self.num_held = 0  # bytes of bodies that are not complete
        self.environ = {
            "SERVER_NAME": host,
            "SERVER_PORT": str(port),
            "SCRIPT_NAME": "",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        self._max_connections = max_connections
        self._said_at = 0.0
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_called = False  # whether the loop is going to carry them out
        self._loop = asyncio.SelectorEventLoop(_Selector())
        self._loop.set_exception_handler(self._tell)
        listening = self._loop.create_server(
            lambda: Connection(self), host, port, backlog=MAX_ACCEPTED
        )
        try:
            self._listener = self._loop.run_until_complete(listening)
        except (OSError, ValueError) as error:  # the latter for a host that is none
            self._loop.close()
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else getattr(error, "strerror", error)
            hint = " (give another --port)" if number == errno.EADDRINUSE else ""
            raise OSError(f"cannot listen on {host}:{port}: {reason}{hint}") from error
        # By whether work is quick: /health, above all, never waits behind requests that generate.
        self.threads = {True: _threads("quick", 8), False: _threads("answer", num_threads)}

    def start(self, at_end: Callable[[], None]) -> None:
        """Serve, in a thread, while the process lives; `at_end` is called if a fault ends that."""

        def run() -> None:
            try:
                self._watch()
                self._loop.run_forever()
            except BaseException:
                LOG.exception("the HTTP side has died")
                self.has_died = True
            at_end()

        threading.Thread(target=run, name="http", daemon=True).start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the loop call it, in order. From any thread.

        The loop is woken once for all calls that arrive before it runs: each wake-up is a system
        call, at which a thread yields the processor to the others.
        """
        self._calls.append((function, arguments))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop has ended, and runs no more calls
                self._loop.call_soon_threadsafe(self._carry_out)

    def _carry_out(self) -> None:
        self._is_called = False  # before it looks: what comes from now on calls again
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            self._loop.call_soon(function, *arguments)

    @property
    def num_asked(self) -> int:
        """Bytes of bodies that are being answered."""
        return sum(connection.num_asked for connection in self.connections)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is not finished, or not sent."""
        return any(c.state is State.ANSWER or c.num_unread for c in list(self.connections))

    # ------------------------------------------------------- connections, and the room for them

    def admit(self, connection: Connection) -> None:
        """Count a new connection; where there are too many, the oldest that waits has to go."""
        self.connections.add(connection)
        if len(self.connections) > self._max_connections:
            oldest = next(iter(self.waiting))  # of the new one and others
            self._close(next((c for c in self.waiting if not c.num_unread), oldest))

    def note(self, connection: Connection, is_waiting: bool) -> None:
        """Whether the connection waits for its client: then it may be closed for another."""
        if is_waiting:
            self.waiting.setdefault(connection)
        else:
            self.waiting.pop(connection, None)

    def hold(self, num_bytes: int) -> None:
        """Count the bytes of incomplete bodies. Beyond the limit the oldest of these has to go."""
        self.num_held += num_bytes
        if num_bytes > 0 and self.num_held > MAX_HELD_BYTES:
            self._close(next(c for c in self.waiting if c.body))

    def _close(self, connection: Connection) -> None:
        """Close it and forget it now; connection_lost comes in a later turn of the loop."""
        connection.abort()
        connection.drop_body()
        self.forget(connection)

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self.connections.discard(connection)
        self.waiting.pop(connection, None)

    def _watch(self) -> None:
        """End the connections that take too long, every second."""
        self._loop.call_later(1, self._watch)
        now = time.monotonic()
        for connection in list(self.connections):
            try:
                connection.watch(now)
            except Exception:  # no thread can be started, say
                LOG.exception("a connection is given up")
                connection.abort()
        if sum(c.num_unread for c in self.connections) > _MAX_ALL_UNREAD_BYTES:
            max(self.connections, key=lambda c: c.num_unread).abort()

    def _tell(self, loop: Any, context: Json) -> None:
        """Log what asyncio reports, such as too many open files: a line a second at most."""
        now = time.monotonic()
        if now - self._said_at >= 1:
            self._said_at = now
            why = context.get("exception")
            is_ours = why is not None and not isinstance(why, OSError)
            said = context["message"] + (f": {in_short(why)}" if why else "")
            LOG.warning("the HTTP side: %s", said, exc_info=why if is_ours else None)
