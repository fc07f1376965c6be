"""A child that writes conversations as texts, with bounds of time and memory.

A chat template is code that comes with a model, and one operation of it may ask for any time and
memory. In the child a function of transformers renders it. A line of JSON is sent, and one comes
back. The child ends by itself when the time is over, or we are gone. Only Linux bounds memory.
"""

import atexit
import json
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

_MOST_BYTES = 512 << 20  # of memory, beside what the child takes at first
_MOST_CHARACTERS = 1 << 24


class Renderer:
    """The child, which is started when it is first needed, and after it has ended."""

    def __init__(self) -> None:
        self._lock, self.child = threading.Lock(), None
        atexit.register(self._end)

    def start(self) -> "subprocess.Popen[bytes]":
        """The child that runs. Until it is ready a second passes, for which nobody waits here."""
        if self.child is None or self.child.poll() is not None:
            self._end()  # its pipes are closed
            words = [sys.executable, "-P", __file__]  # -P: modules beside it are none of others
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            # In a separate session it gets no Ctrl-C, which is for us.
            self.child = subprocess.Popen(words, start_new_session=True, **pipes)
        return self.child

    def render(self, limit_s: float, **asked: Any) -> str:
        """What transformers' render_jinja_template makes of `asked`.

        Raises ValueError for whatever the template does instead: "took longer than 5 s".
        """
        line = json.dumps([limit_s, asked], default=str).encode() + b"\n"
        with self._lock:
            child, answer = self.start(), b""
            try:
                with suppress(BrokenPipeError):
                    child.stdin.write(line)
                    child.stdin.flush()
                    answer = child.stdout.readline()
            finally:
                if not answer:  # nobody else may get what is still to come
                    self._end()
        if child.returncode == -signal.SIGALRM:
            raise ValueError(f"took longer than {limit_s:g} s")
        text, why = json.loads(answer or f'["", "ended its process: {child.returncode}"]')
        if why:
            raise ValueError(why)
        return text

    def _end(self) -> None:
        if self.child is not None:
            self.child.kill()
            with suppress(BrokenPipeError), self.child:
                pass


def _main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    with suppress(OSError), open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process within any operation
    while line := sys.stdin.buffer.readline():
        limit_s, asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        text, why = "", None
        try:
            ((text,), _) = render_jinja_template(**asked)
        except MemoryError:
            why = f"needs more than {_MOST_BYTES >> 20} MiB of memory"
        except Exception as error:  # templates raise what they like, about roles and their order
            why = f"refused: {str(error)[:1000]}"
        if len(text) > _MOST_CHARACTERS:
            text, why = "", f"writes {len(text)} characters"
        answer = json.dumps([text, why])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)


renderer = Renderer()
if __name__ == "__main__":
    _main()
