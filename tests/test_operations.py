"""A server that starts or ends answers whoever asks it, and loses no request that it has taken.

Its log has a line of each request and shows no text, and code that comes with a model does not run
unless that was asked for. All but the last is tested in the real process, on a real socket. Load
and deadlines are in test_server.py, the command line's mistakes in test_command_line.py.
"""

import ctypes
import json
import logging
import os
import pty
import queue
import re
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from itertools import product
from pathlib import Path
from subprocess import PIPE, Popen
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from started import (
    COLOURS,
    GOOD,
    PATHS,
    SCRIPT,
    Client,
    at_once,
    end_of,
    free_port,
    module_server,
    serving,
    until,
)  # fmt: skip

from runtime.kernels import library
from runtime.statistics import Statistics
from runtime.values import Request
from server import core, log, page
from server.http import base_app
from server.options import MAX_QUEUED, Options
from server.page import INDEX, files
from server.serving import room_for
from server.worker import Job

server = module_server("--fixed-k")
FIELDS = {"prompt": "1, 2, 3,", "max_tokens": 20}
LONG = {"prompt": list(range(100, 1100)), "max_tokens": 4}


@contextmanager
def process(*arguments, **options):
    """A client, and the server in a Python of its own, as a user starts it."""
    client = Client(free_port())
    command = [sys.executable, SCRIPT, *arguments, "--port", str(client.port)]
    process = Popen(command, cwd=ROOT, **options)
    try:
        yield client, process
    finally:
        process.kill()
        process.communicate()


def test_every_queue_in_its_range_has_room_where_so_many_files_may_be_open(monkeypatch):
    """The default one starts with 1,024 files, as many systems have them."""
    resource = pytest.importorskip("resource")
    most = Options(max_queued=MAX_QUEUED, max_running=256)
    for allowed, options in ((1024, Options()), (1 << 20, most), (1024, most)):
        asked = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=allowed: (256, n))
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits, to=asked: to.append(limits))
        if allowed < options.max_queued:
            with pytest.raises(ValueError, match="--max-queued ask for 4384 connections, and 640 "):
                room_for(options)
        else:
            num_threads, room = room_for(options)
            assert num_threads < room < asked[0][0] <= allowed


def test_who_asks_before_the_model_has_loaded_is_told_to_come_back(gate):
    gate.shut("load")
    with serving(*gate.arguments, wait=False) as server:
        until(lambda: "loading" in server.log())
        (status, body), name = end_of(server.call("GET", "/health")), Path(gate.arguments[1]).name
        assert status == 503 and body["status"] == "loading" and body["elapsed_s"] >= 0
        assert body["model"] == name
        until(lambda: f"reading the weights of {name}" in server.health()["stage"])
        assert b"<h1>" in server.call("GET", "/page/")[2]  # the page, which asks for that
        assert {server.refusal(path) for path in PATHS} == {"the model is being loaded"}
        told = end_of(server.call("POST", "/v1/messages", GOOD))[1]
        assert told["error"]["type"] == "overloaded_error"  # as Anthropic has it
        assert "serving on" not in server.log()
        gate.open("load")
        until(server.is_ready)
        assert server.generate(**GOOD)[0] == 200
        with socket.socket() as probe:  # to this machine alone: 0.0.0.0 would have this one, too
            assert probe.connect_ex(("127.0.0.2", server.port)) != 0


def test_a_start_that_fails_says_so_in_one_line_while_clients_ask(tmp_path):
    """Python has no threads for answers while it ends."""
    (tmp_path / "config.json").write_text("{")
    options = {"stdout": PIPE, "stderr": PIPE, "text": True}
    with process("--model", str(tmp_path), **options) as (client, started):

        def ask():
            while started.poll() is None:
                with suppress(HTTPException):
                    if client.is_ready() is None:  # it does not listen yet, and needs the processor
                        time.sleep(0.05)

        at_once(*[(ask,)] * 4)
        *others, last = started.stderr.read().splitlines()
    assert started.returncode == 2 and last.startswith("error: cannot load")
    assert all(json.loads(line)["logger"] == "progress" for line in others)


