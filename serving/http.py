"""Serving the Flask app with waitress: one error body for everything, and an orderly end."""

import hmac
import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import waitress
from flask import Flask, Response, g, request
from waitress.channel import HTTPChannel
from waitress.task import ErrorTask
from werkzeug.exceptions import HTTPException

from .comparison import runs_to_compare
from .log import log_to_stderr, name_requests, note_refusal
from .page import register_page
from .parsing import RequestError, engine_failure, parse_json, parse_request
from .worker import Job, Worker, cancel, unavailable

_LAST_WORDS_S = 1.0  # to send what was finished in the grace period's last moment
_GUARDED = ("/generate", "/v1/", "/metrics")  # what an API key is needed for
LOG = logging.getLogger(__name__)


def read_body() -> dict[str, Any]:
    """The JSON object that was sent. Raises RequestError for anything else."""
    if not request.is_json:
        raise RequestError("the Content-Type must be application/json", status=415)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("a compressed body is not supported", status=415)
    return parse_json(request.get_data(cache=False))


def finish(jobs: list[Job]) -> bool:
    """Wait until all is done; False if the client has left meanwhile. Re-raises a job's error."""
    client_left = request.environ.get("waitress.client_disconnected", lambda: False)
    try:
        return not any(client_left() for _ in chain.from_iterable(jobs))
    finally:
        cancel(jobs)


def new_app(worker: Worker, options: Any, prompts: dict[str, str]) -> Flask:
    """An application with the page, and all that its routes have in common."""
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = 1 << 20
    app.json.sort_keys = False
    app.url_map.merge_slashes = False  # //generate is not found: a redirect would be HTML
    name_requests(app, options.log_prompts)
    register_errors(app)
    register_page(app, prompts)
    guard(app, options.api_key, options.allow_origin)
    app.extensions["worker"] = worker
    return app


def beginning(engine: Any, worker: Worker, options: Any) -> Callable[..., Any]:
    """What begins a request: parses its body, and queues it."""

    def begin(body: dict[str, Any]) -> tuple[list[Job], bool, list[str]]:
        """The request's jobs, whether to stream, and warnings."""
        wanted, stream, compare, notes = parse_request(body, engine, options)
        g.jobs = worker.submit(*(runs_to_compare(wanted) if compare else [wanted]))
        return g.jobs, stream, notes

    return begin


def guard(app: Flask, api_key: str | None, origin: str | None) -> None:
    """Ask for `Authorization: Bearer API_KEY`; let pages from `origin` call. None = off."""

    @app.before_request
    def check_key() -> Response | None:
        """Refuse a guarded path without the key. Answer OPTIONS where other pages may call."""
        if origin and request.method == "OPTIONS":
            return Response(status=204)  # a browser asks before it calls, and without a key
        if api_key is None or not request.path.startswith(_GUARDED):
            return None
        # WSGI hands bytes over as Latin-1, whatever they are.
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        is_key = hmac.compare_digest(given.encode("latin-1"), api_key.encode())
        if is_key and scheme.lower() == "bearer":
            return None
        raise RequestError(
            "give the API key as Authorization: Bearer KEY", status=401, code="invalid_api_key"
        )

    @app.after_request
    def allow_origin(response: Response) -> Response:
        """Tell a browser which pages may read the answer."""
        if origin:
            response.headers["Access-Control-Allow-Origin"] = origin
            wanted = request.headers.get("Access-Control-Request-Headers")
            response.headers["Access-Control-Allow-Headers"] = (
                wanted or "Authorization, Content-Type"
            )
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            response.headers["Access-Control-Expose-Headers"] = "Retry-After, X-Request-Id"
            response.vary.add("Origin")
        return response


def register_errors(app: Flask) -> None:
    """Answer every error with {"error": {…}}: never HTML, never a traceback."""

    @app.errorhandler(RequestError)
    def refuse(error: RequestError) -> tuple[dict[str, Any], int, dict[str, str]]:
        """Answer what we refuse ourselves, with the headers that belong to its status."""
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        g.error = error.code or error.param
        return error.body(), error.status, headers

    @app.errorhandler(HTTPException)
    def refuse_http(error: HTTPException) -> tuple[dict[str, Any], int, dict[str, str]]:
        """Answer what Flask refuses: an unknown path, a wrong method, a body that is too large."""
        status = error.code or 500
        allowed = getattr(error, "valid_methods", None)
        body = RequestError(error.description or error.name, status=status).body()
        return body, status, {"Allow": ", ".join(allowed)} if allowed else {}

    @app.errorhandler(Exception)
    def fail(error: Exception) -> tuple[dict[str, Any], int]:
        """Log any other error with its traceback, and answer 500."""
        LOG.exception("a request failed")
        g.error = type(error).__name__
        return engine_failure(error).body(), 500


