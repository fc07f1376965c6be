"""Another engine behind this server: vLLM, SGLang, llama-server, or what speaks OpenAI's protocol.

    /v1/…, /metrics   go through as they are, there and back
    POST /generate    is translated into POST /v1/completions, and the answer back
    GET /health       says how the engine is, and what it counts of its drafts

Each handler's thread carries its own request, on one connection to the engine: if the client
leaves, that is closed, and the request ends there, too. What an engine does not tell is null, such
as p, q, u and its cache, so the page has no cycles to show.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import chain
from typing import Any
from urllib.parse import quote, urlsplit

from flask import Flask, Response, abort, request

from runtime.models.loading import StartError
from runtime.statistics import FORMULAS, Statistics
from runtime.values import Json, RequestError, in_short
from server.answers import sse
from server.connection import WHEN_LEFT
from server.dialects import ERROR_FORMS
from server.http import base_app
from server.options import Options
from server.page import register_page
from server.service import read_body
from server.worker import unavailable

KEY_VARIABLE = "SPECULATIVE_ENGINE_KEY"  # which the engine asks for
_CONNECT_S, _QUESTION_S, _POLL_S = 5.0, 2.0, 0.02  # to connect, to say how it is, to look again
_EVENTS, _DONE = "text/event-stream", "data: [DONE]\n\n"
_SIZE, _MOST = 1 << 16, 16 << 20  # bytes that are read at once, and of what is translated
_SAMPLE = re.compile(r"^(?:(\w+):)?(\w+)(?:\{.*\})? (\d+\.?\d*(?:e[+-]?\d+)?)$", re.M | re.ASCII)
_PASSED = "Accept", "Content-Type", "Anthropic-Version", "Anthropic-Beta"  # of a request's head
_RETURNED = "Content-Type", "Retry-After"  # of an answer's
# Sent unless a request says otherwise: an engine may have other defaults for its model.
_NEUTRAL = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_ENGINES = "vllm", "sglang", "llamacpp"  # which know all of these; others may refuse them
_TRANSLATED = {
    *_NEUTRAL, "prompt", "max_tokens", "temperature", "seed", "stop", "presence_penalty",
    "frequency_penalty",
}  # fmt: skip
_COUNTS = {  # our counters, by an engine's names for them in /metrics
    "num_spec_steps": "spec_decode_num_drafts_total",
    "num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_draft_tokens": "spec_decode_num_accepted_tokens_total",
}


def broke_off(why: str) -> RequestError:
    """The engine has failed in the middle of an answer."""
    return RequestError(f"the engine broke off: {why}", status=502, code="engine_failed")


def refusal(status: Any, body: bytes) -> RequestError:
    """The error that our client gets where the engine has answered with one."""
    error = None
    with suppress(ValueError, RecursionError):
        error = json.loads(body)
    for name in ("error", "message"):
        error = error.get(name, error) if isinstance(error, dict) else error
    message = f"the engine refused: {in_short(ValueError(error or f'status {status}'))}"
    if status in (400, 404, 413, 422, 429):
        return RequestError(message, status=429 if status == 429 else 400)
    return RequestError(message, status=502, code="engine_failed")  # our client is not to blame


class Exchange:
    """A request to an engine, and its answer, which is read as it comes. To be closed."""

    def __init__(self, url: str, limit_s: float) -> None:
        """Connect; all together may take `limit_s` from now on. Raises RequestError."""
        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=_CONNECT_S)
        self._prefix, self._end = parts.path.rstrip("/"), time.monotonic() + limit_s
        try:
            self._connection.connect()
        except OSError as error:
            raise unavailable(f"the engine cannot be reached: {in_short(error)}") from None
        self._socket = self._connection.sock

    def send(
        self, method: str, path: str, data: bytes | None = None, headers: Json | None = None
    ) -> None:
        """Send the request, and wait for the head of the `answer`. Raises RequestError."""
        key = os.environ.get(KEY_VARIABLE)
        headers = (headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        with self._failing():
            headers["Connection"] = "close"
            self._connection.request(method, self._prefix + path, data, headers)
            self.answer = self._connection.getresponse()

    def read(self) -> bytes:
        """The next bytes of the answer's body; none at its end. Raises RequestError."""
        with self._failing():
            part = self.answer.read1(_SIZE)
            if not part and self.answer.length:  # its head has said more
                raise HTTPException("its answer is not complete")
        return part

    def whole(self) -> bytes:
        """The answer's body. Raises RequestError for any status but 200, too."""
        data = bytearray()
        while len(data) < _MOST and (part := self.read()):
            data += part
        if self.answer.status != 200:
            raise refusal(self.answer.status, bytes(data))
        return bytes(data)

    def events(self) -> Iterator[bytes]:
        """The data of each server-sent event, up to [DONE]. Raises RequestError."""
        num_bytes, said = 0, b""
        while said != b"[DONE]":
            with self._failing():
                if num_bytes > _MOST or not (line := self.answer.readline(_MOST)):
                    raise HTTPException("its stream has no end")
            num_bytes += len(line)
            said = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and said != b"[DONE]":  # else a comment, or nothing
                yield said

    def cancel(self) -> None:
        """End it in the engine, too: from any thread."""
        with suppress(OSError):  # it has ended already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # under TLS, too

    def close(self) -> None:
        """Free the connection."""
        for each in (getattr(self, "answer", None), self._connection, self._socket):
            if each:
                each.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever fails meanwhile becomes a RequestError."""
        try:
            self._socket.settimeout(max(1e-3, self._end - time.monotonic()))
            yield
        except TimeoutError:
            raise RequestError("the engine took too long", status=504, code="timeout") from None
        except (OSError, HTTPException) as error:
            raise broke_off(in_short(error)) from None


def ask(url: str, path: str) -> bytes:
    """The engine's answer to a short question. Raises RequestError for any status but 200."""
    with closing(Exchange(url, _QUESTION_S)) as exchange:
        exchange.send("GET", path)
        return exchange.whole()


