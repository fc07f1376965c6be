"""Behind this server's routes another engine answers with its text and its acceptance.

What it cannot do is refused by name, and whatever fails in it is an error of 502 to 504. Here the
engine is a replayed conversation with a real vLLM.

The replayed answers were captured from the version that tests/vllm_conversation.json names. The
test against a vLLM that runs is marked `network`, as that has to be installed first:

    VLLM_URL=http://127.0.0.1:8000 python -m pytest -n0 -m network tests/test_engines.py
"""

import json
import os
import threading

import pytest
import speculative_decoding as core
from engine import CHAT, COLOURS, SAID, replaying
from server import events_of, is_error, serving, until

from engines import app, client
from engines.app import KEY_VARIABLE
from messages import RequestError
from models.loading import StartError
from serving.options import Options

TEXT = " blue, red, green, blue, red, green,"
LONG = SAID["long"][1]


@pytest.fixture
def replay():
    with replaying() as server:
        yield server


@pytest.fixture
def ask(replay):
    """(status, body or events) of a POST."""
    return asking(client.Client(replay.url))


def asking(engine):
    remote = app.Remote(client.Engine.ask(engine), Options(max_running=8))
    asked = core.create_app(remote).test_client()

    def post(path, body):
        answer = asked.post(path, json=body)
        is_stream = answer.mimetype == "text/event-stream"
        return answer.status_code, events_of(answer.data) if is_stream else answer.json

    post.get = asked.get
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
    assert ask.get("/v1/models").json["data"][0]["id"] == "target"
    block = ask("/v1/messages", CHAT)[1]["content"][0]
    fields = {name: value for name, value in CHAT.items() if name != "messages"}
    (item,) = ask("/v1/responses", fields | {"input": CHAT["messages"]})[1]["output"]
    assert block["text"] == item["content"][0]["text"] == message["content"]
    status, body = ask("/v1/messages/count_tokens", CHAT)
    assert status == 400 and "not counted with --engine" in body["error"]["message"]


def test_a_gap_needs_our_own_tokenizer(ask):
    error = ask("/v1/completions", {"prompt": "a", "suffix": "b"})[1]["error"]
    assert error["param"] == "suffix" and "fills in no gaps" in error["message"]


def test_defaults_limits_and_the_key_of_ours_are_sent(replay, ask):
    ask("/generate", {"prompt": COLOURS, "max_tokens": 9999})
    _, sent, _ = replay.seen[-1]
    assert sent["temperature"] == 0.0 and sent["top_k"] == -1 and sent["repetition_penalty"] == 1.0
    assert "seed" not in sent and sent["max_tokens"] == 2048  # as long as the context
    client.Client(replay.url, "secret").ask("/version")
    assert replay.seen[-1][2] == "Bearer secret"


@pytest.mark.parametrize(("field", "value"), [
    ("echo", True), ("prompt", ["a", "b"]), ("trace", True), ("compare", True), ("drafter", "none"),
    ("num_speculative_tokens", 3), ("verification", "coupled"), ("temperature", -1),
    ("prompt", [1] * 3000), ("prompt_logprobs", 0), ("max_tokens", 0),
    ("response_format", {"type": "json_object"}), ("regex", "a+"), ("json_schema", {}),
])  # fmt: skip
def test_what_the_engine_cannot_do_is_refused_by_name(ask, field, value):
    path = "/v1/completions" if field == "echo" or value == ["a", "b"] else "/generate"
    status, body = ask(path, {"prompt": COLOURS} | {field: value})
    assert status == 400 and is_error(body, field)


HANDED_ON = {
    "ignore_eos": True, "min_tokens": 3, "stop_token_ids": [5], "bad_words": ["a"],
    "allowed_token_ids": [5, 6], "include_stop_str_in_output": True, "truncate_prompt_tokens": 2,
    "truncation_side": "left", "return_tokens_as_token_ids": True,
}  # fmt: skip
OF_CHATS = {
    "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True, "add_special_tokens": True,
}  # fmt: skip


