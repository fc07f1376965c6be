"""HTTP/1.1 on a network that means harm: asyncio holds the connections, h11 reads, threads answer.

    bytes → head (64 KiB, 10 s) → body (1 MiB, 16 KiB a second) → a thread runs the WSGI application
    bytes ← what a slow client has not taken yet waits in memory ←┘

Every connection is in one of four states:

    HEAD    the client sends the first lines of a request, or is idle
    BODY    it sends the rest
    ANSWER  a thread runs the application, and its answer is being sent
    LINGER  all is said; a client that still sends gets the time to read why it was refused

Three rules keep one client from harming another. A request that is late is ended with 408. Where
connections or memory run out, the oldest connection without a whole request is closed, so that a
new client always gets in. And requests are not pipelined: what arrives before an answer is complete
is dropped, and the connection is closed after that answer. So the server reads on while it answers,
and notices at once when a client leaves.

Whatever is wrong with a request is raised inside the application (`REFUSAL` in its environ), so
that all errors get one shape. Sources: RFC 9112, PEP 3333. Not covered: TLS, HTTP/2, WebSockets,
trailers (they are read and dropped).
"""

import asyncio
import enum
import io
import logging
import re
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import h11

from runtime.values import Json, RequestError, in_short

from .http import MAX_BODY_BYTES, REFUSAL, WHEN_LEFT

MAX_HEAD_BYTES = 1 << 16
LOG = logging.getLogger(__name__)

_MAX_FRAMING_BYTES = 1 << 16  # of a chunked body: sizes, extensions, trailers
MAX_HELD_BYTES = 64 << 20  # of all bodies that are not complete, and of all that are answered
_MAX_UNREAD_BYTES = 64 << 20  # of an answer that its client has not taken yet
_HEAD_S, _BODY_S, _IDLE_S, _READ_S, _LINGER_S = 10, 10, 30, 30, 5
_PACE = 16_384  # bytes a second that a client sends, or takes, at least
_SLICE = 16_384  # bytes that are read before the limits are looked at again
_QUICK = ("GET", "HEAD", "OPTIONS")
_BARE_LF = re.compile(rb"(?<!\r)\n")


def malformed(why: str, status: int = 400) -> RequestError:
    """What is not HTTP as RFC 9112 has it."""
    return RequestError(why, status=status, code="malformed")


def too_large(what: str, limit: int, status: int = 413) -> RequestError:
    """A part of a request beyond its limit."""
    return RequestError(f"the {what} is larger than {limit} bytes", status=status, code="too_large")


def environ_of(request: h11.Request) -> Json:
    """A request's head as WSGI has it (PEP 3333), without the body.

    Raises RequestError for what h11 lets pass and RFC 9112 does not, or not safely.
    """
    if not request.method.isupper():  # Flask would take post for POST; RFC 9110, 9.1 does not
        raise malformed("methods are written in capitals", 501)
    if request.http_version not in (b"1.0", b"1.1"):
        raise malformed("only HTTP/1.0 and HTTP/1.1 are spoken here", 505)
    environ: Json = {}
    for raw_name, value in request.headers:
        name = raw_name.decode("ascii").upper()
        if "_" in name or name == "UPGRADE":
            continue  # "_" would be taken for "-"; and no protocol but HTTP/1 is spoken
        name = "HTTP_" + name.replace("-", "_")
        text = value.decode("latin-1")
        environ[name] = f"{environ[name]},{text}" if name in environ else text
    if "HTTP_TRANSFER_ENCODING" in environ:
        if "HTTP_CONTENT_LENGTH" in environ:
            raise malformed("a request has Content-Length or Transfer-Encoding, not both")
        if request.http_version == b"1.0":
            raise malformed("HTTP/1.0 has no Transfer-Encoding")
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if f"HTTP_{name}" in environ:
            environ[name] = environ.pop(f"HTTP_{name}")
    path, query, host = _split(request.target.decode("ascii"))
    if host is not None:
        environ["HTTP_HOST"] = host  # RFC 9112, 3.2.2: it outranks the header
    return environ | {
        "REQUEST_METHOD": request.method.decode("ascii"),
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_PROTOCOL": f"HTTP/{request.http_version.decode('ascii')}",
    }


