"""Serving the Flask app: access control, one error body for everything, and an orderly end."""

import ctypes
import gc
import hmac
import logging
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from math import inf
from typing import Any, NoReturn

from flask import Flask, Response, current_app, g, request
from werkzeug import Request
from werkzeug.datastructures import EnvironHeaders
from werkzeug.exceptions import HTTPException

from runtime.models.catalogue import abandon
from runtime.values import TOO_SLOW, Json, RequestError, engine_failure, in_short
from server.page import register_page

from .connection import MAX_ACCEPTED, MAX_BODY_BYTES, REFUSAL, WHEN_LEFT, Server
from .log import Progress, log_to_stderr, name_requests
from .options import Options
from .parsing import model_id
from .worker import Worker, unavailable

_OTHER_THREADS = 32  # beside those of requests that run or wait: they read, and refuse
_OTHER_CONNECTIONS = 448  # beside those that have a thread
_OTHER_FILES = 128 + MAX_ACCEPTED  # beside connections
_LAST_WORDS_S = 1.0  # to send what was finished in the grace period's last moment
_HANGUP = getattr(signal, "SIGHUP", None)  # which Windows has not
_OPEN = re.compile("/|/health|/page/.*|/prompts.*")  # paths that need no API key
LOG = logging.getLogger(__name__)


def base_app(options: Options) -> Flask:
    """An application without routes, and with all that every answer has in common."""
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.json.sort_keys = False
    app.url_map.merge_slashes = False  # /v1//models gets a 404: a redirect would be HTML
    name_requests(app)
    register_errors(app)

    @app.before_request
    def check() -> Response | None:
        """Refuse callers without access. Answer OPTIONS where other pages may call."""
        if refusal := request.environ.get(REFUSAL):
            raise refusal
        if WHEN_LEFT not in request.environ:  # the server has checked heads that it read
            check_head(options, request.environ)
        # A browser asks before it calls, and without a key.
        is_question = options.allow_origin and request.method == "OPTIONS"
        return Response(status=204) if is_question else None

    @app.after_request
    def add_headers(response: Response) -> Response:
        """Keep a browser from taking an answer for something else; say which pages may read it."""
        headers = response.headers
        headers["X-Content-Type-Options"] = "nosniff"
        headers.setdefault("Content-Security-Policy", "default-src 'none'")
        if options.allow_origin:  # CORS
            wanted = request.headers.get("Access-Control-Request-Headers")
            headers["Access-Control-Allow-Origin"] = options.allow_origin
            headers["Access-Control-Allow-Headers"] = wanted or "Authorization, Content-Type"
            headers["Access-Control-Allow-Methods"] = "GET, POST"
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Request-Id"
            response.vary.add("Origin")
        return response

    return app


def check_head(options: Options, environ: Json) -> None:
    """Raises RequestError for a request that is refused whatever its body says.

    Who asks needs the API key. Without one the server answers to its own names alone. A body has to
    be JSON, and not compressed.
    """
    asked = Request(environ, populate_request=False)
    if options.api_key is None:
        _check_host(options, asked.headers.get("Host", ""))
    elif asked.method != "OPTIONS" and not _OPEN.fullmatch(asked.path):
        _check_key(options.api_key, asked.headers)
    has_body = asked.content_length or "Transfer-Encoding" in asked.headers
    if asked.method != "POST" or not has_body:
        return
    if not asked.is_json:
        raise RequestError("the Content-Type must be application/json", status=415)
    if asked.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("a compressed body is not supported", status=415)


def _check_host(options: Options, host: str) -> None:
    """Without a key a page elsewhere must not call under a name that it made point to us.

    Such a page's browser sends that name (DNS rebinding). HTTP/1.0 may send none; no browser does.
    """
    name = re.sub(r":\d*$", "", host).lower()
    if {name, "*"} & {"", "localhost", options.host.lower(), *map(str.lower, options.allowed_host)}:
        return
    try:
        ip_address(name.strip("[]"))  # an address points where it says
    except ValueError:
        why = f"this server does not go by the name {in_short(name)[:100]}"
        hint = "start it with --allowed-host NAME, or with an API key"
        raise RequestError(f"{why}: {hint}", status=403, code="unknown_host") from None


