"""Serving on a network that means harm, from the first moment of loading to an orderly end."""

import ctypes
import gc
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NoReturn

from flask import Flask, request

from runtime import plug

from .http import base_app, check_head, url_of
from .log import Progress, log_to_stderr
from .options import Options
from .parsing import model_id
from .sockets import MAX_ACCEPTED, Server
from .start import wait_for
from .worker import Worker, unavailable

_OTHER_THREADS = 32  # beside those of requests that run or wait: they read, and refuse
_OTHER_CONNECTIONS = 448  # beside those that have a thread
_OTHER_FILES = 128 + MAX_ACCEPTED  # beside connections
_LAST_WORDS_S = 1.0  # to send what was finished in the grace period's last moment
_HANGUP = getattr(signal, "SIGHUP", None)  # which Windows has not


def loading_app(options: Options) -> Flask:
    """Answers 503 to all but the page, which asks /health for the progress, and reloads itself."""
    app = base_app(options)
    if dialects := plug("server.dialects"):
        app.extensions["error_forms"] |= dialects.ERROR_FORMS
    if page := plug("server.page"):
        page.register_page(app, {})
    progress = Progress()
    body = {"status": "loading", "model": model_id(options.title)}
    app.add_url_rule("/health", view_func=lambda: (body | progress.as_dict(), 503))

    @app.before_request
    def refuse() -> None:
        if request.path not in ("/", "/health") and not request.path.startswith("/page/"):
            raise unavailable("the model is being loaded")

    return app


def room_for(options: Options) -> tuple[int, int]:
    """How many threads may answer, and how many connections may be open.

    A request that runs or waits has a thread. Raises this process's limit of open files if need be,
    and ValueError if fewer connections are possible than there are threads.
    """
    needed = options.max_running + options.max_queued + _OTHER_THREADS
    room = needed + _OTHER_CONNECTIONS
    with suppress(ImportError, ValueError, OSError):  # elsewhere than on Unix there is no limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < room + _OTHER_FILES:
            most = inf if hard == resource.RLIM_INFINITY else hard
            room = min(room, most - _OTHER_FILES)
            resource.setrlimit(resource.RLIMIT_NOFILE, (room + _OTHER_FILES, hard))
    if needed > room:
        why = f"--max-running and --max-queued ask for {needed} connections, and {max(0, room)}"
        raise ValueError(f"{why} are possible here (ulimit -n sets how many files may be open)")
    return needed, room


def serve(load: Callable[[], Flask], port: int, options: Options) -> NoReturn:
    """Serve what `load` makes until SIGTERM, SIGHUP or Ctrl-C; a second (no SIGHUP) ends it.

    The address is taken first, so that clients get a 503 while the model is loaded. On the first
    signal what runs is finished, for `options.grace_period` seconds at most. The exit status is 1
    if the server's thread has died. Raises OSError if the address is taken, ValueError if too few
    connections are possible, and what `load` raises.
    """
    num_threads, num_connections = room_for(options)
    # Its `put` may be called by a handler of signals: an Event's lock could be held at that moment.
    ends: queue.SimpleQueue[None] = queue.SimpleQueue()
    is_loading = True

    def stop(*_: Any) -> None:
        _handle_signals(_quit, signal.SIG_IGN)  # a terminal that closes sends several hang-ups
        ends.put(None)
        if is_loading:
            _end(flush_log)

    # Have all threads take memory from two places: what one gives back, another can use. With a
    # place for each thread, as glibc has it, memory grows for ten thousands of requests.
    _ask_glibc("mallopt", -8, 2)  # M_ARENA_MAX
    flush_log = log_to_stderr()
    _handle_signals(stop, stop)
    loading, check = loading_app(options), partial(check_head, options)
    server = Server(loading, check, options.host, port, num_threads, num_connections)
    server.start(at_end=lambda: ends.put(None))
    url = url_of(options.host, port)
    progress = url if plug("server.page") else f"{url}/health"
    _say(f"loading {options.title}: {progress} shows how far it is, and all else answers 503")
    try:
        server.app = app = load()
    finally:
        flush_log()  # an error in loading is printed after the lines of the log
    gc.collect()
    gc.freeze()  # what is loaded stays: looking through it for garbage would hold up all for 0.3 s
    _ask_glibc("malloc_trim", 0)  # what only loading needed goes back to the system
    is_loading = False
    _say(f"serving on {url}: open it in a browser, or send requests (POST /generate, /v1/…)")
    wait_for(ends)
    if not server.has_died:
        _drain(app.extensions["worker"], server, options.grace_period)
    _end(flush_log, int(server.has_died))


def _ask_glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc's memory; elsewhere than on Linux with glibc there is none."""
    with suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), function)(*arguments)


def _handle_signals(stop: Callable[..., None], at_hangup: Any) -> None:
    """Have what is sent to end a server call these."""
    # Also where a shell has started the job in the background, with SIGINT ignored.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if _HANGUP and signal.getsignal(_HANGUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(_HANGUP, at_hangup)


def _drain(worker: Worker, server: Server, grace_s: float) -> None:
    """Let answers be finished and sent."""
    deadline = time.monotonic() + grace_s
    if waited_for := worker.num_jobs:
        _say(f"finishing {waited_for} requests, {grace_s:g} s at most; again to quit at once")
    if cut_off := worker.drain(grace_s):
        _say(f"{cut_off} requests were cut off")
    while server.is_busy and time.monotonic() < deadline + _LAST_WORDS_S:
        time.sleep(0.02)


def _say(line: str) -> None:
    """Tell whoever reads stdout, if anybody does: the disk may be full, the terminal closed."""
    with suppress(OSError, ValueError):
        print(line, flush=True)


def _end(flush_log: Callable[[], bool], status: int = 0) -> NoReturn:
    """End the process. Python's own exit would wait for threads, or end one inside torch."""
    # While a thread waits for somebody to read the log, stderr is locked: flush would wait, too.
    for stream in (sys.stdout, sys.stderr) if flush_log() else (sys.stdout,):
        with suppress(OSError, ValueError):
            stream.flush()
    _quit(status=status)


def _quit(*_: Any, status: int = 1) -> NoReturn:
    """End the process at once: what a second signal does."""
    # A fetch may be under way, and so may the import of its module.
    getattr(sys.modules.get("runtime.models.fetch"), "abandon", lambda: None)()
    os._exit(status)