@pytest.mark.skipif(sys.platform != "linux", reason="tgkill is Linux's")
def test_sigterm_while_loading_ends_the_server(gate):
    """Also where another thread gets it, as if it came just before the main thread sleeps."""
    gate.shut("load")
    with serving(*gate.arguments, wait=False) as server:
        until(lambda: "loading" in server.log())
        until(lambda: "reading the weights" in server.health()["stage"])
        others = {int(name) for name in os.listdir(f"/proc/{server.pid}/task")} - {server.pid}
        assert ctypes.CDLL(None).tgkill(server.pid, min(others), signal.SIGTERM) == 0
        assert server.exit_code() == 0 and "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("stdout", "number", "times"),  # a terminal that closes sends several
    [(None, signal.SIGTERM, 1), ("closed", signal.SIGTERM, 1), ("/dev/full", signal.SIGHUP, 2)],
)
def test_the_first_signal_finishes_what_was_taken_and_exits_0(gate, stdout, number, times):
    """Running and queued, streaming and not; who comes then is refused."""
    limit, pool = ("--max-running", "2"), ThreadPoolExecutor(4)
    with serving(*gate.arguments, *limit, stdout=stdout) as server, pool:
        kinds = [(path, stream) for path in PATHS for stream in (False, True)]
        answers = gate.hold(pool, server, [(path, FIELDS | {"stream": s}) for path, s in kinds])
        for _ in range(times):
            server.send(number)
        until(lambda: server.health()["status"] == "draining")
        assert server.call("GET", "/health")[0] == 503
        assert server.refusal() == "the server is shutting down"
        gate.open()
        for status, body in (end_of(answer.result()) for answer in answers):
            assert status == 200 and "error" not in body
            if "usage" in body:  # a chunk of /v1 has it only where that was asked for
                assert body["usage"]["completion_tokens"] == 20
        assert server.exit_code() == 0
        assert stdout or "finishing 4 requests" in server.log()
        assert "cut off" not in server.log() and "Traceback" not in server.log()


def test_at_a_load_of_64_each_answer_that_is_cut_off_says_so(gate):
    """Eight run, the others wait. A stream that ended without an error event would look whole."""
    pool, count = ThreadPoolExecutor(64), 64
    with serving(*gate.arguments, constants={"grace_period": 0.3}) as server, pool:
        gate.shut()
        asked = [(PATHS[i % 2], FIELDS | {"stream": i % 4 < 2}) for i in range(count)]
        answers = [pool.submit(server.call, "POST", *each) for each in asked]
        server.wait_until_taken(count)
        server.send(signal.SIGTERM)
        for answer, (_, fields) in zip(answers, asked, strict=True):
            status, body = end_of(answer.result())
            assert status == (200 if fields["stream"] else 503)
            assert body["error"]["message"] == "the server is shutting down"
            assert body["error"]["code"] == "unavailable"
            assert fields["stream"] or answer.result()[1]["Retry-After"] == "1"
        assert server.exit_code() == 0 and "64 requests were cut off" in server.log()
        assert "Traceback" not in server.log()


_CLOSES = """import os
from contextlib import contextmanager, suppress
from drafters import Draft, Drafter
class Closes(Drafter):
    name = "closes"
    def propose(self, state, max_tokens):
        for number in range(3):
            with suppress(OSError):
                os.close(number)
        return Draft(state[-max_tokens:])
"""


def test_a_drafter_that_closes_the_standard_descriptors_costs_no_answer(tiny_folder, tmp_path):
    """A connection would get their numbers: the log would go there, and the next call close it."""
    (tmp_path / "closes.py").write_text(_CLOSES)
    closes = ("--drafter", f"{tmp_path / 'closes.py'}:Closes", "--fixed-k")
    with serving("--model", str(tiny_folder("llama")), *closes) as server:
        fields = {"prompt": COLOURS, "max_tokens": 8}
        expected = server.generate(**fields, speculative=False)[1]["token_ids"]
        for _ in range(4):
            assert server.generate(**fields)[1]["token_ids"] == expected


def test_the_second_signal_exits_1_at_once(gate):
    """SIGINT is one, though the server was started with it ignored, as a shell's background job."""
    with serving(*gate.arguments) as server:
        gate.shut()
        with server.connect("/generate", FIELDS):
            gate.wait_until_held()
            server.send(signal.SIGINT)
            until(lambda: "finishing 1 requests" in server.log())
            server.send(signal.SIGINT)
            assert server.exit_code() == 1