def test_what_the_engine_honours_is_handed_on_and_all_else_of_the_table_holds(replay, ask):
    replay.is_lenient = True
    turns = [*CHAT["messages"], {"role": "assistant", "content": "a"}]
    for path, fields in (
        ("/generate", {"prompt": COLOURS} | HANDED_ON),
        ("/v1/chat/completions", {"messages": turns} | HANDED_ON | OF_CHATS),
    ):
        status, body = ask(path, fields)
        _, sent, _ = replay.seen[-1]
        assert status == 200 and body["warnings"] == []
        for name, value in (HANDED_ON | (OF_CHATS if "chat" in path else {})).items():
            assert sent[name] == value, name
    assert ask("/generate", {"prompt": COLOURS, "user": "me"})[1]["warnings"] == []
    off = dict.fromkeys(HANDED_ON, None) | {"ignore_eos": False, "min_tokens": 0, "typical_p": 1}
    assert ask("/generate", {"prompt": COLOURS} | off)[0] == 200
    assert not replay.seen[-1][1].keys() & HANDED_ON.keys()
    for fields in ({"typical_p": 0.5}, {"return_token_ids": True}, {"mirostat": 1}):
        status, body = ask("/generate", {"prompt": COLOURS} | fields)
        assert status == 400 and is_error(body, *fields)
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    status, body = ask("/v1/completions", {"prompt": COLOURS} | options)
    assert status == 400 and is_error(body, "stream_options")


@pytest.mark.parametrize("kind", ["sglang", "unknown"])
def test_each_kind_of_engine_is_handed_what_it_knows(replay, kind):
    class Other(client.Client):
        def ask(self, path, *given, **named):
            if path == ("/get_server_info" if kind == "sglang" else ""):
                return b'{"version": "1"}'
            if path in ("/version", "/get_server_info"):
                raise RequestError("no such route", status=404)
            return super().ask(path, *given, **named)

    replay.is_lenient, ask = True, asking(Other(replay.url))
    for name, value in HANDED_ON.items():
        status, body = ask("/generate", {"prompt": COLOURS, name: value})
        if kind == "sglang" and name in ("ignore_eos", "min_tokens", "stop_token_ids"):
            assert status == 200 and replay.seen[-1][1][name] == value
        else:
            assert status == 400 and is_error(body, name) and kind in body["error"]["message"]


@pytest.mark.parametrize("name", ["refused", "refused_stream"])
def test_what_the_engine_refuses_is_the_clients_mistake(ask, name):
    status, body = said(ask, name)
    assert status == 400 and "out of vocabulary" in body["error"]["message"]


def test_health_and_metrics_have_the_engines_acceptance_and_null_for_the_rest(ask):
    answer = ask.get("/health")
    body = answer.json
    assert answer.status_code == 200 and body["engine"] == {"name": "vllm", "version": "0.32.0"}
    assert body["model"] == "target" and body["drafters"] == ["engine"] and body["target"] is None
    figures = body["speculative_decoding"]
    assert figures["num_draft_tokens"] > figures["num_accepted_draft_tokens"] > 0
    assert len(figures["acceptance_rate_per_position"]) == figures["num_spec_tokens"] == 5
    assert figures["num_recovered_tokens"] is None
    text = ask.get("/metrics").data.decode()
    assert "\nspec_decode_num_accepted_tokens_per_pos_total{position=" in text
    assert "\ngeneration_tokens_total " in text and "\nvllm:generation_tokens_total " in text


def test_counters_that_an_engine_tells_under_two_prefixes_count_once(ask, replay):
    once = ask.get("/metrics").data
    for turn in (turn for turn in replay.told["turns"] if turn["path"] == "/metrics"):
        turn["pieces"] += [piece.replace("vllm:", "other:") for piece in turn["pieces"]]
    assert ask.get("/metrics").data == once


def test_health_says_when_the_engine_is_gone(ask, replay):
    replay.shutdown()
    replay.server_close()
    answer = ask.get("/health")
    assert answer.status_code == 503 and answer.json["status"] == "dead"
    status, body = said(ask, "plain")
    assert status == 503 and is_error(body) and "cannot be reached" in body["error"]["message"]