def model_card(url: str) -> Json:
    """What the engine says of its model: `id`, and who serves it. Raises RequestError."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        card = json.loads(ask(url, "/v1/models"))["data"][0]
        if isinstance(card["id"], str):
            return card
    raise broke_off("its /v1/models names no model")


def metrics_of(url: str) -> dict[str, float]:
    """The engine's metrics by name, without prefix; those of all labels are summed.

    Of a name with several prefixes the first one counts. Raises RequestError.
    """
    totals, prefixes = dict[str, float](), dict[str, str]()
    for prefix, name, value in _SAMPLE.findall(ask(url, "/metrics").decode("latin-1")):
        if prefixes.setdefault(name, prefix) == prefix:
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def translated(body: Json, options: Options, card: Json) -> Json:
    """The fields of /v1/completions for those of /generate; the engine checks their values.

    Raises RequestError for a field that is not translated.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - _TRANSLATED - {"stream"}:
        if (name, given[name]) not in (("speculative", True), ("trace", False)):
            why = "there are no cycles to show" if name == "trace" else "only /v1 has all fields"
            raise RequestError(f"{name}: another engine is behind, and {why}", param=name)
    kind, defaults = card.get("owned_by"), options.for_requests
    fields = _NEUTRAL | {"return_token_ids": True} if kind in _ENGINES else {}
    fields |= {name: defaults[name] for name in ("max_tokens", "temperature")}
    fields |= {name: value for name, value in given.items() if name in _TRANSLATED}
    if kind == "llamacpp":
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields | {"model": card["id"]}


def acceptance(told: Json) -> Json:
    """The block `speculative_decoding` from an engine's counts; null is what it does not tell."""
    counts = {name: told.get(name) for name in _COUNTS}
    computed = Statistics(**{name: count or 0 for name, count in counts.items()}).counters(0)
    rates = {name: computed[name] for name in ("draft_acceptance_rate", "mean_acceptance_length")}
    return {"drafter": None} | dict.fromkeys(computed) | counts | rates | told


class Text:
    """What an engine has told of a text, as /generate has it."""

    def __init__(self) -> None:
        self.text, self.ids, self.finish_reason = "", list[int](), None
        self.usage, self.drafts, self.timings = Json(), Json(), Json()

    def take(self, said: bytes) -> Json:
        """Note an event, and return ours. Raises RequestError for an error or another shape."""
        try:
            chunk = json.loads(said)
            if "error" in chunk:
                raise refusal(chunk["error"].get("code"), said)
            choice = next(iter(chunk.get("choices") or []), {})
            text, ids = choice.get("text") or "", choice.get("token_ids") or []
            self.text += text
            self.ids += [token + 0 for token in ids]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.usage |= chunk.get("usage") or {}
            self.timings |= chunk.get("timings") or {}  # llama.cpp's
            self.drafts |= (chunk.get("metrics") or {}).get("speculative_decoding") or {}  # vLLM's
            acceptance(self.drafts)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            raise broke_off("an event of its stream has another shape") from None
        return {"text": text, "tokens": [{"id": token, "kind": None} for token in ids]}

    def body(self, seed: int | None) -> Json:
        """The answer of /generate. Raises RequestError if the text has not ended."""
        if self.finish_reason is None:
            raise broke_off("its stream ended without a reason")
        names = {"num_draft_tokens": "draft_n", "num_accepted_draft_tokens": "draft_n_accepted"}
        drafts = {ours: self.timings.get(name) for ours, name in names.items()} | self.drafts
        return {
            "text": self.text,
            "token_ids": self.ids or None,
            "finish_reason": self.finish_reason,
            "seed": seed,
            "warnings": [],
            "usage": self.usage,
            "metrics": {"speculative_decoding": acceptance(drafts)},
            "timings": self.timings or None,
        }