class _Front:
    """The WSGI application that the socket has from the start: another one until all is loaded."""

    def __init__(self, app: Flask) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        return self.app(environ, start_response)


class _JsonErrorTask(ErrorTask):
    """What waitress itself refuses (malformed HTTP, say), in the one shape of errors."""

    def execute(self) -> None:
        """Write the answer. waitress calls this in the place of its own page of plain text."""
        error = self.request.error
        # Should the client leave now, waitress names the path, which a malformed request has not.
        self.request.path = getattr(self.request, "path", "")
        body = json.dumps(RequestError(error.body, status=error.code).body()).encode()
        self.status = f"{error.code} {error.reason}"
        name = secrets.token_hex(12)
        self.response_headers += [("Content-Type", "application/json"), ("X-Request-Id", name)]
        note_refusal(name, error.code)
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):
    error_task_class = _JsonErrorTask


def loading_app() -> Flask:
    """Answers 503 to everything."""
    app = Flask(__name__, static_folder=None)
    name_requests(app, with_text=False)
    register_errors(app)
    app.add_url_rule("/health", view_func=lambda: ({"status": "loading"}, 503))

    @app.before_request
    def refuse() -> None:
        """Let only /health through."""
        if request.path != "/health":
            raise unavailable("the model is being loaded")

    return app


def bind(app: Any, host: str, port: int, options: Any) -> tuple[Any, dict[int, Any]]:
    """waitress on the address: the server, and its sockets. Raises OSError if it is taken."""
    sockets: dict[int, Any] = {}
    try:
        server = waitress.create_server(
            app,
            map=sockets,
            host=host,
            port=port,
            # More threads than requests can run and wait, so that /health always finds one.
            threads=options.max_running + options.max_queued + 8,
            channel_request_lookahead=1,  # notices a client that leaves
            # Flask refuses from 1 MiB on; up to here a body is read first, as a client that is
            # still sending would not see the answer.
            max_request_body_size=64 << 20,
            # A client that does not read must not hold a thread: what it is sent waits in a file,
            # and the channel is closed 30 s after the answer's end.
            outbuf_high_watermark=1 << 40,
            channel_timeout=30,
            cleanup_interval=5,
            connection_limit=1000,
            ident=None,
        )
    except (OSError, ValueError) as error:  # the latter for a host that is none
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host}:{port}: {reason}") from error
    for listener in sockets.values():
        listener.channel_class = _Channel
    return server, sockets


def serve(load: Callable[[], Flask], host: str, port: int, options: Any) -> int:
    """Serve what `load` makes until SIGTERM or Ctrl-C; a second one ends it at once.

    The address is taken first, so that whoever asks meanwhile is told to wait. On the first signal
    what runs is finished, for `options.grace_period` seconds at most. Returns the exit status.
    Raises OSError if the address is taken, and what `load` raises.
    """
    stopping, loading = threading.Event(), loading_app()
    front = _Front(loading)

    def stop(*_: Any) -> None:
        """Handle a signal: the first one ends orderly, the second one at once."""
        if stopping.is_set():
            os._exit(1)
        stopping.set()
        if front.app is loading:
            raise SystemExit(0)

    flush_log = log_to_stderr()
    # Also where a shell has started the job in the background, with SIGINT ignored.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    server, sockets = bind(front, host, port, options)
    threading.Thread(target=server.run, name="http", daemon=True).start()
    print(f"loading {options.model}: until then http://{host}:{port} answers 503", flush=True)
    app = load()
    front.app = app
    print(
        f"serving on http://{host}:{port} (the page, POST /generate, /v1, GET /health)", flush=True
    )
    stopping.wait()
    cut_off = _drain(app.extensions["worker"], sockets, options.grace_period)
    is_written = flush_log()
    if cut_off or not is_written:
        os._exit(0)  # a thread that is stuck in a forward, or in writing, has no orderly end
    return 0


def _drain(worker: Worker, sockets: dict[int, Any], grace_s: float) -> int:
    """Let answers be finished and sent. Returns how many could not be."""
    deadline = time.monotonic() + grace_s
    if waited_for := worker.num_running + worker.num_waiting:
        print(
            f"finishing {waited_for} requests, {grace_s:g} s at most; again to quit at once",
            flush=True,
        )
    if cut_off := worker.drain(grace_s):
        print(f"{cut_off} requests were cut off", flush=True)

    def is_sending() -> bool:
        """Whether an answer is not finished, or not sent."""
        channels = [s for s in list(sockets.values()) if isinstance(s, HTTPChannel)]
        return any(channel.requests or channel.total_outbufs_len for channel in channels)

    while is_sending() and time.monotonic() < deadline + _LAST_WORDS_S:
        time.sleep(0.02)
    return cut_off
