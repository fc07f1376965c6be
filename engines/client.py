"""HTTP with a running engine: one connection a request, read as it comes, closed to cancel.

    engine = Client("http://127.0.0.1:8000", key)
    engine.get("/v1/models")                     a whole answer, within a few seconds
    with engine.stream(path, body) as exchange:  server-sent events, as many as have come
        exchange.read(0.1)

An engine that cannot be reached, breaks off or answers with an error raises RequestError, whose
status is the one that our own client gets: 503, 502, or 400 where the client is to blame.
"""

import json
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

import h11
from prometheus_client.parser import text_string_to_metric_families

from messages import RequestError, in_short
from serving.metrics import PER_POSITION
from serving.worker import unavailable

_CONNECT_S = 5.0
_ANSWER_S = 5.0  # for a whole answer to a short question
_SIZE = 1 << 16  # bytes that are read at once
_MAX_WHOLE = 16 << 20  # bytes of a whole answer
_UNKNOWN_LENGTH = 1 << 20  # of the context, in tokens
_MAX_EVENT = 16 << 20  # bytes of an event that is not complete yet


def broke_off(why: str) -> RequestError:
    """The engine has failed in the middle of an answer."""
    return RequestError(f"the engine broke off: {why}", status=502, code="engine_failed")


def _unreachable(error: Exception) -> RequestError:
    return unavailable(f"the engine cannot be reached: {in_short(error)}")


def refusal(status: int, body: bytes) -> RequestError:
    """What our client is told where the engine has answered with an error."""
    found: Any = {}
    try:
        found = json.loads(body)
        found = found.get("error", found) if isinstance(found, dict) else {}
    except ValueError:
        pass
    found = found if isinstance(found, dict) else {"message": found}
    message = in_short(ValueError(found.get("message") or f"no reason, with status {status}"))
    param = found.get("param") if isinstance(found.get("param"), str) else None
    if status == 429:
        return RequestError(f"the engine is busy: {message}", status=429, code="queue_full")
    if status in (401, 403):
        return RequestError(
            f"the engine wants another key: {message}", status=502, code="engine_key"
        )
    if status == 503:
        return unavailable(f"the engine is not ready: {message}")
    if 400 <= status < 500:
        return RequestError(f"the engine refused: {message}", param=param)
    return RequestError(f"the engine failed: {message}", status=502, code="engine_failed")


