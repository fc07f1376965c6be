"""Makes this machine look slow: to Python its clocks run faster, and its waits are shorter.

    SLOWER=4 PYTHONPATH=tests/slow_machine .venv/bin/python -m pytest

Python imports this file at its start, in the processes that tests start, too. What a clock decides
(a limit, a deadline, a rest) then comes as on a machine of a quarter of the speed. Not covered:
waits outside of Python, as for a socket.
"""

import os
import signal
import threading
import time

SLOWER = float(os.environ.get("SLOWER", "1"))
_wait, _sleep, _setitimer = threading.Condition.wait, time.sleep, signal.setitimer


def faster(clock):
    """The clock, from now on so many times as fast."""
    begin = clock()
    return lambda: begin + SLOWER * (clock() - begin)


def wait(self, timeout=None):
    return _wait(self, timeout if timeout is None else timeout / SLOWER)


if SLOWER != 1:
    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, faster(getattr(time, name)))
    threading.Condition.wait = wait
    time.sleep = lambda seconds: _sleep(seconds / SLOWER)
    signal.setitimer = lambda which, seconds, *more: _setitimer(which, seconds / SLOWER, *more)
