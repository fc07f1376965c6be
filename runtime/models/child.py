"""A child process for work of strangers' making, which may ask for any time and memory.

A line of JSON is sent, and one comes back. The child ends by itself when its time is over, or when
we are gone. Only Linux bounds memory.
"""

import atexit
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MOST_BYTES = 512 << 20  # of memory, beside what the child takes at first
TOO_LONG = -signal.SIGPROF  # how a child ends whose time is over


class Child:
    """The child, which is started when it is first needed, and after it has ended."""

    def __init__(self, file: str, *hello: Any) -> None:
        """`file` is the child's program; its first line has the values of `hello`, if any."""
        self._lock, self.child, self._file, self._hello = threading.Lock(), None, file, hello
        atexit.register(self._end)

    def start(self) -> "subprocess.Popen[bytes]":
        """The child that runs. Until it is ready a second passes, for which nobody waits here."""
        if self.child is None or self.child.poll() is not None:
            self._end()  # its pipes are closed
            words = [sys.executable, "-P", self._file]  # -P: modules beside it are none of others
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            # In a separate session it gets no Ctrl-C, which is for us.
            self.child = subprocess.Popen(words, start_new_session=True, **pipes)
            if self._hello:
                self._send(_line(self._hello))
        return self.child

    def _send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):
            self.child.stdin.write(line)
            self.child.stdin.flush()

    def ask(self, *values: Any) -> Any:
        """What the child answers. Raises TimeoutError, or EOFError where it ended otherwise.

        Where it was killed it is asked once more: that may have come from outside.
        """
        line = _line(values)  # which fails, if at all, before there is anything to end
        for _ in range(2):
            with self._lock:
                child, answer = self.start(), b""
                try:
                    self._send(line)
                    with suppress(BrokenPipeError):
                        answer = child.stdout.readline()
                finally:
                    if not answer:  # nobody else may get what is still to come
                        self._end()
            if answer:
                return json.loads(answer)
            if child.returncode != -signal.SIGKILL:
                break
        raise TimeoutError if child.returncode == TOO_LONG else EOFError(str(child.returncode))

    def _end(self) -> None:
        if self.child is not None:
            self.child.kill()
            with suppress(BrokenPipeError), self.child:
                pass


def _line(values: Any) -> bytes:
    return json.dumps(values, default=str).encode() + b"\n"


def bound_memory() -> None:
    """In the child: let it take only so much more memory than it has now."""
    with suppress(OSError), open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(answer: Callable[..., Any]) -> None:
    """In the child: answer each line with what `answer` makes of its values."""
    while line := sys.stdin.buffer.readline():
        text = json.dumps(answer(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)  # which `answer` may have set
        print(text, flush=True)