class Client:
    """An engine at an address."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url` is http://host:port or https://…; `key` is asked by the engine, if at all."""
        parts = urlsplit(url)
        self.url, self.is_tls = url.rstrip("/"), parts.scheme == "https"
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.is_tls else 80)
        self._prefix, self._key = parts.path.rstrip("/"), key
        self._host = parts.netloc.rpartition("@")[2]

    def stream(self, path: str, body: dict[str, Any]) -> "Exchange":
        """Send a request whose answer is read as it comes."""
        data = json.dumps(body).encode()
        return Exchange(self._connect(), self._head("POST", path, len(data)), data)

    def get(self, path: str, limit_s: float = _ANSWER_S) -> bytes:
        """The body of an answer. Raises RequestError for any status but 200, and past the limit."""
        return self._whole("GET", path, b"", limit_s)

    def post(self, path: str, body: dict[str, Any], limit_s: float = _ANSWER_S) -> Any:
        """The same for a question with a body; the answer is JSON."""
        return json.loads(self._whole("POST", path, json.dumps(body).encode(), limit_s))

    def metrics(self, limit_s: float = _ANSWER_S) -> dict[str, float]:
        """The engine's metrics by name, without prefix; labels are summed but for a position's.

        Example: {"spec_decode_num_drafts_total": 2.0, "…_per_pos_total[0]": 2.0}.
        """
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics", limit_s).decode()):
            for sample in family.samples:
                name = sample.name.partition(":")[2]
                if "position" in sample.labels:
                    name += f"[{sample.labels['position']}]"
                if name:
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def _whole(self, method: str, path: str, body: bytes, limit_s: float) -> bytes:
        end, parts, size = time.monotonic() + limit_s, [], 0
        with Exchange(self._connect(), self._head(method, path, len(body)), body) as exchange:
            while (data := exchange.read(max(0.0, end - time.monotonic()))) != b"":
                if time.monotonic() > end:
                    message = f"the engine does not answer {path} within {limit_s:g} s"
                    raise RequestError(message, status=504, code="timeout")
                parts.append(data or b"")
                size += len(parts[-1])
                if size > _MAX_WHOLE:
                    raise broke_off(f"its answer to {path} has no end")
        return b"".join(parts)

    def _connect(self) -> socket.socket:
        try:
            connected = socket.create_connection((self.host, self.port), _CONNECT_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.is_tls:
                context = ssl.create_default_context()
                connected = context.wrap_socket(connected, server_hostname=self.host)
        except OSError as error:
            raise _unreachable(error) from None
        return connected

    def _head(self, method: str, path: str, length: int) -> h11.Request:
        headers = [("Host", self._host), ("Connection", "close")]
        if method == "POST":
            headers += [("Content-Type", "application/json"), ("Content-Length", str(length))]
        if self._key:
            headers.append(("Authorization", f"Bearer {self._key}"))
        return h11.Request(method=method, target=self._prefix + path, headers=headers)


class Exchange:
    """One request and its answer. Closing it tells the engine that nobody waits any more."""

    def __init__(self, connected: socket.socket, head: h11.Request, body: bytes) -> None:
        """Send it. Raises RequestError if that fails."""
        self._socket, self._parser = connected, h11.Connection(h11.CLIENT)
        sent = self._parser.send(head)
        if body:
            sent += self._parser.send(h11.Data(data=body))
        self._status: int | None = None
        self._is_over = self._is_done = False  # all of the answer has come; [DONE] has
        self._refused = bytearray()  # the body of an error
        self._rest = b""  # of an event that is not complete
        try:
            self._socket.sendall(sent + self._parser.send(h11.EndOfMessage()))
        except OSError as error:
            self.close()
            raise broke_off(in_short(error)) from None

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back; the engine ends a request whose client has gone."""
        self._socket.close()

    def read(self, timeout_s: float) -> bytes | None:
        """More of the body: what has come by now; None if nothing came in time, b"" at the end.

        The head alone is None as well. Raises RequestError for an error of the engine.
        """
        try:
            if (data := self._take()) is None:
                self._socket.settimeout(max(0.001, timeout_s))
                try:
                    received = self._socket.recv(_SIZE)
                except TimeoutError:
                    return None
                self._parser.receive_data(received)
                data = self._take()
        except h11.RemoteProtocolError as error:
            raise broke_off(in_short(error).partition(": bytearray")[0]) from None
        except OSError as error:
            raise broke_off(in_short(error)) from None
        return data

    def _take(self) -> bytes | None:
        """What the parser has by now."""
        parts: list[bytes] = []
        while not self._is_over:
            event = self._parser.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return b"".join(parts) or None
            if isinstance(event, h11.Response):
                self._status = event.status_code
            elif isinstance(event, h11.Data) and self._status == 200:
                parts.append(bytes(event.data))
            elif isinstance(event, h11.Data):
                self._refused += event.data[: _SIZE - len(self._refused)]
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                self._is_over = True
                if self._status != 200:
                    raise refusal(self._status or 502, bytes(self._refused))
        return b"".join(parts)  # perhaps b"", else the next call gives that

    def events(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """The server-sent events that have come by now; None once [DONE] has been said.

        An empty list says that nothing came in time. Raises RequestError where the engine tells of
        an error, or ends without [DONE].
        """
        if self._is_done:
            return None
        data = self.read(timeout_s)
        if data is None:
            return []
        if data == b"":
            raise broke_off("its stream ended before its answer was complete")
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _MAX_EVENT:
            raise broke_off("an event of its stream has no end")
        found = []
        for event in whole:
            if not event.startswith(b"data:"):
                continue  # a comment
            said = event.removeprefix(b"data:").strip()
            if said == b"[DONE]":
                self._is_done = True
                break
            found.append(_parsed(said))
        return found


def _parsed(said: bytes) -> dict[str, Any]:
    """An event. Raises RequestError for one that tells of an error, or is none."""
    try:
        event = json.loads(said)
    except ValueError:
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

    @classmethod
    def ask(cls, client: Client, drafter: str | None = None, k: int | None = None) -> "Engine":
        """Learn what an engine serves; `drafter` and `k` where they are known already.

        Raises RequestError if it does not answer as an engine does.
        """
        card = _part(client, "/v1/models", "data", 0)
        if not isinstance(card, dict) or not isinstance(card.get("id"), str):
            raise RequestError(f"{client.url}/v1/models names no model", status=502)
        kind, version = "unknown", None
        for path, what in (("/version", "vllm"), ("/get_server_info", "sglang")):
            if isinstance(found := _part(client, path, "version"), str):
                kind, version = what, found
                break
        if drafter is None:
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
        found = json.loads(client.get(path))
        for key in keys:
            found = found[key]
    except RequestError as error:
        if error.status in (503, 504) or error.code == "engine_key":
            raise
        return None
    except (ValueError, LookupError, TypeError):
        return None
    return found


def _speculation(client: Client) -> tuple[str | None, int | None]:
    """Whether the engine drafts, and how many tokens, by its metrics."""
    try:
        metrics = client.metrics()
    except RequestError:
        return None, None
    if "spec_decode_num_drafts_total" not in metrics:
        return None, None
    return "engine", len(positions_in(metrics)) or None


def positions_in(metrics: dict[str, float]) -> list[float]:
    """Accepted tokens by position in the draft, where the engine counts them so."""
    found: list[float] = []
    while (value := metrics.get(f"{PER_POSITION}_total[{len(found)}]")) is not None:
        found.append(value)
    return found


def _has_template(client: Client, model: str) -> bool:
    """Whether the engine can write a conversation as a text; so it seems where it does not say."""
    turns = [{"role": "user", "content": "x"}]
    try:
        client.post("/tokenize", {"model": model, "messages": turns})
    except RequestError as error:
        return "template" not in error.message
    return True
