"""HTTP with a running engine: one connection a request, closed to cancel.

    engine = Client("http://127.0.0.1:8000", key)
    engine.ask("/v1/models")                            a whole answer, within a few seconds
    connection = engine.connect(limit_s)                on which it may be silent for so long
    for event in engine.events(connection, path, body)  what it says, as it comes
    hang_up(connection.sock)                            from any thread: nobody waits any more

An engine that cannot be reached, breaks off or answers with an error raises RequestError, whose
status is the one that our client gets: 503, 502, or 400 where the client is to blame.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from math import isfinite
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from messages import Json, RequestError, in_short
from serving.metrics import PER_POSITION
from serving.worker import unavailable

_CONNECT_S = 5.0
_ANSWER_S = 5.0  # for a whole answer to a short question
_SIZE = 1 << 16  # bytes that are read at once
_MOST = 16 << 20  # bytes of a whole answer, or of an event
_UNKNOWN_LENGTH = 1 << 20  # of the context, in tokens
_REFUSALS = {  # the engine's status -> what our client gets: words, status and code
    401: ("wants another key", 502, "engine_key"),
    403: ("wants another key", 502, "engine_key"),
    429: ("is busy", 429, "queue_full"),
    503: ("is not ready", 503, "unavailable"),
}


def broke_off(why: str) -> RequestError:
    """The engine has failed in the middle of an answer."""
    return RequestError(f"the engine broke off: {why}", status=502, code="engine_failed")


def _silent(limit_s: float) -> RequestError:
    message = f"the engine has said nothing for {limit_s:g} s"
    return RequestError(message, status=504, code="timeout")


def refusal(status: int, body: bytes) -> RequestError:
    """The error that our client gets where the engine has answered with one."""
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        error = None
    error = error.get("error", error) if isinstance(error, dict) else {}
    error = error if isinstance(error, dict) else {"message": error}
    message = in_short(ValueError(error.get("message") or f"no reason, with status {status}"))
    param = error.get("param") if isinstance(error.get("param"), str) else None
    is_callers = 400 <= status < 500
    otherwise = ("refused", 400, None) if is_callers else ("failed", 502, "engine_failed")
    what, our_status, code = _REFUSALS.get(status, otherwise)
    return RequestError(f"the engine {what}: {message}", None if code else param, our_status, code)


def hang_up(connected: socket.socket) -> None:
    """End whatever reads from it, in any thread. An engine ends a request whose client has gone."""
    with suppress(OSError):  # it has ended already
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # under TLS, too


class Client:
    """An engine at an address."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url` is http://host:port or https://…; `key` is the API key, if it needs one."""
        parts = urlsplit(url)
        self.url, self._prefix = url.rstrip("/"), parts.path.rstrip("/")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {"Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def connect(self, limit_s: float) -> HTTPConnection:
        """A connection on which the engine may be silent for `limit_s`. Raises RequestError."""
        connection = self._kind(self._host, self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            raise unavailable(f"the engine cannot be reached: {in_short(error)}") from None
        connection.sock.settimeout(limit_s)
        return connection

    def events(self, connection: HTTPConnection, path: str, body: Json) -> Iterator[Json]:
        """The server-sent events of an answer as they come, up to [DONE]. Raises RequestError."""
        with self._answer(connection, path, body) as answer:
            while line := answer.readline(_MOST):
                if len(line) == _MOST:
                    raise broke_off("an event of its stream has no end")
                if not line.startswith(b"data:"):
                    continue  # an empty line, or a comment
                said = line.removeprefix(b"data:").strip()
                if said == b"[DONE]":
                    return
                yield _parsed(said)
        raise broke_off("its stream ended before its answer was complete")

    def ask(self, path: str, body: Json | None = None, limit_s: float = _ANSWER_S) -> bytes:
        """The body of an answer. Raises RequestError for any status but 200, and past the limit."""
        end, data = time.monotonic() + limit_s, bytearray()
        with self._answer(self.connect(limit_s), path, body) as answer:
            while part := answer.read1(_SIZE):
                data += part
                if time.monotonic() > end:
                    raise _silent(limit_s)
                if len(data) > _MOST:
                    raise broke_off(f"its answer to {path} has no end")
        return bytes(data)

    def metrics(self, limit_s: float = _ANSWER_S) -> dict[str, float]:
        """The engine's metrics by name, without prefix; labels are summed but for a position's.

        Of a name with several prefixes the first one counts.

        Example: {"spec_decode_num_drafts_total": 2.0, "…_per_pos_total[0]": 2.0}.
        """
        totals, prefixes = dict[str, float](), dict[str, str]()
        text = self.ask("/metrics", limit_s=limit_s)
        try:
            families = list(text_string_to_metric_families(text.decode()))
        except (ValueError, LookupError, TypeError, AttributeError):  # whatever its parser raises
            raise broke_off("its answer to /metrics is none of Prometheus") from None
        for sample in (sample for family in families for sample in family.samples):
            prefix, _, name = sample.name.partition(":")
            if "position" in sample.labels:
                name += f"[{sample.labels['position']}]"
            is_first = prefixes.setdefault(name, prefix) == prefix
            if name and is_first and isfinite(sample.value):
                totals[name] = totals.get(name, 0.0) + sample.value
        return totals

    @contextmanager
    def _answer(
        self, connection: HTTPConnection, path: str, body: Json | None
    ) -> Iterator[HTTPResponse]:
        """Ask, and give the answer to be read; what fails meanwhile becomes a RequestError."""
        limit_s = connection.sock.gettimeout()
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        try:
            connection.request("POST" if data else "GET", self._prefix + path, data, headers)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise refusal(answer.status, answer.read(_SIZE))
                yield answer
        except TimeoutError:
            raise _silent(limit_s) from None
        except (OSError, HTTPException) as error:
            raise broke_off(in_short(error)) from None
        finally:
            connection.close()


def _parsed(said: bytes) -> Json:
    """An event. Raises RequestError for one that tells of an error, or is none."""
    try:
        event = json.loads(said)
    except (ValueError, RecursionError):
        raise broke_off("an event of its stream is no JSON") from None
    if not isinstance(event, dict):
        raise broke_off("an event of its stream is no object")
    if event.get("error") or event.get("object") == "error":
        error = event.get("error")
        code = (error if isinstance(error, dict) else event).get("code")
        raise refusal(code if isinstance(code, int) and 400 <= code < 600 else 500, said)
    return event


@dataclass(frozen=True)
class Engine:
    """What is known of an engine once it answers."""

    client: Client
    kind: str  # vllm, sglang or unknown
    version: str | None
    model: str  # as the engine calls it
    name: str  # as this server does
    max_length: int
    is_chat: bool  # whether there is a chat template
    drafter: str | None  # "engine" where only the engine knows which
    num_spec_tokens: int | None
    vocab_size: int = 1 << 31  # it is not reported: the engine itself refuses unknown ids
    tokenizer: None = None  # it tokenises itself

    @classmethod
    def ask(cls, client: Client) -> "Engine":
        """Learn what an engine serves.

        Raises RequestError if it does not answer as an engine does.
        """
        card = _part(client, "/v1/models", "data", 0)
        if not isinstance(card, dict) or not isinstance(card.get("id"), str):
            raise RequestError(f"{client.url}/v1/models names no model", status=502)
        kind, version = "unknown", None
        for path, what in (("/version", "vllm"), ("/get_server_info", "sglang")):
            if isinstance(answer := _part(client, path, "version"), str):
                kind, version = what, answer
                break
        drafter, k = _speculation(client)
        model, length = card["id"], card.get("max_model_len")
        name = PurePath(model).name if model.startswith("/") else model
        length = length if isinstance(length, int) else _UNKNOWN_LENGTH
        is_chat = _has_template(client, model)
        return cls(client, kind, version, model, name, length, is_chat, drafter, k)

    @property
    def choices(self) -> tuple[str, ...]:
        """Drafters that a request may name."""
        return (self.drafter,) if self.drafter else ()


def _part(client: Client, path: str, *keys: Any) -> Any:
    """A part of an answer in JSON; None where there is no such answer."""
    try:
        part = json.loads(client.ask(path))
        for key in keys:
            part = part[key]
    except RequestError as error:
        if error.status in (503, 504) or error.code == "engine_key":
            raise
        return None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return part


def _speculation(client: Client) -> tuple[str | None, int | None]:
    """Whether the engine drafts, and how many tokens, by its metrics."""
    with suppress(RequestError):
        if "spec_decode_num_drafts_total" in (metrics := client.metrics()):
            return "engine", len(positions_in(metrics)) or None
    return None, None


def positions_in(metrics: dict[str, float]) -> list[float]:
    """Accepted tokens by position in the draft, where the engine counts them so."""
    counts: list[float] = []
    while (value := metrics.get(f"{PER_POSITION}_total[{len(counts)}]")) is not None:
        counts.append(value)
    return counts


def _has_template(client: Client, model: str) -> bool:
    """Whether the engine can write a conversation as a text; so it seems where it does not say."""
    try:
        client.ask("/tokenize", {"model": model, "messages": [{"role": "user", "content": "x"}]})
    except RequestError as error:
        return "template" not in error.message
    return True