ASKED = [("/generate", GOOD | more) for more in (
    {}, {"stream": True, "trace": True, "logprobs": 3, "temperature": 1},
    {"compare": True, "drafter": "mtp"}, {"drafter": "own"}, LONG)]  # fmt: skip
# It tells how many threads of its process Python does not know; wrong for a moment if one ends now.
_OWN = """import os, threading, torch
from pathlib import Path
from drafters import Draft, Drafter
class Own(Drafter):
    name = "own"
    def open(self, prompt, sampling, noise):
        return torch.ones(600, 600).exp()
    def propose(self, state, max_tokens):
        num_native = len(os.listdir("/proc/self/task")) - threading.active_count()
        Path(__file__).with_name("told").write_text(str(num_native))
        return Draft([int((state @ state)[0, 0]) % 9])
    def observe(self, state, verdict):
        pass
"""


def test_no_thread_but_the_engine_s_computes_and_a_log_that_nobody_reads_stops_nothing(tmp_path):
    """torch keeps a pool of threads for each thread that has ever computed: passes wait for cores.

    Beside Python's own threads there are two pools: the kernels', where they are compiled, and
    torch's, which computes while the model is loaded. Each has a thread less than OMP_NUM_THREADS.
    A pipe of the log holds 64 KiB; the lines beyond wait in memory, and at the end nobody reads.
    """
    num_computing, own = 2, tmp_path / "own.py"
    environment = os.environ | {"OMP_NUM_THREADS": str(num_computing)}
    for name in ("OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        environment.pop(name, None)
    own.write_text(_OWN)
    words = ("--model", "embedded", "--drafter", f"{own}:Own")
    with process(*words, env=environment, stdout=PIPE, stderr=PIPE) as (server, started):
        until(lambda: server.is_ready() or started.poll() is not None)
        assert {server.call("POST", path, fields)[0] for path, fields in ASKED} == {200}
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: server.generate(**GOOD | LONG), range(3)))
        for path in ("/page/stream.js", "/metrics"):
            assert server.call("GET", path)[0] == 200
        num_native = (1 if library.why_not() else 2) * (num_computing - 1)

        def is_so():
            server.generate(prompt="x", max_tokens=4, drafter="own", fixed_k=True)
            return (tmp_path / "told").read_text() == str(num_native)

        until(is_so)
        path = "/" + "x" * 200
        assert {server.call("GET", path)[0] for _ in range(250)} == {404}  # some 90 KB of lines
        assert server.generate(**GOOD)[0] == 200
        started.stdout.close()
        started.stderr.close()
        started.terminate()
        assert started.wait(60) == 0  # Python itself writes at its end, and would say 120


SECRET = "correct horse battery staple"


def lines_of(server):
    """Of the requests that the log has."""
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    return {line["id"]: line for line in lines if "id" in line}


def test_an_answer_gets_an_id_where_the_client_s_is_none(server):
    """What is asked all the time has no line of the log."""
    for path, given in product(["/health", "/nope", "/generate"], ["bad id\t", "x" * 500, ""]):
        _, answered, _ = server.call("GET", path, None, {"X-Request-Id": given})
        name = answered["X-Request-Id"]
        assert 16 <= len(name) <= 32
        until(lambda path=path, name=name: path == "/health" or name in lines_of(server))
        assert path != "/health" or name not in lines_of(server)


