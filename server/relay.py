"""Another engine behind this server: vLLM, SGLang, llama-server, or what speaks OpenAI's protocol.

    /v1/…, /metrics   go through as they are, there and back
    POST /generate    is translated into POST /v1/completions, and the answer back
    GET /health       says how the engine is, and what it counts of its drafts

Each handler's thread carries its own request, on one connection to the engine: if the client
leaves, that is closed, and the request ends there, too. What an engine does not tell is null, such
as p, q, u and its cache, so the page has no cycles to show.
"""

import json
import logging
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import chain
from math import isfinite
from statistics import fmean
from threading import Event
from typing import Any
from urllib.parse import quote, urlsplit

from flask import Flask, Response, abort, g, request, stream_with_context
from prometheus_client.parser import text_string_to_metric_families

from runtime.models import StartError
from runtime.models.prompts import is_text
from runtime.statistics import FORMULAS, Statistics
from runtime.values import Json, RequestError, in_short
from server.answers import sse
from server.dialects import ERROR_FORMS
from server.dialects.shapes import event
from server.fields import wrong
from server.http import WHEN_LEFT, base_app
from server.options import Options
from server.page import register_page
from server.service import read_body
from server.worker import WHY_NOT, unavailable

LOG = logging.getLogger("engine")
KEY_VARIABLE = "SPECULATIVE_ENGINE_KEY"  # which the engine asks for
_CONNECT_S, _QUESTION_S = 5.0, 2.0  # to connect, and to say how it is
_EVENTS, _DONE = "text/event-stream", "data: [DONE]\n\n"
_ENDED = re.compile(rb".*\n\r?\n", re.DOTALL)  # whole events
_MOST = 16 << 20  # bytes of an answer that is translated, and of an event
_PASSED = "Accept", "Content-Type", "Anthropic-Version", "Anthropic-Beta"  # of a request's head
_RETURNED = "Content-Type", "Content-Encoding", "Retry-After"  # of an answer's
# Sent unless a request says otherwise: an engine may have other defaults for its model.
_NEUTRAL = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_SET = "top_k", "top_p", "min_p", "seed"  # where the command line sets them
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
# Of what is computed here.
_FORMULAS = {n: FORMULAS[n] for n in ("draft_acceptance_rate", "mean_acceptance_length")}


def broke_off(why: str) -> RequestError:
    """The engine has failed in the middle of an answer."""
    return RequestError(f"the engine broke off: {why}", status=502, code="engine_failed")


def ending() -> RequestError:
    """This server ends, and what is not done is cut off."""
    return unavailable(WHY_NOT["draining"])


def refusal(status: Any, body: bytes) -> RequestError:
    """The error that our client gets where the engine has answered with one."""
    try:
        said = json.loads(body)
        error = said.get("error", said)  # some engines write a message at the top
        reason = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        reason = f"status {status}"
    message = f"the engine refused: {in_short(ValueError(reason))}"
    if status in (400, 404, 413, 422, 429):
        return RequestError(message, status=429 if status == 429 else 400)
    return RequestError(message, status=502, code="engine_failed")  # our client is not to blame


@contextmanager
def failing(is_cut: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Whatever fails in the engine becomes a RequestError; a failure may be that it is cut off."""
    try:
        yield
    except TimeoutError:
        raise RequestError("the engine took too long", status=504, code="timeout") from None
    except (OSError, HTTPException, ValueError) as error:
        raise (ending() if is_cut() else broke_off(in_short(error))) from None


def ask(
    opened: ExitStack, url: str, path: str, limit_s: float, method: str = "GET",
    data: bytes | None = None, head: Json | None = None,
    at_begin: Callable[[socket.socket], Any] = lambda line: None,
) -> HTTPResponse:  # fmt: skip
    """An engine's answer, once its head is there. It may be silent for `limit_s` at most."""
    parts, key = urlsplit(url), os.environ.get(KEY_VARIABLE)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_CONNECT_S)
    try:
        connection.connect()
    except OSError as error:
        raise unavailable(f"the engine cannot be reached: {in_short(error)}") from None
    line = opened.enter_context(connection.sock)  # the connection gives it to the answer
    line.settimeout(limit_s)
    at_begin(line)
    own = {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, parts.path.rstrip("/") + path, data, (head or {}) | own)
    return opened.enter_context(connection.getresponse())


