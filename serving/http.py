"""Serving the Flask app with waitress: one error body for everything, and an orderly end."""

import os
import signal
import threading
import time
from typing import Any

import waitress
from flask import Flask
from werkzeug.exceptions import HTTPException

from .parsing import RequestError

DRAIN_S = 30.0


def register_errors(app: Flask) -> None:
    """Answer every error with {"error": {…}}: never HTML, never a traceback."""

    @app.errorhandler(RequestError)
    def refuse(error: RequestError) -> tuple[dict[str, Any], int, dict[str, str]]:
        retry = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return error.body(), error.status, retry

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
        app.extensions["worker"].drain(DRAIN_S)
        time.sleep(0.2)  # the last answers leave
        os.kill(os.getpid(), signal.SIGINT)  # ends server.run()

    # A shell starts background jobs with SIGINT ignored: without this they could not end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain, daemon=True).start())
    print(f"serving on http://{host}:{port} (POST /generate, GET /health)", flush=True)
    server.run()
