"""The real server as a process on a real socket, and a client that says exactly what it sends.

A server is forked from a process that has imported all it needs, which takes seconds, once.
"""

import http.client
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from server.options import Options

ROOT = Path(__file__).resolve().parent.parent
CORE, FAULTY = "08_speculative_decoding", "faulty_server"  # modules, with a main(arguments)
SCRIPT = f"{CORE}.py"
JSON = {"Content-Type": "application/json"}
COLOURS = "red, green, blue, red, green,"
GOOD = {"prompt": "x = 1", "max_tokens": 2}
ROUTES = GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TURNS = [{"role": "user", "content": "x = 1"}]
BODIES = {  # the least that each route answers
    GENERATE: {"prompt": "x = 1"}, COMPLETIONS: {"prompt": "x = 1"}, CHAT: {"messages": TURNS},
    MESSAGES: {"messages": TURNS, "max_tokens": 4}, COUNT: {"messages": TURNS},
    RESPONSES: {"input": "x = 1"},
}  # fmt: skip
PATHS = ROUTES[:2]
ENDLESS = {"prompt": "1, 2, 3, 4, 5,", "speculative": False, "max_tokens": 2000}  # counts on and on
REQUESTS = ("num_requests_running", "num_requests_waiting")  # of /health and /metrics
AT_WORK = (*REQUESTS, "kv_cache_usage_perc")
LIMIT_S = 60.0  # for what happens at once, on a machine that is busy

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
_FORKS = multiprocessing.get_context("forkserver")
# The last one is torch's, and imports sympy: half of a server's start.
_FORKS.set_forkserver_preload([CORE, FAULTY, __name__, "torch.fx.experimental.symbolic_shapes"])


def naming_a_model(arguments):
    """A command line as it is, or with the embedded model: the default one is downloaded."""
    is_named = {"--model", "--engine"} & set(arguments)
    return [*arguments] if is_named else [*arguments, "--model", "embedded"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def heeding_interrupts():
    """For a `preexec_fn`: whoever runs the tests may have them as a job in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(
    module, arguments, log, ignored=(signal.SIGINT,), stdout=None, stderr=None, constants=None
):
    """`constants` are those of Options. A drafter may take as long as a gate holds it up."""
    for name, value in ({"drafter_timeout": 600.0} | (constants or {})).items():
        setattr(Options, name, value)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have used nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or a job in the background
    for number in ignored:  # as a shell does with SIGINT in its background jobs, nohup with SIGHUP
        signal.signal(number, signal.SIG_IGN)
    for standard in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), standard)
    if stdout == "closed":
        os.close(1)
        sys.stdout = None  # as Python has it then
    elif stdout:
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
        sys.stdout = open(1, "w", closefd=False)  # which knows whether it can seek there
    if stderr:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_NOCTTY), 2)
    os.chdir(ROOT)
    raise SystemExit(importlib.import_module(module).main(arguments))


class Client:
    """Asks the server at a port of this machine."""

    def __init__(self, port):
        self.port = port

    def call(self, method, path, body=None, headers=JSON):
        """(status, headers, body) of one request; a dict goes out as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = json.dumps(body) if isinstance(body, dict) else body
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, response.headers, data

    def post(self, path, headers=JSON, **fields):
        """(status, body) of a POST of JSON that is answered with JSON."""
        status, _, data = self.call("POST", path, fields, headers)
        return status, json.loads(data)

    def generate(self, **fields):
        """(status, body) of POST /generate."""
        return self.post(GENERATE, **fields)

    def stream(self, **fields):
        """The events of POST /generate, of which the last one is the answer."""
        status, headers, data = self.call("POST", "/generate", fields | {"stream": True})
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
        return events_of(data)

    def openai(self, key="none"):
        """The client of the package openai."""
        import openai

        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0)

    def health(self):
        return json.loads(self.call("GET", "/health")[2])

    def refusal(self, path="/generate"):
        """What a 503 says, which every route answers that cannot serve now."""
        status, headers, data = self.call("POST", path, GOOD)
        assert status == 503 and headers["Retry-After"] == "1"
        return json.loads(data)["error"]["message"]

    def is_ready(self):
        with suppress(OSError):
            return self.call("GET", "/health")[0] == 200

    def open_socket(self):
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def raw(self, data):
        """(status, headers, body) of bytes as they are; the body as JSON."""
        with self.open_socket() as client:
            with suppress(OSError):  # it may be refused before all is sent
                client.sendall(data)
            return parse(read_all(client))

    def connect(self, path, fields, buffer_bytes=None):
        """A client that has asked and not read; closing it is leaving."""
        client = socket.socket()
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.connect(("127.0.0.1", self.port))
        body = json.dumps(fields).encode()
        client.sendall(request(path, body, f"Content-Length: {len(body)}"))
        return client

    def wait_until_running(self, number=1):
        until(lambda: self.health()["num_requests_running"] == number)

    def wait_until_taken(self, number):
        """Until so many run or wait."""
        until(lambda: sum(map(self.health().get, REQUESTS)) == number)

    def wait_until_idle(self):
        """Until all who were served or have left are forgotten; the page's first run is one."""
        until(lambda: not any(map(self.health().get, AT_WORK)))


