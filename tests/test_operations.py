"""What whoever runs the server relies on: its start and end, its log, what it does not run.

All against the real process, on a real socket.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT
from test_server import (
    ENDLESS,
    GOOD,
    SCRIPT,
    call,
    connect,
    events_of,
    generate,
    health,
    seconds_until,
    start,
    wait_until_running,
)
from transformers import AutoModelForCausalLM

PATHS = ("/generate", "/v1/completions")


@pytest.fixture
def serving():
    """A function that starts servers; none outlives its test."""
    started = []

    def begin(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    yield begin
    for process, _ in started:
        process.kill()
        process.wait()


def lines_of(process):
    """The log's lines, those of requests and others, but not those of the start."""
    lines = [json.loads(line) for line in process.log().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("logger") != "serving.exact"]


# ------------------------------------------------------------------------------- start and end


def test_who_asks_before_the_model_has_loaded_is_told_to_come_back(serving):
    process, port = serving(wait=False)

    def is_open():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    seconds_until(is_open)
    status, _, data = call(port, "GET", "/health")
    assert status == 503 and json.loads(data) == {"status": "loading"}
    for path in PATHS:
        status, headers, data = call(port, "POST", path, GOOD)
        assert status == 503 and headers["Retry-After"] == "1"
        assert json.loads(data)["error"]["message"] == "the model is being loaded"
    assert "serving on" not in process.log()
    seconds_until(lambda: call(port, "GET", "/health")[0] == 200)
    assert generate(port, **GOOD)[0] == 200


def test_sigterm_while_loading_ends_the_server(serving):
    process, _ = serving(wait=False)
    seconds_until(lambda: "loading" in process.log())
    process.terminate()
    assert process.wait(40) == 0 and "Traceback" not in process.log()


def test_a_model_that_cannot_be_loaded_is_one_line_though_the_socket_is_open(serving):
    process, _ = serving("--model", "/nowhere/model", wait=False)
    assert process.wait(40) == 2
    assert process.log().splitlines()[-1] == "error: model folder /nowhere/model not found"
    assert "Traceback" not in process.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_finishes_what_was_taken_and_exits_0(serving, number):
    """Running and queued, streaming and not; who comes then is refused."""
    process, port = serving("--max-running", "2")
    fields = ENDLESS | {"max_tokens": 150}
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(call, port, "POST", path, fields | {"stream": stream})
            for path in PATHS
            for stream in (False, True)
        ]
        seconds_until(lambda: health(port)["num_requests_waiting"] == 2)
        process.send_signal(number)
        seconds_until(lambda: health(port)["status"] == "draining")
        assert call(port, "GET", "/health")[0] == 503
        status, headers, data = call(port, "POST", "/generate", GOOD)
        assert status == 503 and headers["Retry-After"] == "1"
        assert json.loads(data)["error"]["message"] == "the server is shutting down"
        for answer in answers:
            status, headers, data = answer.result()
            is_stream = headers["Content-Type"].startswith("text/event-stream")
            body = events_of(data)[-1] if is_stream else json.loads(data)
            assert status == 200
            if "usage" in body:  # a chunk of /v1 has it only where that was asked for
                assert body["usage"]["completion_tokens"] == 150
            assert "error" not in body
    assert process.wait(40) == 0
    assert "finishing 4 requests" in process.log() and "cut off" not in process.log()


@pytest.mark.parametrize("path", PATHS)
def test_an_endless_stream_is_cut_off_at_the_end_of_the_grace_period(serving, path):
    """With an error event, as a stream that merely ended would look whole."""
    process, port = serving("--grace-period", "0.5")
    with ThreadPoolExecutor(1) as pool:
        fields = ENDLESS | {"max_tokens": 2000, "stream": True}
        answer = pool.submit(call, port, "POST", path, fields)
        wait_until_running(port)
        process.terminate()
        _, _, data = answer.result()
        assert events_of(data)[-1]["error"]["message"] == "the server is shutting down"
        assert process.wait(10) == 0
    assert "1 requests were cut off" in process.log() and "Traceback" not in process.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_exits_1_at_once(serving, number):
    process, port = serving()
    with connect(port, "/generate", ENDLESS | {"max_tokens": 2000}):
        wait_until_running(port)
        process.send_signal(number)
        seconds_until(lambda: "finishing 1 requests" in process.log())
        process.send_signal(number)
        assert process.wait(10) == 1