def _split(target: str) -> tuple[str, str, str | None]:
    """A request target as (path, query, host); the host is None where the target has none."""
    if target.startswith("/") or target == "*":
        path, _, query = target.partition("?")
        return path, query, None
    try:
        parts = urlsplit(target)
    except ValueError as error:  # such as http://[::1/
        raise malformed(f"the request target is not valid: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise malformed("the request target must be a path")
    return parts.path or "/", parts.query, parts.netloc


class State(enum.Enum):
    """What a connection is busy with."""

    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    LINGER = enum.auto()


class Connection(asyncio.Protocol):
    """One client. All but `respond` runs in the thread of the server's loop."""

    transport: Any  # asyncio's, with get_write_buffer_size

    def __init__(self, server: Any) -> None:
        """`server` is that of sockets.py."""
        self.server = server
        self.has_left = False
        self.num_written = 0  # bytes handed to the transport
        # When nothing was left unread for the last time, and how much had been taken by then.
        self.all_taken_at, self.num_taken = time.monotonic(), 0
        self.is_behind = False  # the client takes an answer more slowly than it is written

    def connection_made(self, transport: Any) -> None:
        """Called by asyncio, like the next methods."""
        self.transport = transport
        self.await_request(_HEAD_S)
        self.server.admit(self)

    def data_received(self, data: bytes) -> None:
        """Read what has arrived. A wrong request is answered with an error.

        Bytes that arrive before the answer is sent are dropped, and end the connection.
        """
        try:
            if self.state is State.HEAD:
                self.read_head(data)
            elif self.state is State.BODY:
                self.read_body(data)
            else:
                self.is_last = True
        except RequestError as error:
            self.refuse(error)
        except h11.RemoteProtocolError as error:
            why = in_short(error).partition(": bytearray")[0]  # the rest quotes the client's bytes
            status = error.error_status_hint if self.state is State.HEAD else 400
            self.refuse(malformed(why, status))

    def pause_writing(self) -> None:
        """Called by asyncio when an answer piles up, and the next one when most of it is taken."""
        self.is_behind = True

    def resume_writing(self) -> None:
        self.is_behind = False
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_left = True
        self.at_leave()
        self.drop_body()
        self.server.forget(self)

    # -------------------------------------------------------------------- reading a request

    def await_request(self, limit_s: float) -> None:
        """Be ready for a request that begins within `limit_s`."""
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.head, self.body = bytearray(), bytearray()
        self.num_asked = 0  # bytes of the body that is being answered
        self.num_framing = 0  # bytes of the body that are no content
        self.environ: Json = {"REQUEST_METHOD": "-", "PATH_INFO": ""}
        self.at_leave: Callable[[], None] = lambda: None
        self.is_last = False  # the connection is closed after this answer
        self.has_begun = False  # the answer's head is sent
        self.limit_s = limit_s
        self._enter(State.HEAD)
        if self.is_behind:
            self.transport.pause_reading()  # one answer at a time may pile up

    def _enter(self, state: State) -> None:
        """Change the state, and restart its clock. It may be closed to make room, but in ANSWER."""
        self.state, self.since = state, time.monotonic()
        self.server.note(self, is_waiting=state is not State.ANSWER)

    def read_head(self, data: bytes) -> None:
        """Collect bytes until the empty line that ends the head. Raises what is refused."""
        is_first, searched = len(self.head) < 2, max(0, len(self.head) - 3)
        self.head += data
        while self.head.startswith(b"\r\n"):
            del self.head[:2]  # RFC 9112, 2.2
        if is_first and self.head not in (b"", b"\r"):
            self.since, self.limit_s = time.monotonic(), _HEAD_S
        end = self.head.find(b"\r\n\r\n", searched)
        size = len(self.head) if end < 0 else end
        if self.head and self.head[0] < 0x21 and self.head != b"\r":  # TLS, say
            raise malformed("this is not HTTP")
        if _BARE_LF.search(self.head, searched, size):
            raise malformed("a line of the head ends with LF alone")
        if size > MAX_HEAD_BYTES:
            raise too_large("head", MAX_HEAD_BYTES, 431)
        if end >= 0:
            self._read_request(bytes(self.head[: end + 4]))
            self.read_body(bytes(self.head[end + 4 :]))

    def _read_request(self, head: bytes) -> None:
        """From the head to the state BODY. Raises what is refused before a body is read."""
        self.parser.receive_data(head)
        request = self.parser.next_event()
        self.environ["REQUEST_METHOD"] = request.method.decode("ascii")  # of HEAD errors, too
        self.environ |= environ_of(request)
        self.server.check(self.environ)
        if int(self.environ.get("CONTENT_LENGTH", 0)) > MAX_BODY_BYTES:
            raise too_large("body", MAX_BODY_BYTES)
        self._enter(State.BODY)
        if self.parser.they_are_waiting_for_100_continue:
            self._write(self.parser.send(h11.InformationalResponse(status_code=100, headers=[])))

    def read_body(self, data: bytes) -> None:
        """Collect the body. In slices: a megabyte of tiny chunks is a second of work."""
        slices = [data[i : i + _SLICE] for i in range(0, len(data), _SLICE)] or [b""]
        for i, part in enumerate(slices):
            if part:  # an empty one would mean that the client has left
                self.parser.receive_data(part)
            self.num_framing += len(part)
            if self._is_body_complete():
                self.is_last |= i + 1 < len(slices)
                return self.answer()
            if self.transport.is_closing():
                return
            if self.num_framing > _MAX_FRAMING_BYTES:
                raise malformed("the body's chunks are too small")

    def _is_body_complete(self) -> bool:
        """Take from the parser what it has by now. Raises RequestError if that is too large."""
        while (event := self.parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage):
                return True
            self.body += event.data
            self.num_framing -= len(event.data)
            self.server.hold(len(event.data))
            if self.transport.is_closing():
                return False
            if len(self.body) > MAX_BODY_BYTES:
                raise too_large("body", MAX_BODY_BYTES)
        return False

    def refuse(self, error: RequestError) -> None:
        """Let the application answer with the error, and close then."""
        self.environ[REFUSAL] = error
        self.is_last = True
        self.answer()

    def drop_body(self) -> None:
        """Free the memory of the body."""
        self.server.hold(-len(self.body))
        self.body = bytearray()

    # ------------------------------------------------------------------------- answering

    def answer(self) -> None:
        """Have a thread run the application."""
        if self.server.num_asked + len(self.body) > MAX_HELD_BYTES:
            why = f"requests of {MAX_HELD_BYTES} bytes wait already"
            self.environ.setdefault(REFUSAL, RequestError(why, status=429, code="queue_full"))
        body = b"" if REFUSAL in self.environ else bytes(self.body)
        self.drop_body()
        self.num_asked = len(body)
        self.head = bytearray()
        self.is_last |= bool(self.parser.trailing_data[0])
        # A proxy that parses chunks differently must not get a second request through (smuggling).
        self.is_last |= self.environ.pop("HTTP_TRANSFER_ENCODING", None) is not None
        self.environ |= self.server.environ | {
            "CONTENT_LENGTH": str(len(body)),
            "REMOTE_ADDR": str((self.transport.get_extra_info("peername") or ("",))[0]),
            "wsgi.input": io.BytesIO(body),
            WHEN_LEFT: self.when_left,
        }
        self._enter(State.ANSWER)
        is_quick = REFUSAL in self.environ or self.environ["REQUEST_METHOD"] in _QUICK
        try:
            self.server.threads[is_quick].submit(self.respond, self.environ)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            self.abort()  # Python ends, as a start has failed, and has no threads for answers

    def when_left(self, act: Callable[[], None]) -> None:
        """Have `act` called, once or twice, if the client leaves before its answer is complete."""
        self.at_leave = act
        if self.has_left:
            act()

    def respond(self, environ: Json) -> None:
        """Run the application, and hand the loop what it says. Runs in a thread."""
        if self.has_left:
            return
        head: list[Any] = []

        def start_response(status: str, headers: list[Any], exc_info: Any = None) -> None:
            head[:] = status, headers

        try:
            chunks = self.server.app(environ, start_response)
            with closing(chunks) if hasattr(chunks, "close") else nullcontext():
                parts = []
                for chunk in chunks:
                    if self.has_left:
                        break
                    # Where a length was said, a client may send the next request with its last
                    # byte: by then this one must end.
                    if any(name.lower() == "content-length" for name, _ in head[1]):
                        parts.append(chunk)
                    else:
                        self.server.call(self._say, self.send, head, chunk)
            self.server.call(self._say, self.end, head, b"".join(parts))
        except Exception:
            LOG.exception("an answer failed")
            self.server.call(self.abort)

    def _say(self, act: Callable[..., None], *arguments: Any) -> None:
        """Send or end, in the loop. Close the connection if the answer contradicts its head."""
        if self.has_left:
            return  # an incomplete answer does not matter then
        try:
            act(*arguments)
        except Exception:  # else the client would wait
            LOG.exception("an answer failed")
            self.abort()

    def send(self, head: list[Any], chunk: bytes = b"") -> None:
        """Write a part of the answer; the first one goes out with the head."""
        data = b"" if self.has_begun else self._head_of(*head)
        self._write(data + (self.parser.send(h11.Data(data=chunk)) if chunk else b""))
        if self.num_unread > _MAX_UNREAD_BYTES:
            self.abort()

    def _head_of(self, status: str, headers: list[tuple[str, str]]) -> bytes:
        self.has_begun = True
        code, _, reason = status.partition(" ")
        more = [("Date", formatdate(usegmt=True))] + [("Connection", "close")] * self.is_last
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers + more]
        head = h11.Response(status_code=int(code), headers=raw, reason=reason.encode("latin-1"))
        return self.parser.send(head)

    def end(self, head: list[Any], last: bytes = b"") -> None:
        """Write the last part; then be ready for the next request, or close."""
        self.send(head, last)
        self._write(self.parser.send(h11.EndOfMessage()))
        if self.transport.is_closing():
            return
        if self.parser.our_state is h11.DONE and not self.is_last:
            return self.await_request(_IDLE_S)
        self._enter(State.LINGER)
        with suppress(OSError):  # the client has left
            self.transport.write_eof()

    def _write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.num_written += len(data)
            self.transport.write(data)

    # ---------------------------------------------------------------- clients that are slow

    @property
    def num_unread(self) -> int:
        """Bytes of the answer that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    def watch(self, now: float) -> None:
        """End this connection if its client is too slow. Called every second."""
        waited, num_taken = now - self.since, self.num_written - self.num_unread
        if not self.num_unread:
            self.all_taken_at, self.num_taken = now, num_taken
        elif now - self.all_taken_at > _READ_S + (num_taken - self.num_taken) / _PACE:
            self.abort()
        elif self.state is not State.BODY and not self.head:
            self.since, waited = now, 0.0
        if self.state is State.BODY and waited > _BODY_S + len(self.body) / _PACE:
            self.refuse(RequestError("the body came too slowly", status=408))
        elif self.state is State.HEAD and self.head and waited > self.limit_s:
            self.refuse(RequestError("the head came too slowly", status=408))
        elif self.state is State.HEAD and waited > self.limit_s:
            self.abort()
        elif self.state is State.LINGER and waited > _LINGER_S:
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is not sent yet."""
        self.transport.abort()