def test_an_engine_without_metrics_is_not_gone(ask, replay, monkeypatch):
    replay.told["turns"] = [turn for turn in replay.told["turns"] if turn["path"] != "/metrics"]
    answer = ask.get("/health")
    assert answer.status_code == 200 and answer.json["status"] == "ok"
    assert answer.json["speculative_decoding"]["num_draft_tokens"] is None
    (warning,) = answer.json["warnings"]
    assert "tells no metrics" in warning

    def hang(*_):
        raise client._silent(1.0)

    monkeypatch.setattr(client.Client, "metrics", hang)
    answer = ask.get("/health")
    assert answer.status_code == 503 and answer.json["status"] == "stuck"


def test_an_engine_that_breaks_off_ends_streams_with_an_error(ask, replay):
    replay.cut = 2
    _, events = said(ask, "long")
    assert "text" in events[0] and "broke off" in events[-1]["error"]["message"]
    status, body = said(ask, "plain")
    assert status == 502 and is_error(body)
    replay.cut = None
    for turn in generations(replay):
        turn["pieces"] = turn["pieces"][:1]
    assert "before its answer was complete" in said(ask, "long")[1][-1]["error"]["message"]


def test_an_engine_that_answers_500_is_a_502(ask, replay):
    replay.status = 500
    for name in ("plain", "long", "plain", "plain"):  # also before a stream has begun
        assert said(ask, name)[0] == 502
    assert ask.get("/health").json["status"] == "failing"
    replay.status = None
    said(ask, "plain")
    assert ask.get("/health").json["status"] == "ok"


def generations(replay):
    """The turns of its conversation in which text was generated."""
    return [turn for turn in replay.told["turns"] if turn["path"].endswith("completions")]


def say(replay, *events):
    """Have every generation answered with these."""
    for turn in generations(replay):
        turn["pieces"] = (f"data: {event}\n\n" for event in events)


def event(**choice):
    usual = {"text": "a", "token_ids": [5], "finish_reason": None}
    return json.dumps({"choices": [usual | choice]})