def test_sigterm_ends_a_server_that_was_started_in_the_background_of_a_shell(serving):
    """Such a shell has SIGINT ignored in its jobs."""
    ignore = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process, _ = serving()
    finally:
        signal.signal(signal.SIGINT, ignore)
    process.terminate()
    assert process.wait(40) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "80000"], "must be from 1 to 65535"),
        (["--port", "0"], "must be from 1 to 65535"),
        (["--port", "5000", "--num-speculative-tokens", "0"], "must be from 1 to 16"),
        (["--port", "5000", "--stall-limit", "-1"], "must be more than 0"),
        (["--port", "5000", "--api-key", ""], "--api-key is empty"),
        (["--port", "TAKEN"], "cannot listen on 127.0.0.1:"),
        (["--port", "5000", "--host", "no.such.host.invalid"], "cannot listen on no.such"),
    ],
)
def test_an_address_or_option_that_cannot_be_is_one_line(arguments, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = [port if argument == "TAKEN" else argument for argument in arguments]
        run = subprocess.run(
            [sys.executable, SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True
        )
    assert run.returncode == 2 and message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1 and run.stdout == ""


def test_the_server_listens_to_this_machine_alone_unless_told_otherwise(serving):
    _, port = serving()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port)) != 0  # 0.0.0.0 would have this one, too


# ---------------------------------------------------------------------------------- ids and log


def test_every_answer_has_the_request_s_id_and_the_log_one_line_of_it(serving):
    process, port = serving()
    sent = {"Content-Type": "application/json", "X-Request-Id": "from-the-client:1"}
    asked = {
        "/generate": GOOD | {"prompt": "red, green, blue, red, green,", "max_tokens": 30},
        "/v1/completions": GOOD | {"stream": True, "max_tokens": 5, "speculative": False},
    }
    for i, (path, fields) in enumerate(asked.items()):
        headers = sent | {"X-Request-Id": f"from-the-client:{i}"}
        status, answered, data = call(port, "POST", path, fields, headers)
        assert status == 200 and answered["X-Request-Id"] == f"from-the-client:{i}"
        if "v1" in path:
            assert events_of(data)[0]["id"] == f"cmpl-from-the-client:{i}"
    ids = set()
    for method, path in (("GET", "/health"), ("GET", "/nope"), ("POST", "/generate"), ("GET", "/")):
        for given in ("bad id\t", "x" * 500, ""):
            _, answered, _ = call(port, method, path, None, {"X-Request-Id": given})
            assert 16 <= len(answered["X-Request-Id"]) <= 32
            ids.add(answered["X-Request-Id"])
    assert len(ids) == 12
    with connect(port, "/generate", ENDLESS | {"max_tokens": 2000}):
        wait_until_running(port)
    seconds_until(lambda: any(line.get("finish") == "cancelled" for line in lines_of(process)))
    lines = {line["id"]: line for line in lines_of(process)}
    line = lines["from-the-client:0"]
    assert list(line) == [
        "time", "id", "method", "path", "status", "finish", "drafter", "prompt_tokens", "tokens",
        "passes", "acceptance", "queue_ms", "first_token_ms", "ms",
    ]  # fmt: skip
    assert (line["status"], line["finish"], line["tokens"]) == (200, "length", 30)
    assert line["drafter"] == "auto" and 0 < line["acceptance"] <= 1 and line["passes"] < 30
    assert 0 <= line["queue_ms"] < line["first_token_ms"] < line["ms"]
    line = lines["from-the-client:1"]
    assert (line["path"], line["tokens"], line["drafter"]) == ("/v1/completions", 5, None)
    assert line["passes"] == 5 and line["acceptance"] is None
    refused = [line for line in lines.values() if line["status"] == 415]
    assert len(refused) == 3 and refused[0]["finish"] is None and refused[0]["path"] == "/generate"
    assert not any(line["path"] in ("/health", "/") for line in lines.values())


