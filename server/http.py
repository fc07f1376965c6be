"""The Flask app's frame: access control, and one error body for everything.

serving.py serves it on a network that means harm; without that file Flask's own server does.
"""

import hmac
import logging
import re
import secrets
from collections.abc import Callable
from ipaddress import ip_address

from flask import Flask, Response, current_app, g, request
from werkzeug import Request
from werkzeug.datastructures import EnvironHeaders
from werkzeug.exceptions import HTTPException
from werkzeug.serving import make_server

from runtime import plug
from runtime.values import TOO_SLOW, Json, RequestError, engine_failure, in_short

from .options import Options

MAX_BODY_BYTES = 1 << 20
REFUSAL = "server.refusal"  # in the environ: the RequestError that the application has to raise
WHEN_LEFT = "server.when_left"  # in the environ: has a function called if the client leaves
_OPEN = re.compile("/|/health|/page/.*|/prompts.*")  # paths that need no API key
LOG = logging.getLogger(__name__)
log = plug("server.log")


def base_app(options: Options) -> Flask:
    """An application without routes, and with all that every answer has in common."""
    app = Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.json.sort_keys = False
    app.url_map.merge_slashes = False  # /v1//models gets a 404: a redirect would be HTML
    if log:
        log.watch_requests(app)
    register_errors(app)

    @app.before_request
    def check() -> Response | None:
        """Refuse callers without access. Answer OPTIONS where other pages may call."""
        client_id = request.headers.get("X-Request-Id", "")
        is_usable = re.fullmatch(r"[\w.:/+=-]{1,128}", client_id, re.ASCII)
        g.id, g.job, g.error = client_id if is_usable else secrets.token_hex(12), None, None
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
        headers, forms = response.headers, current_app.extensions["error_forms"]
        headers["X-Request-Id"] = g.id
        if request.path in forms:  # Anthropic's clients look there
            headers["request-id"] = g.id
        headers["X-Content-Type-Options"] = "nosniff"
        headers.setdefault("Content-Security-Policy", "default-src 'none'")
        if options.allow_origin:  # CORS
            wanted = request.headers.get("Access-Control-Request-Headers")
            headers["Access-Control-Allow-Origin"] = options.allow_origin
            headers["Access-Control-Allow-Headers"] = wanted or "Authorization, Content-Type"
            headers["Access-Control-Allow-Methods"] = "GET, POST"
            headers["Access-Control-Expose-Headers"] = "Retry-After, X-Request-Id, request-id"
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
    if asked.headers.get("Content-Encoding", "identity").lower() != "identity":
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


def url_of(host: str, port: int) -> str:
    """A server's URL. Example: ::1, 5000 -> http://[::1]:5000."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(load: Callable[[], Flask], port: int, options: Options) -> int:
    """Serve what `load` makes, with Flask's own server, until Ctrl-C; what runs is finished."""
    logging.lastResort = logging.StreamHandler()  # which writes tracebacks, too
    server = make_server(options.host, port, base_app(options), threaded=True)
    server.app = app = load()
    print(f"serving on {url_of(options.host, port)}: send requests (POST /generate)", flush=True)
    server.serve_forever()
    app.extensions["worker"].drain(options.grace_period)
    return 0