class Server(Client):
    """A process that runs the command line, which serves unless it has a prompt.

    `log()` is what it has said so far.
    """

    def __init__(self, *arguments, module=CORE, wait=True, **started):
        super().__init__(free_port())
        self._log = tempfile.NamedTemporaryFile()
        serves = [] if "--prompt" in arguments else ["--port", str(self.port)]
        arguments = [*serves, *naming_a_model(arguments)]
        about = (module, arguments, self._log.name)
        self._process = _FORKS.Process(target=_run, args=about, kwargs=started, daemon=True)
        self._process.start()
        if wait:
            until(lambda: self.is_ready() or not self._process.is_alive())
            assert self._process.is_alive(), self.log()

    @property
    def pid(self):
        return self._process.pid

    def log(self):
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def send(self, number):
        os.kill(self._process.pid, number)

    def exit_code(self):
        """What it ends with, within a minute."""
        self._process.join(LIMIT_S)
        return self._process.exitcode

    def close(self):
        self._process.kill()
        self._process.join()
        self._log.close()

    def end_well(self):
        """SIGTERM, after which nothing must have gone wrong."""
        assert self._process.is_alive(), self.log()
        self.send(signal.SIGTERM)
        assert self.exit_code() == 0
        signs = ("Traceback", '"status": 500', '"ERROR"')
        wrong = [line for line in self.log().splitlines() if any(map(line.count, signs))]
        assert not wrong, wrong


@contextmanager
def serving(*arguments, **options):
    """A server for a while, ready to answer unless told not to wait."""
    server = Server(*arguments, **options)
    try:
        yield server
    finally:
        server.close()


def module_server(*arguments, chat=None, **options):
    """A fixture: a server for a module's tests, which has to end well; `chat` is a tiny family."""

    @pytest.fixture(scope="module")
    def server(chat_folder):
        model = ("--model", str(chat_folder(chat)), "--drafter", "ngram") if chat else ()
        with serving(*model, *arguments, **options) as server:
            yield server
            server.end_well()

    return server


class Gate:
    """A drafter's file that holds its server up: while that loads, or in each draft."""

    _SOURCE = """
import time
from pathlib import Path
from drafters import Draft, Drafter
def wait(name):
    while not Path(__file__).with_name(name).exists():
        time.sleep(0.01)
wait("load")
class Gate(Drafter):
    def propose(self, state, max_tokens):
        Path(__file__).with_name("held").touch()
        wait("draft")
        return Draft([])
"""

    def __init__(self, folder, model):
        self._folder = folder
        (folder / "gate.py").write_text(self._SOURCE)
        drafter = ("--drafter", f"{folder / 'gate.py'}:Gate")
        self.arguments = ("--model", str(model), "--fixed-k", *drafter)
        self.open("load")
        self.open()

    def open(self, name="draft"):
        (self._folder / name).touch()

    def shut(self, name="draft"):
        (self._folder / "held").unlink(missing_ok=True)
        (self._folder / name).unlink()

    def wait_until_held(self):
        """Until a request stands before the gate; who comes then waits behind it."""
        until((self._folder / "held").exists)

    def hold(self, pool, server, requests):
        """Shut it before requests (path, fields), taken one after another: their answers to be."""
        self.shut()
        answers = []
        for i, (path, fields) in enumerate(requests, 1):
            answers.append(pool.submit(server.call, "POST", path, fields))
            self.wait_until_held()
            server.wait_until_taken(i)
        return answers


def at_once(*calls):
    """What each returns; all of them are under way at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(*each) for each in calls]]


def until(condition):
    """Wait for it; fails after a minute."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def events_of(data):
    """What a whole stream said, without pings and its [DONE]."""
    lines = [line for line in data.decode().split("\n\n") if line and line != ": ping"]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def end_of(answer):
    """(status, body) of what `call` returned; of a stream the last event is the body."""
    status, headers, data = answer
    assert b"Traceback" not in data
    is_stream = headers["Content-Type"].startswith("text/event-stream")
    return status, events_of(data)[-1] if is_stream else json.loads(data)


def text_of(body):
    """Of the only choice."""
    (choice,) = body.get("choices", [body])
    return choice["text"] if "text" in choice else choice["message"]["content"]


def read_all(client):
    """Until the server closes; which is a reset where it had not read all that was sent."""
    parts = []
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def parse(response):
    head, _, body = response.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    return int(status.split()[1]), dict(h.split(": ", 1) for h in headers), json.loads(body)


def request(route, body, *headers):
    """A POST of JSON as bytes, with these headers beside the usual ones."""
    usual = ["Host: localhost", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([f"POST {route} HTTP/1.1", *usual, *headers, "", ""]).encode() + body


def is_error(body, param=None):
    """Whether it is the one error body, naming the field."""
    body = json.loads(body) if isinstance(body, bytes) else body
    assert list(body) == ["error"], body
    error = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
    assert "Traceback" not in error["message"] and "<" not in error["message"][:1]
    return error["param"] == param