SECRET = "correct horse battery staple"


@pytest.mark.parametrize("arguments", [[], ["--log-prompts"]])
def test_prompts_and_outputs_are_logged_only_where_asked_for(serving, arguments):
    process, port = serving(*arguments, "--request-timeout", "5")
    _, answer = generate(port, prompt=SECRET, max_tokens=12)
    written = answer["text"].strip()
    assert len(written) > 8
    chat = {"messages": [{"role": "user", "content": SECRET}]}
    for path, body in {
        "/generate": {"prompt": SECRET, "max_tokens": -1},
        "/v1/completions": {"prompt": SECRET, "drafter": SECRET},
        "/v1/chat/completions": chat,
        f"/{SECRET.split()[0]}": {"prompt": SECRET},
    }.items():
        assert call(port, "POST", path, body)[0] in (400, 404)
    assert call(port, "POST", "/generate", f'{{"prompt": "{SECRET}')[0] == 400
    seconds_until(lambda: len(lines_of(process)) == 6)
    log = process.log()
    assert (SECRET in log) == (written in log.replace("\\n", "\n")) == bool(arguments)
    if arguments:
        line = lines_of(process)[0]
        assert (line["prompt"], line["text"]) == (SECRET, answer["text"])


def test_the_start_says_what_was_checked_for_equal_bits(serving):
    process, port = serving()
    health = json.loads(call(port, "GET", "/health")[2])
    assert health["exactness"]["seconds"] > 0
    assert health["bitwise_lossless"] == (health["exactness"]["doubt"] is None)
    said = [line for line in process.log().splitlines() if "serving.exact" in line]
    assert len(said) == 1 and "weight matrices" in said[0] and "threads" in said[0]


def test_a_request_past_its_deadline_is_logged_as_that(serving):
    process, port = serving("--request-timeout", "0.3")
    for stream in (False, True):
        call(port, "POST", "/generate", ENDLESS | {"max_tokens": 2000, "stream": stream})
    seconds_until(lambda: len(lines_of(process)) == 2)
    assert [line["status"] for line in lines_of(process)] == [504, 200]
    for line in lines_of(process):
        assert line["finish"] == line["error"] == "timeout" and line["tokens"] < 2000


def test_a_log_that_nobody_reads_stops_no_answer():
    """A pipe holds 64 KiB; the lines beyond wait in memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, SCRIPT, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=subprocess.PIPE)
    try:
        process.stdout.readline()
        process.stdout.readline()
        path = "/" + "x" * 200
        assert {call(port, "GET", path)[0] for _ in range(400)} == {404}  # some 140 KB of lines
        assert generate(port, **GOOD)[0] == 200
        process.terminate()
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.communicate()


# --------------------------------------------------------------------------- what is not run


def run_once(folder, *arguments):
    command = [sys.executable, SCRIPT, "--prompt", "x", "--max-tokens", "2", "--drafter", "ngram"]
    command += ["--model", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_code_that_comes_with_a_model_runs_only_where_that_was_asked_for(tiny_folder, tmp_path):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names, "model_type": "m"}))
    (folder / "mine.py").write_text(
        f"""
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({str(ran)!r}).touch()

class MineConfig(LlamaConfig):
    model_type = "m"

class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""
    )
    refused = run_once(folder)
    assert refused.returncode == 2 and not ran.exists()
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "code of its own, which is run with --trust-remote-code only" in refused.stderr
    assert run_once(folder, "--trust-remote-code").returncode == 0 and ran.exists()


def test_pickled_weights_are_loaded_only_where_that_was_asked_for(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    refused = run_once(folder)
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert "loaded with --allow-pickle only" in refused.stderr
    assert run_once(folder, "--allow-pickle").returncode == 0
