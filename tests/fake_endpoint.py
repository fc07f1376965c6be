"""An OpenAI endpoint in a thread that answers as a test wants it to: fairly, or not."""

import json
import math
import random
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = {"data": [{"id": "fake"}]}


def fair(asked):
    """An answer: each token is " a" or " b", with a probability of one half; " a" if greedy."""
    chance, half = random.Random(str([*asked.items()][1:])), math.log(0.5)
    tokens = [chance.choice([" a", " b"]) for _ in range(asked["max_tokens"])]
    if not asked["temperature"]:
        tokens = [" a"] * asked["max_tokens"]
    if "response_format" in asked:
        tokens = [chance.choice(["[3, 9]", "[7, 9]"])]
    each = dict.fromkeys([" a", " b"] if len(tokens) > 1 else ["[3, 9]", "[7, 9]"], half)
    count = len(tokens)
    told = {"token_logprobs": [half] * count, "top_logprobs": [each] * count, "tokens": tokens}
    return {
        "choices": [{"text": "".join(tokens), "logprobs": told}],
        "usage": {"completion_tokens": count},
        "timings": {"draft_n": 2, "draft_n_accepted": min(2, count)},
    }


class Handler(BaseHTTPRequestHandler):
    """Answers what the server's `answer` returns for a request's fields, and notes these.

    That is a body, (status, text), or bytes as they are. None waits, and ... does not end.
    """

    def do_GET(self):
        self.send(self.server.models)

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(fields)
        self.send(self.server.answer(fields | {"key": self.headers["Authorization"]}))

    def send(self, said):
        if said is None:
            self.server.is_over.wait()
        elif isinstance(said, bytes):
            self.wfile.write(said)
        else:
            status, text = (200, json.dumps(said)) if isinstance(said, dict) else said
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            with suppress(OSError):  # it may be read no further
                while text is ...:
                    self.wfile.write(b" " * 4096)
                self.wfile.write(text.encode())

    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def fake(answer, models=MODELS):
    """An endpoint that answers so; .asked are the requests, .url is where."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket.listen(64)  # by default those in company have to ask twice
    server.answer, server.models, server.asked = answer, models, []
    server.is_over, server.daemon_threads = threading.Event(), True
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
