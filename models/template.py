"""A process that writes conversations as texts, with bounds of time and memory.

    renderer.render(limit_s, chat_template=…, conversations=[turns], …) → text

A chat template is code that comes with a model, and one operation of it may ask for any time and
memory. So it runs in a child, which transformers' own function renders in. The child ends itself
when the time is over, and ends when this process does. A line of JSON is sent, and one comes back.

Elsewhere than on Linux memory is not bounded.
"""

import atexit
import json
import os
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
    """The child, which is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by process: forks share none

    def start(self) -> "subprocess.Popen[bytes]":
        """The child that runs. Its start takes a second, for which nobody waits here."""
        child = self._children.get(os.getpid())
        if child is None or child.poll() is not None:
            # In a session of its own it gets no Ctrl-C, which is for us.
            child = self._children[os.getpid()] = subprocess.Popen(
                [sys.executable, "-P", __file__],  # -P: modules beside it are none of others
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            atexit.register(_end, child)
        return child

    def render(self, limit_s: float, **asked: Any) -> str:
        """What transformers' render_jinja_template makes of `asked`.

        Raises TimeoutError, OSError where no process can be started, and ValueError for whatever
        the template raises.
        """
        line = json.dumps(asked | {"limit_s": limit_s}, default=str).encode() + b"\n"
        with self._lock:
            child = self.start()
            answer = b""
            try:
                with suppress(BrokenPipeError):
                    child.stdin.write(line)
                    child.stdin.flush()
                    answer = child.stdout.readline()
            finally:
                if not answer.endswith(b"}\n"):  # nobody else may get what is still to come
                    _end(child)
        if child.returncode == -signal.SIGALRM:
            raise TimeoutError
        if not answer:
            raise ValueError(f"its process ended with status {child.returncode}")
        text, why = json.loads(answer).values()
        if why is not None:
            raise ValueError(why)
        return text


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    with suppress(BrokenPipeError), child:
        pass


renderer = Renderer()


def _render(asked: dict[str, Any]) -> dict[str, str | None]:
    """The text, or why there is none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        ((text,), _) = render_jinja_template(**asked)
        why = None if len(text) <= _MOST_CHARACTERS else f"it writes {len(text)} characters"
    except MemoryError:
        why = f"it needs more than {_MOST_BYTES >> 20} MiB of memory"
    except Exception as error:  # templates raise what they like, about roles and their order
        why = str(error)[:1000]
    return {"text": None if why else text, "why": why}


def _main() -> None:
    import transformers.utils.chat_template_utils  # noqa: F401  (before there is a limit)

    with suppress(OSError):
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process within any operation
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, asked.pop("limit_s"))
        answer = json.dumps(_render(asked))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    _main()