DONE = event(finish_reason="stop"), "[DONE]"
DEEP = "[" * 200_000
NO_EVENTS = {
    "no object": "[]", "deep": DEEP, "deep in an object": f'{{"usage": {DEEP}',
    "choices": '{"choices": {}}', "a choice": '{"choices": [[]]}', "usage": '{"usage": [1]}',
    "a count": '{"usage": {"completion_tokens": "9"}}', "metrics": '{"metrics": "m"}',
    "below 0": '{"usage": {"completion_tokens": -9}}',
    "drafts": '{"metrics": {"speculative_decoding": {"num_draft_tokens": [1]}}}',
    "drafts below 0": '{"metrics": {"speculative_decoding": {"num_spec_steps": -1}}}',
    "a text": event(text=["a"]), "a delta": event(text=None, delta=["a"]),
    "ids": event(token_ids="abc"), "an id": event(token_ids=[{}]),
    "a reason": event(finish_reason=5),
    "log-probabilities": event(logprobs=[1]), "a token": event(logprobs={"content": [{}]}),
    "a token's text": event(logprobs={"content": [{"token": ["a"], "logprob": -1}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_EVENTS)
def test_an_event_of_another_shape_is_a_502_that_names_the_engine(ask, replay, caplog, name):
    for asked in ("plain", "completion", "chat"):
        say(replay, event(), NO_EVENTS[name], *DONE)
        status, body = said(ask, asked)
        assert status == 502 and is_error(body)
        assert body["error"]["message"].startswith("the engine broke off: an event of its stream ")
    say(replay, event(), NO_EVENTS[name], *DONE)
    assert "the engine broke off" in said(ask, "long")[1][-1]["error"]["message"]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("choice", [{}, {"token_ids": None}, {"text": "a" * 2000}], ids=range(3))
def test_a_stream_without_end_is_cut_at_max_tokens(ask, replay, choice):
    say(replay, *(event(**choice) for _ in range(6)), *DONE)
    assert said(ask, "plain")[1]["finish_reason"] == "stop"  # those are not too many
    say(replay, *[event(**choice)] * 100_000)
    status, body = said(ask, "plain")
    assert status == 200 and body["finish_reason"] == "length"
    if choice.get("text"):
        assert len(body["text"]) < 13 << 10  # a token has 1,024 characters at most
    else:
        assert 12 <= len(body["text"]) <= 13 and len(body["token_ids"] or [5] * 12) == 12


@pytest.mark.parametrize("told", ["no JSON", DEEP, "{}", "[]", '{"error": ' + DEEP, "\ud7ff\0"])
@pytest.mark.parametrize("path", ["/tokenize", "/metrics", "/version", "/v1/models"])
def test_an_engine_that_answers_anything_is_used_or_refused_in_one_line(replay, path, told):
    for status in (200, 400, 500):
        for turn in replay.told["turns"]:
            if turn["path"] == path:
                turn |= {"pieces": [told], "status": status}
        try:
            made = core.create_app(app.connect(Options(engine=replay.url))).test_client()
        except StartError as error:
            assert path == "/v1/models" and str(error).endswith("/v1/models names no model")
        else:
            assert made.get("/health").json["status"] == "ok" and path != "/v1/models"
            assert made.get("/metrics").status_code in (200, 400, 502)


@pytest.mark.parametrize(("limit", "limit_s", "message"), [
    ("stall_limit", 0.3, "the engine has said nothing for 0.3 s"),
    ("request_timeout", 0.5, "the request took too long"),
])  # fmt: skip
def test_an_engine_that_hangs_is_a_504(ask, replay, monkeypatch, limit, limit_s, message):
    monkeypatch.setattr(Options, limit, limit_s)
    replay.hang = 1
    status, body = said(ask, "plain")
    assert status == 504 and body["error"]["message"] == message
    assert body["error"]["code"] == said(ask, "long")[1][-1]["error"]["code"] == "timeout"


@pytest.fixture(scope="module")
def server():
    with replaying() as replay, serving("--engine", replay.url) as server:
        server.replay = replay
        yield server
        server.end_well()


def test_a_client_that_leaves_is_cancelled_in_the_engine(server):
    server.replay.hang, server.replay.num_left = 1, 0
    with server.connect("/generate", LONG):
        until(server.replay.is_hanging.is_set)  # else it is its sending that fails
    server.wait_until_running(0)
    server.replay.go_on.set()  # only now: the engine is to look for us once we are gone
    until(lambda: server.replay.num_left == 1)
    server.replay.go_on.clear()
    server.replay.hang = None
    until(lambda: '"finish": "cancelled"' in server.log())


def test_a_client_that_reads_slowly_slows_the_engine(server, monkeypatch):
    """What the client does not take is not read from the engine: the engine can send no more."""
    turns = generations(server.replay)
    long = next(turn for turn in turns if turn["body"].get("max_tokens") == 200)
    event = json.loads(long["pieces"][1].split("\n")[0].removeprefix("data: "))
    event["choices"][0]["text"] = "x" * 4000
    pieces = [f"data: {json.dumps(event)}\n\n"] * 10_000 + long["pieces"][-1:]  # 40 MB
    sent = []
    sending = (sent.append(1) or piece for piece in pieces)
    monkeypatch.setattr(server.replay, "failing", lambda *_: sending)
    with server.connect("/generate", LONG, buffer_bytes=4096):
        until(lambda: sent)
        stands = threading.Event()
        until(lambda: (n := len(sent)) and not stands.wait(1.0) and len(sent) == n)
        assert len(sent) < 10_000
    server.wait_until_running(0)


@pytest.mark.network
def test_a_vllm_that_runs_answers_as_the_recorded_one():
    ask = asking(client.Client(os.environ["VLLM_URL"], os.environ.get(KEY_VARIABLE)))
    assert said(ask, "plain")[1]["text"] == said(ask, "streamed")[1][-1]["text"] == TEXT
    assert said(ask, "stopped")[1]["text"] == " blue, red,"
    assert ask("/v1/chat/completions", CHAT)[0] == 200
    assert ask.get("/health").json["speculative_decoding"]["num_draft_tokens"] > 0