class Relay:
    """What goes through to the engine behind. It stands where the worker does otherwise."""

    num_waiting = 0  # the engine has the queue

    def __init__(self, options: Options) -> None:
        """Raises RequestError if no engine answers."""
        self._options, self._card = options, model_card(options.engine)
        self._began, self._is_draining = time.monotonic(), False
        self._going: set[Exchange] = set()

    @property
    def num_running(self) -> int:
        return len(self._going)

    @contextmanager
    def _exchange(self, path: str, data: bytes | None) -> Iterator[Exchange]:
        """Send the request at hand on to the engine. Raises RequestError."""
        if self._is_draining:
            raise unavailable("the server is shutting down")
        with closing(Exchange(self._options.engine, self._options.request_timeout)) as exchange:
            self._going.add(exchange)
            try:
                request.environ.get(WHEN_LEFT, lambda act: None)(exchange.cancel)
                head = {name: request.headers[name] for name in _PASSED if name in request.headers}
                exchange.send(request.method, path, data, head)
                yield exchange
            finally:
                self._going.discard(exchange)

    def pass_on(self, **_: str) -> Response:
        """The engine's own answer to the request at hand, as it is."""
        if ".." in request.path.split("/"):
            abort(404)
        query = f"?{request.query_string.decode('latin-1')}" if request.query_string else ""
        with ExitStack() as stack:
            path, data = quote(request.path) + query, request.get_data() or None
            exchange = stack.enter_context(self._exchange(path, data))
            head, pieces = exchange.answer.headers, iter(exchange.read, b"")
            response = Response(_told(pieces, head.get_content_type()), exchange.answer.status)
            response.headers.update({name: head[name] for name in _RETURNED if name in head})
            response.call_on_close(stack.pop_all().close)
        return response

    def generate(self) -> Response | Json:
        """The answer of /generate."""
        body = read_body(takes_place=False)
        fields, text = translated(body, self._options, self._card), Text()
        seed = fields.get("seed")
        with ExitStack() as stack:
            data = json.dumps(fields).encode()
            exchange = stack.enter_context(self._exchange("/v1/completions", data))
            if exchange.answer.status != 200:
                exchange.whole()  # raises the refusal
            events = map(text.take, exchange.events())
            if not body.get("stream"):
                list(events)
                return text.body(seed)
            first = next(events, {})  # what the engine refuses has a status
            last = (text.body(seed) for _ in "1")  # made when all events have been read
            pieces = chain(map(sse, chain([first], events, last)), [_DONE])
            response = Response(_told(pieces, _EVENTS), mimetype=_EVENTS)
            response.call_on_close(stack.pop_all().close)
        return response

    def health(self) -> tuple[Json, int]:
        """The body of GET /health, and its status."""
        status, metrics, warnings = "draining" if self._is_draining else "ok", {}, []
        try:
            self._card = model_card(self._options.engine)
        except RequestError as error:
            status, warnings = "stuck" if error.status == 504 else "dead", [error.message]
        else:
            with suppress(RequestError):  # some engines count only if an option asks for it
                metrics = metrics_of(self._options.engine)
        told = {ours: int(metrics[name]) for ours, name in _COUNTS.items() if name in metrics}
        return {
            "status": status,
            "engine": {"name": self._card.get("owned_by")},
            "model": self._card["id"],
            "drafter": None,
            "uptime_s": round(time.monotonic() - self._began, 3),
            "num_requests_running": self.num_running,
            "num_requests_waiting": int(metrics.get("num_requests_waiting", 0)),
            "kv_cache_usage_perc": metrics.get("kv_cache_usage_perc"),
            "speculative_decoding": acceptance(told) | {"formulas": FORMULAS},
            "warnings": warnings,
        }, 200 if status == "ok" else 503

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, and cut off what is not done in at most `timeout_s`; says how many."""
        self._is_draining, end = True, time.monotonic() + timeout_s
        while self._going and time.monotonic() < end:
            time.sleep(_POLL_S)
        for exchange in (left := [*self._going]):
            exchange.cancel()
        return len(left)


def _told(pieces: Iterator[Any], kind: str) -> Iterator[Any]:
    """The pieces of an answer; an error between server-sent events becomes one of them."""
    try:
        yield from pieces
    except RequestError as error:
        if kind != _EVENTS:
            raise  # the connection breaks off: a body that merely ended would look whole
        yield sse(error.body()) + _DONE


def create_app(options: Options) -> Flask:
    """The application with the engine at --engine behind. Raises StartError if none answers."""
    try:
        relay = Relay(options)
    except RequestError as error:
        raise StartError(f"cannot use --engine {options.engine}: {error}") from error
    app = base_app(options)
    app.extensions["worker"] = relay
    app.extensions["error_forms"] |= ERROR_FORMS
    register_page(app, {}, "data-engine")  # which has no cycles to show: it shows recorded ones
    app.add_url_rule("/v1/<path:path>", "v1", relay.pass_on, methods=["GET", "POST"])
    app.add_url_rule("/metrics", "metrics", relay.pass_on)
    app.add_url_rule("/generate", "generate", relay.generate, methods=["POST"])
    app.add_url_rule("/health", "health", relay.health)
    return app