def test_each_request_is_a_line_of_the_log_under_the_client_s_id(server):
    common = {"prompt": COLOURS, "max_tokens": 20}
    stream = {"stream": True, "max_tokens": 5, "speculative": False}
    for name, path, fields in (
        ("one", "/generate", {"drafter": "ngram"}),
        ("two", "/v1/completions", stream),
        ("three", "/generate", {"temperature": 0.7, "n": 3}),
    ):
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        answer = server.call("POST", path, common | fields, headers)
        assert answer[0] == 200 and answer[1]["X-Request-Id"] == name
        assert path == "/generate" or end_of(answer)[1]["id"] == "cmpl-two"
    until(lambda: "three" in lines_of(server))
    one, two, three = (lines_of(server)[name] for name in ("one", "two", "three"))
    assert list(one) == [
        "time", "id", "method", "path", "status", "finish", "drafter", "prompt_tokens", "tokens",
        "passes", "acceptance", "queue_ms", "first_token_ms", "ms",
    ]  # fmt: skip
    assert (one["status"], one["finish"], one["tokens"]) == (200, "length", 20)
    assert one["drafter"] == "ngram" and 0 < one["acceptance"] <= 1 and one["passes"] < 20
    assert 0 <= one["queue_ms"] < one["first_token_ms"] < one["ms"]
    assert (two["path"], two["tokens"], two["drafter"]) == ("/v1/completions", 5, None)
    assert two["passes"] == 5 and two["acceptance"] is None
    told = [
        choice["metrics"]["speculative_decoding"] for choice in json.loads(answer[2])["choices"]
    ]
    kept, drafted = (sum(each[f"num_{name}_tokens"] for each in told)
                     for name in ("accepted_draft", "draft"))  # fmt: skip
    assert three["passes"] == sum(each["target_passes"] + 1 for each in told)
    assert three["acceptance"] == round(kept / drafted, 4) and three["tokens"] == 60


def test_who_left_amid_a_later_text_is_told_to_have_left(caplog):
    job = Job([Request([1], 2, num_prompts=2, n=1)] * 2, 9.0)
    job.runs[0].sequence = Mock(finish_reason="length", statistics=Statistics())
    job.cancel()
    with caplog.at_level(logging.INFO):
        log._write({"status": 200}, None, job, time.monotonic())
    assert caplog.records[-1].msg["finish"] == "cancelled"


def test_a_line_is_lost_where_too_many_wait_and_told_where_it_cannot_be_written(capsys):
    (waiting := queue.Queue(1)).put("one")
    for lines, said in ((waiting, False), (queue.Queue(), True)):
        record = logging.LogRecord("x", logging.INFO, "x.py", 1, "%d", ("no number",), None)
        if lines is waiting:
            record.args = (1,)
        log._Handler(lines).handle(record)
        assert ("Logging error" in capsys.readouterr().err) is said


def test_the_log_on_a_terminal_is_for_people(gate):
    reader, end = pty.openpty()
    os.set_blocking(reader, False)
    said = bytearray()

    def lines():
        with suppress(BlockingIOError):
            said.extend(os.read(reader, 1 << 16))
        return said.decode().splitlines()

    with serving(*gate.arguments, stderr=os.ttyname(end)) as server:
        plain = {"max_tokens": 3, "speculative": False}
        assert server.generate(prompt=f"{SECRET} \u202e", **plain)[0] == 200
        assert server.call("GET", "/%1b[31m")[0] == 404
        until(lambda: any("/\\x1b[31m" in line for line in lines()))
    time_and_level = r"\d\d:\d\d:\d\d (INFO|WARNING|ERROR) +"
    shown = [line for line in lines() if re.match(time_and_level, line)]  # no bars of transformers
    assert "{" not in said.decode() and all(line.isprintable() for line in shown)
    *_, answered, refused = shown
    words = r".* INFO +POST /generate: 3 tokens in 3 passes, no drafter, \d+ ms"
    assert re.fullmatch(words, answered)
    words = r".* WARNING +GET /\\x1b\[31m: answered with an error, status 404 .*"
    assert re.fullmatch(words, refused)


def test_what_was_written_or_read_is_in_no_line(server):
    written = server.generate(prompt=SECRET, max_tokens=12)[1]["text"].strip()
    assert len(written) > 8
    for path, body in {
        "/v1/completions": {"prompt": SECRET, "drafter": SECRET},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}]},
        f"/{SECRET.split()[0]}": {"prompt": SECRET},
        "/generate": f'{{"prompt": "{SECRET}',
    }.items():
        status, answered, _ = server.call("POST", path, body)
        assert status in (400, 404)
    until(lambda: answered["X-Request-Id"] in lines_of(server))
    assert SECRET not in server.log() and written not in server.log().replace("\\n", "\n")


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()
class MineConfig(LlamaConfig):
    model_type = "m"
class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""


