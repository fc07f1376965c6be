"""Another engine behind this server's routes: a replayed conversation with a real vLLM.

The replayed answers were captured from the version that tests/vllm_conversation.json names. The
test against a vLLM that runs is marked `network`, as that has to be installed first:

    VLLM_URL=http://127.0.0.1:8000 python -m pytest -n0 -m network tests/test_engines.py
"""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from engine import CHAT, COLOURS, SAID, replaying
from server import (
    LIMIT_S,
    ROOT,
    call,
    connect,
    events_of,
    generate,
    health,
    is_error,
    serving,
    until,
)  # fmt: skip

from engines import KEY_VARIABLE, app, child, client, load, relay
from messages import RequestError
from models.loading import StartError
from serving.options import Options, parse_arguments

TEXT = " blue, red, green, blue, red, green,"
LONG = SAID["long"][1]


@pytest.fixture
def replay():
    with replaying() as server:
        yield server


@pytest.fixture
def ask(replay, request):
    """(status, body or events) of a POST, under limits that a test may give."""
    engine = client.Engine.ask(client.Client(replay.url))
    options = Options(max_running=8, **getattr(request, "param", {}))
    asked = app.create_app(engine, options).test_client()

    def post(path, body):
        answer = asked.post(path, json=body)
        is_stream = answer.mimetype == "text/event-stream"
        return answer.status_code, events_of(answer.data) if is_stream else answer.json

    post.client = asked
    return post


def said(ask, name):
    return ask(*SAID[name])


def test_an_answer_has_the_engines_text_and_its_acceptance(ask):
    status, body = said(ask, "plain")
    assert status == 200 and body["text"] == TEXT and len(body["token_ids"]) == 12
    assert body["finish_reason"] == "length" and body["usage"]["prompt_tokens"] == 10
    figures = body["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] == 10 and figures["num_accepted_draft_tokens"] == 10
    assert figures["acceptance_histogram"] == [0, 0, 0, 0, 0, 2]
    assert figures["draft_acceptance_rate"] == 1.0 and figures["mean_acceptance_length"] == 6.0
    assert figures["target_passes"] is None  # which it does not tell
    assert len(said(ask, "ids")[1]["token_ids"]) == 5
    assert said(ask, "stopped")[1]["finish_reason"] == "stop"
    assert said(ask, "seeded")[1]["seed"] == 7


def test_a_stream_has_the_same_text_in_events(ask):
    _, (*events, last) = said(ask, "streamed")
    assert "".join(event["text"] for event in events) == last["text"] == TEXT
    tokens = [token for event in events for token in event["tokens"]]
    assert [token["id"] for token in tokens] == last["token_ids"]
    assert {token["kind"] for token in tokens} == {None}


def test_log_probabilities_and_openais_routes_have_their_own_shapes(ask):
    first = said(ask, "logprobs")[1]["logprobs"][0]
    assert first["token"] == " blue" and first["id"] == 1442 and first["logprob"] < 0
    assert first["top_logprobs"] == [{"id": None, "token": " blue", "logprob": first["logprob"]}]
    choice = said(ask, "completion")[1]["choices"][0]
    assert choice["text"] == TEXT and choice["logprobs"]["tokens"][0] == " blue"
    message = said(ask, "chat")[1]["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"]
    _, chunks = said(ask, "chat_streamed")
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(parts) == message["content"]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] == 5
    assert ask.client.get("/v1/models").json["data"][0]["id"] == "target"


def test_defaults_limits_and_the_key_of_ours_are_sent(replay, ask):
    ask("/generate", {"prompt": COLOURS, "max_tokens": 9999})
    _, sent, _ = replay.seen[-1]
    assert sent["temperature"] == 0.0 and sent["top_k"] == -1 and sent["repetition_penalty"] == 1.0
    assert "seed" not in sent and sent["max_tokens"] == 2048  # as long as the context
    client.Client(replay.url, "secret").ask("/version")
    assert replay.seen[-1][2] == "Bearer secret"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trace", True), ("compare", True), ("drafter", "none"), ("num_speculative_tokens", 3),
        ("verification", "coupled"), ("temperature", -1), ("prompt", [1] * 3000),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_do_is_refused_by_name(ask, field, value):
    status, body = ask("/generate", {"prompt": COLOURS} | {field: value})
    assert status == 400 and is_error(body, field)


