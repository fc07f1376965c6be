"""Serving the Flask app with waitress: one error body for everything, and an orderly end."""

import hmac
import os
import signal
import threading
import time
from itertools import chain
from typing import Any

import waitress
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from .parsing import RequestError, parse_json
from .worker import Job, cancel

DRAIN_S = 30.0
GUARDED = ("/generate", "/v1/", "/metrics")  # what an API key is needed for


def read_body() -> dict[str, Any]:
    """The JSON object that was sent. Raises RequestError for anything else."""
    if not request.is_json:
        raise RequestError("the Content-Type must be application/json", status=415)
    return parse_json(request.get_data(cache=False))


def finish(jobs: list[Job]) -> bool:
    """Wait until all is done; False if the client has left meanwhile. Re-raises a job's error."""
    client_left = request.environ.get("waitress.client_disconnected", lambda: False)
    try:
        return not any(client_left() for _ in chain.from_iterable(jobs))
    finally:
        cancel(jobs)


def guard(app: Flask, api_key: str | None, origin: str | None) -> None:
    """Ask for `Authorization: Bearer API_KEY`; let pages from `origin` call. None = off."""

    @app.before_request
    def check_key() -> Response | None:
        if origin and request.method == "OPTIONS":
            return Response(status=204)  # a browser asks before it calls, and without a key
        if api_key is None or not request.path.startswith(GUARDED):
            return None
        given = request.headers.get("Authorization", "").encode()
        if hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            return None
        raise RequestError(
            "give the API key as Authorization: Bearer KEY", status=401, code="invalid_api_key"
        )

    @app.after_request
    def allow_origin(response: Response) -> Response:
        if origin:
            response.headers["Access-Control-Allow-Origin"] = origin
            wanted = request.headers.get("Access-Control-Request-Headers")
            response.headers["Access-Control-Allow-Headers"] = (
                wanted or "Authorization, Content-Type"
            )
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            response.headers["Access-Control-Expose-Headers"] = "Retry-After"
            response.vary.add("Origin")
        return response


def register_errors(app: Flask) -> None:
    """Answer every error with {"error": {…}}: never HTML, never a traceback."""

    @app.errorhandler(RequestError)
    def refuse(error: RequestError) -> tuple[dict[str, Any], int, dict[str, str]]:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return error.body(), error.status, headers

    @app.errorhandler(HTTPException)
    def refuse_http(error: HTTPException) -> tuple[dict[str, Any], int, dict[str, str]]:
        status = error.code or 500
        allowed = getattr(error, "valid_methods", None)
        body = RequestError(error.description or error.name, status=status).body()
        return body, status, {"Allow": ", ".join(allowed)} if allowed else {}

    @app.errorhandler(Exception)
    def fail(error: Exception) -> tuple[dict[str, Any], int]:
        app.logger.exception("a request failed")
        return RequestError(f"the engine failed: {type(error).__name__}", status=500).body(), 500


def listen(app: Flask, host: str, port: int, options: Any) -> None:
    """Serve until SIGTERM or Ctrl-C. On SIGTERM what is running is finished first.

    Raises OSError if the address is taken.
    """
    try:
        server = waitress.create_server(
            app,
            host=host,
            port=port,
            # More threads than requests can run and wait, so that /health always finds one.
            threads=options.max_running + options.max_queued + 8,
            channel_request_lookahead=1,  # notices a client that leaves
            # Flask refuses from 1 MiB on, in JSON; this bounds what is read before it can.
            max_request_body_size=64 << 20,
            channel_timeout=30,
            cleanup_interval=5,
            connection_limit=1000,
            ident=None,
        )
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error

    def drain() -> None:
        if running := app.extensions["worker"].num_running:
            print(f"finishing {running} requests, {DRAIN_S:.0f} s at most", flush=True)
        app.extensions["worker"].drain(DRAIN_S)
        time.sleep(0.2)  # the last answers leave
        os.kill(os.getpid(), signal.SIGINT)  # ends server.run()

    # A shell starts background jobs with SIGINT ignored: without this they could not end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain, daemon=True).start())
    print(
        f"serving on http://{host}:{port} (the page, POST /generate, /v1, GET /health)", flush=True
    )
    server.run()