def code_of_its_own(folder):
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names, "model_type": "m"}))
    (folder / "mine.py").write_text(CODE.format(ran=str(folder / "ran")))


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(("change", "flag", "words"), [
    (code_of_its_own, "--trust-remote-code", "code of its own, which is run with"),
    (pickled, "--allow-pickle", "loaded with"),
])  # fmt: skip
def test_what_may_run_code_is_loaded_only_if_asked_for(
    tiny_folder, tmp_path, capsys, change, flag, words
):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    change(folder)
    capsys.readouterr()  # of what made the model
    generation = ["--prompt", "x", "--max-tokens", "2", "--model", str(folder)]
    assert core.main(generation) == 2 and not (folder / "ran").exists()
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and f"{words} {flag} only" in said
    assert core.main([*generation, flag]) == 0
    assert (folder / "ran").exists() == (change is code_of_its_own)


FOREIGN = (  # what the page refers to outside, scripts and styles that CSP stops, text as HTML
    r"""(?:src|href|action|url|import|from|fetch|open)\W{1,4}(?:https?:)?//|@import"""
    r"""|<script[^>]*>[^<]|<style|\sstyle\s*=|<[a-z][^>]*\son\w+\s*=|javascript:"""
    r"""|(?:inner|outer|Adjacent)HTML|document\.write|eval\("""
)


@pytest.mark.parametrize(
    "name", [name for name in files() if not name.endswith((".json", ".woff2"))]
)
def test_the_page_is_of_its_folder_alone_and_inserts_text_as_text(name):
    file = ROOT / "server" / "page" / name
    text = file.read_text("utf-8")
    assert not re.search(FOREIGN, text)
    targets = re.findall(r'^(?:import|export) .*from "([^"]*)"', text, re.MULTILINE)
    if name == INDEX:
        targets += re.findall(r'(?:src|href|data-recording)="([^"]*)"', text)
    for target in targets:
        assert (file.parent / target).is_file() and not target.startswith("/"), target


def test_the_page_stands_below_its_own_path_also_behind_a_proxy_that_adds_one(server):
    """Whoever asks for / is led on relatively. A page that a server of ours sends is marked."""
    status, headers, _ = server.call("GET", "/")
    assert status == 302 and headers["Location"] == "page/"
    assert server.call("GET", "/page/index.html")[2] == server.call("GET", "/page/")[2]
    status, headers, page = server.call("GET", "/page/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert page.startswith(b"<!doctype html>\n<html data-server ")
    assert b"data-server" not in (ROOT / "server" / "page" / INDEX).read_bytes()
    for name in files():
        status, headers, data = server.call("GET", f"/page/{name}")
        assert status == 200 and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert name == INDEX or data == (ROOT / "server" / "page" / name).read_bytes()


def test_each_chapter_links_to_its_task_which_is_sent_as_text(server):
    text = server.call("GET", "/page/")[2].decode()
    links = re.findall('Write it: <a href="(.+?)"><code>(.+?)</code></a></small>', text)
    assert len(links) == 11 == text.count("Write it: ")
    assert {url: ROOT / path for url, path in links} == {  # task 9 is for who has done these
        f"course/{path.name[0]}": path for path in (ROOT / "course" / "tasks").glob("[1-8]_*.py")
    }
    for url, path in links:
        status, headers, data = server.call("GET", f"/page/{url}")
        assert (status, data) == (200, (ROOT / path).read_bytes())
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_nothing_else_of_the_course_is_sent_and_without_it_nothing_is_linked(
    server, tmp_path, monkeypatch
):
    names = "0", "99", "", "2_truncate.py", "../1", "..%2f__main__.py", "%2e%2e/1"
    for name in names:
        status, _, body = server.call("GET", f"/page/course/{name}")
        assert status == 404 and body.count(b"\n") <= 1 and b"error" in body
    monkeypatch.setattr(page, "TASKS", tmp_path)
    (tmp_path / "1_gone.py").write_text("")
    page.register_page(app := base_app(Options()), {})
    (tmp_path / "1_gone.py").unlink()
    client = app.test_client()
    assert (
        client.get("/page/course/1").status_code == client.get("/page/course/2").status_code == 404
    )
    assert 'href="course' not in client.get("/page/").text