@pytest.mark.parametrize("name", ["refused", "refused_stream"])
def test_what_the_engine_refuses_is_the_clients_mistake(ask, name):
    status, body = said(ask, name)
    assert status == 400 and "out of vocabulary" in body["error"]["message"]


def test_health_and_metrics_have_the_engines_acceptance_and_null_for_the_rest(ask):
    answer = ask.client.get("/health")
    body = answer.json
    assert answer.status_code == 200 and body["engine"] == {"name": "vllm", "version": "0.32.0"}
    assert body["model"] == "target" and body["drafters"] == ["engine"] and body["target"] is None
    figures = body["speculative_decoding"]
    assert figures["num_draft_tokens"] > figures["num_accepted_draft_tokens"] > 0
    assert len(figures["acceptance_rate_per_position"]) == figures["num_spec_tokens"] == 5
    assert figures["num_recovered_tokens"] is None
    text = ask.client.get("/metrics").data.decode()
    assert "\nspec_decode_num_accepted_tokens_per_pos_total{position=" in text
    assert "\ngeneration_tokens_total " in text and "vllm" not in text


def test_health_says_when_the_engine_is_gone(ask, replay):
    replay.shutdown()
    replay.server_close()
    answer = ask.client.get("/health")
    assert answer.status_code == 503 and answer.json["status"] == "dead"
    status, body = said(ask, "plain")
    assert status == 503 and is_error(body) and "cannot be reached" in body["error"]["message"]


def test_an_engine_without_metrics_is_not_gone(ask, replay, monkeypatch):
    replay.told["turns"] = [turn for turn in replay.told["turns"] if turn["path"] != "/metrics"]
    answer = ask.client.get("/health")
    assert answer.status_code == 200 and answer.json["status"] == "ok"
    assert answer.json["speculative_decoding"]["num_draft_tokens"] is None
    (warning,) = answer.json["warnings"]
    assert "tells no metrics" in warning

    def hang(*_):
        raise client._silent(1.0)

    monkeypatch.setattr(client.Client, "metrics", hang)
    answer = ask.client.get("/health")
    assert answer.status_code == 503 and answer.json["status"] == "stuck"


def test_an_engine_that_breaks_off_ends_streams_with_an_error(ask, replay):
    replay.cut = 2
    _, events = said(ask, "long")
    assert "text" in events[0] and "broke off" in events[-1]["error"]["message"]
    status, body = said(ask, "plain")
    assert status == 502 and is_error(body)
    replay.cut = None
    for turn in replay.told["turns"]:
        if turn["path"].endswith("completions"):
            turn["pieces"] = turn["pieces"][:1]
    assert "before its answer was complete" in said(ask, "long")[1][-1]["error"]["message"]


def test_an_engine_that_answers_500_is_a_502(ask, replay):
    replay.status = 500
    for name in ("plain", "long", "plain", "plain"):  # also before a stream has begun
        assert said(ask, name)[0] == 502
    assert ask.client.get("/health").json["status"] == "failing"
    replay.status = None
    said(ask, "plain")
    assert ask.client.get("/health").json["status"] == "ok"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"stall_limit": 0.3}, "the engine has said nothing for 0.3 s"),
        ({"request_timeout": 0.5}, "the request took too long"),
    ],
    indirect=["ask"],
)
def test_an_engine_that_hangs_is_a_504(ask, replay, message):
    replay.hang = 1
    status, body = said(ask, "plain")
    assert status == 504 and body["error"]["message"] == message
    assert body["error"]["code"] == said(ask, "long")[1][-1]["error"]["code"] == "timeout"