def _check_key(expected: str, headers: EnvironHeaders) -> None:
    """Either header may have the key: Anthropic's clients send X-Api-Key."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    given = key if scheme.lower() == "bearer" else "", headers.get("X-Api-Key", "")
    # WSGI hands bytes over as Latin-1, whatever they are.
    if not any([hmac.compare_digest(k.encode("latin-1"), expected.encode()) for k in given]):
        how = "Authorization: Bearer KEY, or as X-Api-Key: KEY"
        raise RequestError(f"give the API key as {how}", status=401, code="invalid_api_key")


def body_of(error: RequestError) -> Json:
    """The body of an answer that is an error, in the form that clients of the route expect.

    A dialect with a form of its own adds it to the application's `error_forms`, by its path.
    """
    form = current_app.extensions["error_forms"].get(request.path, RequestError.body)
    return form(error)


def register_errors(app: Flask) -> None:
    """Answer every error with {"error": {…}}: never HTML, never a traceback."""
    app.extensions["error_forms"] = {}

    @app.errorhandler(RequestError)
    def refuse(error: RequestError) -> tuple[Json, int, dict[str, str]]:
        may_pass = error.status in (429, 503) and error.code != TOO_SLOW
        headers = {"Retry-After": "1"} if may_pass else {}
        headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        g.error = error.code or error.param
        return body_of(error), error.status, headers

    @app.errorhandler(HTTPException)
    def refuse_http(error: HTTPException) -> tuple[Json, int, dict[str, str]]:
        """Answer what Flask refuses: an unknown path, a wrong method, a body that is too large."""
        status, what = error.code or 500, error.description or error.name
        if allowed := getattr(error, "valid_methods", None):
            needed = sorted({*allowed} - {"HEAD", "OPTIONS"})
            what = f"{request.path[:80]} needs {' or '.join(needed)}"
        body = body_of(RequestError(what, status=status))
        return body, status, {"Allow": ", ".join(allowed)} if allowed else {}

    @app.errorhandler(Exception)
    def fail(error: Exception) -> tuple[Json, int]:
        """Log any other error with its traceback, and answer 500."""
        LOG.exception("a request failed")
        g.error = type(error).__name__
        return body_of(engine_failure(error)), 500


def loading_app(options: Options, error_forms: Json) -> Flask:
    """Answers 503 to all but the page, which asks /health for the progress, and reloads itself."""
    app = base_app(options)
    app.extensions["error_forms"] |= error_forms
    register_page(app, {})
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


def wait_for(reports: "queue.SimpleQueue[Any]") -> Any:
    """Wait in the main thread until the queue has an item, and return it.

    A signal that comes just before the thread sleeps does not wake it, and its handler is called
    when the thread is awake again. So the thread wakes every second.
    """
    while True:
        with suppress(queue.Empty):
            return reports.get(timeout=1)


def serve(load: Callable[[], Flask], port: int, options: Options, error_forms: Json) -> NoReturn:
    """Serve what `load` makes until SIGTERM, SIGHUP or Ctrl-C; a second one ends it at once.

    The address is taken first, so that clients get a 503 while the model is loaded, in the form
    that `error_forms` has for their path. On the first signal what runs is finished, for
    `options.grace_period` seconds at most. The exit status is 1 if the server's thread has died.
    Raises OSError if the address is taken, ValueError if too few connections are possible, and what
    `load` raises.
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
    loading, check = loading_app(options, error_forms), partial(check_head, options)
    server = Server(loading, check, options.host, port, num_threads, num_connections)
    server.start(at_end=lambda: ends.put(None))
    url = url_of(options.host, port)
    _say(f"loading {options.title}: {url} shows the progress, and all else answers 503 until then")
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


def url_of(host: str, port: int) -> str:
    """A server's URL. Example: ::1, 5000 -> http://[::1]:5000."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    if waited_for := worker.num_running + worker.num_waiting:
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
    abandon()
    os._exit(status)