def cut_off(line: socket.socket) -> None:
    """End a request in the engine, too: from any thread."""
    with suppress(OSError):  # it has ended already
        socket.socket.shutdown(line, socket.SHUT_RDWR)  # under TLS, too


def pieces_of(answer: HTTPResponse) -> Iterator[bytes]:
    """The body of an answer, as it comes."""
    while part := answer.read1(1 << 16):
        yield part
    if answer.length:  # its head has said more
        raise HTTPException("its answer is not complete")


def whole_events(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a stream, cut where events end: behind one may stand that it breaks off."""
    rest = b""
    for piece in pieces:
        rest += piece
        if ended := _ENDED.match(rest):
            yield ended[0]
            rest = rest[ended.end() :]
        elif len(rest) > _MOST:
            raise HTTPException("an event has no end")
    last = rest.rstrip().rpartition(b"\n")[2]
    is_end = rest.endswith(b"\n") and (last.startswith(b":") or last.endswith(b"[DONE]"))
    if last:
        if not is_end:
            raise HTTPException("its last event has no end")
        yield rest + b"\n"


def events_of(answer: HTTPResponse) -> Iterator[bytes]:
    """The data of each server-sent event, up to [DONE]."""
    left = _MOST
    while (line := answer.readline(left)) and (left := left - len(line)):
        name, _, data = line.strip().partition(b":")
        if data.strip() == b"[DONE]":
            return
        if name == b"data":  # else a comment, or nothing
            yield data
    raise HTTPException("its stream has no end")


def whole(answer: HTTPResponse) -> bytes:
    """The body of an answer. Raises RequestError for any status but 200."""
    data = answer.read(_MOST)
    if answer.status != 200:
        raise refusal(answer.status, data)
    return data


def told(url: str, path: str) -> bytes:
    """What the engine answers to a short question. Raises RequestError."""
    with failing(), ExitStack() as opened:
        return whole(ask(opened, url, path, _QUESTION_S))


def model_card(url: str) -> Json:
    """What the engine says of its model: `id`, and who serves it. Raises RequestError."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        card = json.loads(told(url, "/v1/models"))["data"][0]
        if isinstance(card["id"], str):
            return card
    raise broke_off("its /v1/models names no model")


def metrics_of(url: str) -> dict[str, float]:
    """The engine's metrics by name, without prefix: the sum of all labels, or a share's mean.

    Of a name with several prefixes the first one counts. Raises some Exception for another form.
    """
    values = defaultdict[str, list[float]](list)
    for family in text_string_to_metric_families(told(url, "/metrics").decode("latin-1")):
        for sample in family.samples:
            values[sample.name].append(sample.value if isfinite(sample.value) else 0.0)
    kinds = {name: fmean if name.endswith("_perc") else sum for name in values}
    return {name.rpartition(":")[2]: kinds[name](values[name]) for name in reversed(values)}


def translated(body: Json, options: Options, card: Json) -> Json:
    """The fields of /v1/completions for those of /generate; the engine checks their values.

    Raises RequestError for a field that is not translated.
    """
    given = {name: value for name, value in body.items() if value is not None}
    prompt = given.get("prompt")
    are_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (are_ids or is_text(prompt)):
        raise wrong("prompt", "must be a text or a list of token ids")
    if not isinstance(given.get("stream"), bool | None):
        raise wrong("stream", "must be true or false")
    for name in given.keys() - _TRANSLATED - {"stream"}:
        if (name, given[name]) not in (("speculative", True), ("trace", False)):
            why = "there are no cycles to show" if name == "trace" else "only /v1 has all fields"
            raise RequestError(f"{name}: another engine is behind, and {why}", param=name)
    kind, defaults = card.get("owned_by"), options.for_requests
    fields = _NEUTRAL | {"return_token_ids": True} if kind in _ENGINES else {}
    names = "max_tokens", "temperature", *(n for n in _SET if defaults[n] != getattr(Options, n))
    fields |= {name: defaults[name] for name in names}
    fields |= {name: value for name, value in given.items() if name in _TRANSLATED}
    if kind == "llamacpp":
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields | {"model": card["id"]}


def acceptance(told: Json) -> Json:
    """The block `speculative_decoding` from an engine's counts; null is what it does not tell."""
    counts = {name: told.get(name) for name in _COUNTS}
    computed = Statistics(**{name: count or 0 for name, count in counts.items()}).counters(0)
    rates = {name: computed[name] for name in _FORMULAS}
    return {"drafter": None} | dict.fromkeys(computed) | counts | rates | told


def answered(said: Iterator[bytes], seed: int | None) -> Iterator[Json]:
    """Our events for an engine's, and behind them the answer of /generate.

    Raises RequestError for an error, another shape, or a text that has not ended.
    """
    text, ids, finish_reason = "", list[int](), None
    usage, timings, drafts = Json(), Json(), Json()
    for data in said:
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise refusal(chunk["error"].get("code"), data)
            choice = next(iter(chunk.get("choices") or []), {})
            new, new_ids = choice.get("text") or "", choice.get("token_ids") or []
            text += new
            ids += [token + 0 for token in new_ids]
            finish_reason = choice.get("finish_reason") or finish_reason
            usage |= chunk.get("usage") or {}
            timings |= chunk.get("timings") or {}  # llama.cpp's
            drafts |= (chunk.get("metrics") or {}).get("speculative_decoding") or {}  # vLLM's
            acceptance(drafts)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            raise broke_off("an event of its stream has another shape") from None
        yield {"text": new, "tokens": [{"id": token, "kind": None} for token in new_ids]}
    if finish_reason is None:
        raise broke_off("its stream ended without a reason")
    answer = {"text": text, "token_ids": ids or None, "finish_reason": finish_reason, "seed": seed}
    answer |= {"warnings": [], "usage": usage, "timings": timings or None}
    names = {"num_draft_tokens": "draft_n", "num_accepted_draft_tokens": "draft_n_accepted"}
    drafts = {ours: timings.get(name) for ours, name in names.items()} | drafts
    yield answer | {"metrics": {"speculative_decoding": acceptance(drafts)}}


class Relay:
    """What goes through to the engine behind. It stands where the worker does otherwise."""

    def __init__(self, options: Options) -> None:
        """Raises RequestError if no engine answers."""
        self._options, self._card = options, model_card(options.engine)
        self._began, self._is_draining, self._has_cut = time.monotonic(), False, Event()
        self._going: set[socket.socket] = set()

    @property
    def num_jobs(self) -> int:
        return len(self._going)

    def _ask(self, opened: ExitStack, path: str, data: bytes | None) -> HTTPResponse:
        """The engine's answer to the request at hand, which is sent on. Raises RequestError."""
        if self._is_draining:
            raise ending()
        left = g.left = Event()  # for the log

        def note(line: socket.socket) -> None:
            self._going.add(line)
            opened.callback(self._going.discard, line)
            request.environ.get(WHEN_LEFT, lambda act: None)(lambda: (left.set(), cut_off(line)))

        engine, is_short = self._options.engine, request.method == "GET"
        # Short questions share their threads with /health.
        limit_s = _QUESTION_S if is_short else self._options.request_timeout
        head = {name: request.headers[name] for name in _PASSED if name in request.headers}
        return ask(opened, engine, path, limit_s, request.method, data, head, note)

    def pass_on(self, **_: str) -> Response:
        """The engine's own answer to the request at hand, as it is."""
        if ".." in request.path.split("/"):
            abort(404)
        query = f"?{request.query_string.decode('latin-1')}" if request.query_string else ""
        path, data = quote(request.path) + query, request.get_data() or None
        with failing(self._has_cut.is_set), ExitStack() as opened:
            answer = self._ask(opened, path, data)
            pieces, kind = pieces_of(answer), answer.headers.get_content_type()
            if kind == _EVENTS and "Content-Encoding" not in answer.headers:
                pieces = whole_events(pieces)
            response = self._respond(opened, pieces, kind)
            response.status_code = answer.status
            kept = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
            response.headers.update(kept)
            return response

    def generate(self) -> Response | Json:
        """The answer of /generate."""
        body = read_body(takes_place=False)
        with failing(self._has_cut.is_set), ExitStack() as opened:
            fields = translated(body, self._options, self._card)
            answer = self._ask(opened, "/v1/completions", json.dumps(fields).encode())
            if answer.status == 404 and self._has_changed():
                opened.close()
                fields = translated(body, self._options, self._card)
                answer = self._ask(opened, "/v1/completions", json.dumps(fields).encode())
            if answer.status != 200:
                whole(answer)  # raises the refusal
            events = answered(events_of(answer), fields.get("seed"))
            first = next(events)  # what the engine refuses has a status
            if not body.get("stream"):
                return [first, *events][-1]
            return self._respond(opened, chain(map(sse, chain([first], events)), [_DONE]), _EVENTS)

    def _has_changed(self) -> bool:
        """Whether the engine has another model by now."""
        before = self._card["id"]
        with suppress(RequestError):
            self._card = model_card(self._options.engine)
        return self._card["id"] != before

    def health(self) -> tuple[Json, int]:
        """The body of GET /health, and its status."""
        status, metrics, warnings = "draining" if self._is_draining else "ok", {}, []
        try:
            self._card = model_card(self._options.engine)
        except RequestError as error:
            status, warnings = "stuck" if error.status == 504 else "dead", [error.message]
        else:
            with suppress(Exception):  # some engines count only if an option asks for it
                metrics = metrics_of(self._options.engine)
        counts = {ours: int(metrics[name]) for ours, name in _COUNTS.items() if name in metrics}
        return {
            "status": status, "engine": {"name": self._card.get("owned_by")},
            "model": self._card["id"], "drafter": None,
            "uptime_s": round(time.monotonic() - self._began, 3),
            "num_requests_running": self.num_jobs,
            "num_requests_waiting": metrics.get("num_requests_waiting"),
            "kv_cache_usage_perc": metrics.get("kv_cache_usage_perc"),
            "speculative_decoding": acceptance(counts) | {"formulas": _FORMULAS},
            "warnings": warnings,
        }, 200 if status == "ok" else 503  # fmt: skip

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, and cut off what is not done in at most `timeout_s`; says how many."""
        self._is_draining, end = True, time.monotonic() + timeout_s
        while self._going and time.monotonic() < end:
            time.sleep(0.02)
        left = [*self._going]
        self._has_cut.set()
        for line in left:
            cut_off(line)
        return len(left)

    def _respond(self, opened: ExitStack, pieces: Iterator[Any], kind: str) -> Response:
        """A response of these pieces, which closes what is opened when all of them are sent.

        An error between server-sent events becomes one of them.
        """

        def sent() -> Iterator[Any]:
            try:
                with failing(self._has_cut.is_set):
                    yield from pieces
                if self._has_cut.is_set():  # where nothing says how long it is, it seems whole
                    raise ending()
            except RequestError as error:
                LOG.warning("an answer broke off: %s", error)
                if kind != _EVENTS:
                    raise  # the connection breaks off: a body that merely ended would look whole
                form = ERROR_FORMS.get(request.path)  # its clients know events by their names
                yield event("error", **form(error)) if form else sse(error.body()) + _DONE

        response = Response(stream_with_context(sent()), mimetype=kind)
        response.call_on_close(opened.pop_all().close)
        return response


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