def test_limits_are_ours_and_who_leaves_before_the_engine_answers_makes_room_for_the_next():
    """No head of an answer comes: the engine takes the connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = client.Client(f"http://127.0.0.1:{silent.getsockname()[1]}")
        places = relay.Relay(engine, "m", Options(max_running=1, max_queued=2))
        first, second, third = (places.submit(relay.Wanted(), lambda: False) for _ in range(3))
        with pytest.raises(RequestError, match="2 requests wait already"):
            places.submit(relay.Wanted(), lambda: False)
        second.cancel()
        assert (places.num_running, places.num_waiting) == (1, 1)
        first.cancel()
        until(lambda: third.began and not places.num_waiting)  # it begins before it is counted
        assert (places.num_running, places.num_waiting) == (1, 0) and first.failure is None
        third.cancel()
        assert places.drain(LIMIT_S) == 0


@pytest.fixture(scope="module")
def server():
    with replaying() as replay:
        with serving("--engine", replay.url) as server:
            server.replay = replay
            yield server
            server.end_well()


def test_a_client_that_leaves_is_cancelled_in_the_engine(server):
    server.replay.hang, server.replay.num_left = 1, 0
    with connect(server.port, "/generate", LONG):
        until(server.replay.is_hanging.is_set)  # else it is its sending that fails
    until(lambda: health(server.port)["num_requests_running"] == 0)
    server.replay.go_on.set()  # only now: the engine is to look for us once we are gone
    until(lambda: server.replay.num_left == 1)
    server.replay.go_on.clear()
    server.replay.hang = None
    until(lambda: '"finish": "cancelled"' in server.log())


def test_a_client_that_reads_slowly_slows_the_engine(server, monkeypatch):
    """What the client does not take is not read from the engine: the engine can send no more."""
    asked = [turn for turn in server.replay.told["turns"] if turn["body"]]
    long = next(turn for turn in asked if turn["body"].get("max_tokens") == 200)
    event = json.loads(long["pieces"][1].split("\n")[0].removeprefix("data: "))
    event["choices"][0]["text"] = "x" * 4000
    pieces = [f"data: {json.dumps(event)}\n\n"] * 10_000 + long["pieces"][-1:]  # 40 MB
    sent = []
    sending = (sent.append(1) or piece for piece in pieces)
    monkeypatch.setattr(server.replay, "failing", lambda *_: sending)
    with connect(server.port, "/generate", LONG, buffer_bytes=4096):
        until(lambda: sent)
        stands = threading.Event()
        until(lambda: (n := len(sent)) and not stands.wait(1.0) and len(sent) == n)
        assert len(sent) < 10_000
    until(lambda: health(server.port)["num_requests_running"] == 0)


_VLLM = """#!{python}
import json, os, subprocess, sys, time
sys.path.insert(0, {tests!r})
from engine import Replay
print("loading the weights", flush=True)
while not os.path.exists({gate!r}):
    time.sleep(0.02)
if os.path.getsize({gate!r}):
    raise SystemExit("no such model")
own = subprocess.Popen(["sleep", "60"])  # as vLLM has, with the same output
port = int(sys.argv[sys.argv.index("--port") + 1])
with open({told!r}, "w") as file:
    json.dump([os.getpid(), os.environ["VLLM_API_KEY"], sys.argv[1:], own.pid], file)
Replay(port).thread.join()
"""


class Vllm:
    """A program named vllm that replays, and starts serving when it is let."""

    def __init__(self, folder):
        self.program, self.gate, self._told = (folder / name for name in ("vllm", "gate", "told"))
        names = {"gate": str(self.gate), "told": str(self._told), "python": sys.executable}
        self.program.write_text(_VLLM.format(tests=str(ROOT / "tests"), **names))
        self.program.chmod(0o755)
        self.arguments = ("--engine", str(self.program), "--model", str(folder))

    @property
    def told(self):
        """Its process, key and arguments, and the process that it has started."""
        return json.loads(self._told.read_text())

    def has_ended(self, number=0):
        """Whether it has; with 3, the process that it has started."""
        pid = self.told[number]
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.fixture
def vllm(tmp_path):
    return Vllm(tmp_path)


def test_a_vllm_of_ours_is_started_shown_and_ended(vllm):
    with serving(*vllm.arguments, "--max-running", "5", wait=False) as server:
        until(lambda: "loading the weights" in server.log())
        status, _, body = call(server.port, "GET", "/health")
        assert status == 503 and json.loads(body)["stage"] == "vllm: loading the weights"
        vllm.gate.touch()
        until(lambda: "serving on" in server.log())
        body = health(server.port)
        assert body["status"] == "ok" and body["drafters"] == ["ngram"]
        _, key, words, _ = vllm.told
        assert key not in " ".join(words) and words[words.index("--host") + 1] == "127.0.0.1"
        assert words[words.index("--max-num-seqs") + 1] == "5"
        status, body = generate(server.port, **SAID["plain"][1])
        assert status == 200 and body["text"] == TEXT
        server.end_well()
        until(lambda: vllm.has_ended() and vllm.has_ended(3))


def test_its_end_is_ours(vllm):
    vllm.gate.touch()
    with serving(*vllm.arguments) as server:
        os.kill(vllm.told[0], signal.SIGKILL)
        assert server.exit_code() == 1
        assert "vLLM has ended with status -9" in server.log()
        until(lambda: vllm.has_ended(3))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's death")
def test_it_ends_where_we_are_killed(vllm):
    vllm.gate.touch()
    with serving(*vllm.arguments) as server:
        server.send(signal.SIGKILL)
        until(vllm.has_ended)


def test_its_failure_to_load_is_told_with_its_last_words(vllm):
    vllm.gate.write_text("no")
    _, options = parse_arguments(["--port", "5000", *vllm.arguments])
    with pytest.raises(StartError, match="vLLM has ended with status 1 .*no such model$"):
        load(options, None)


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}),
        ({"drafter": "suffix", "suffix_cache": 0},
         {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
        ({"drafter": "none"}, None),
    ],
)  # fmt: skip
def test_a_drafter_is_written_as_vllm_has_it(given, config):
    """Those of models and of files: test_plan.py."""
    written = child.speculative_config(Options(model="T", num_speculative_tokens=5, **given))
    assert written == (config and {"num_speculative_tokens": 5} | config)


def test_a_drafter_from_a_file_is_found_by_vllm_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = child.environment("mine.py:Mine")
    assert given["SPECULATIVE_DRAFTER"] == f"{tmp_path / 'mine.py'}:Mine"
    assert given["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.parametrize("drafter", ["self_int8", "tree", "draft_model", "no/mine.py:Mine"])
def test_a_drafter_that_vllm_has_not_is_refused(drafter):
    with pytest.raises(StartError, match="vllm|vLLM"):
        child.speculative_config(Options(model="T", drafter=drafter))


def test_the_command_line_is_translated():
    words = ["--port", "5000", "--engine", "vllm", "--model", "T", "--max-model-len", "99"]
    _, options = parse_arguments([*words, "--", "--tensor-parallel-size", "2"])
    assert (options.max_running, options.num_speculative_tokens) == (64, 5)
    line = " ".join(child.command(options, 8000, child.speculative_config(options)))
    assert line.startswith("vllm serve T --served-model-name T --host 127.0.0.1 --port 8000 ")
    assert line.endswith("--max-model-len 99 --tensor-parallel-size 2")


@pytest.mark.network
def test_a_vllm_that_runs_answers_as_the_recorded_one():
    url = os.environ["VLLM_URL"]
    engine = client.Engine.ask(client.Client(url, os.environ.get(KEY_VARIABLE)))
    asked = app.create_app(engine, Options(max_running=8)).test_client()
    for name in ("plain", "streamed", "stopped"):
        path, body = SAID[name]
        answer = asked.post(path, json=body)
        told = events_of(answer.data)[-1] if body.get("stream") else answer.json
        assert told["text"] == (" blue, red," if name == "stopped" else TEXT)
    assert asked.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert asked.get("/health").json["speculative_decoding"]["num_draft_tokens"] > 0
