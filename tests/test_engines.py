"""Behind this server's routes another engine answers with its text and its acceptance.

/v1 goes through as it is; what /generate cannot translate is refused by name, and whatever fails in
the engine is an error of 502 to 504. Here the engine is a replayed conversation with a real vLLM.

The test against an engine that runs is marked `network`, as that has to be installed first:

    ENGINE_URL=http://127.0.0.1:8000 python -m pytest -n0 -m network tests/test_engines.py
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from conftest import asked
from engine import replaying
from started import COLOURS, is_error, read_all, serving, until

from runtime.models.loading import StartError
from server import relay
from server.options import Options

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
SAID = {  # name -> route and body
    "plain": ("/generate", {"prompt": COLOURS, "max_tokens": 12}),
    "streamed": ("/generate", {"prompt": COLOURS, "max_tokens": 12, "stream": True}),
    "ids": ("/generate", {"prompt": [715, 12, 1381, 12], "max_tokens": 5}),
    "stopped": ("/generate", {"prompt": COLOURS, "max_tokens": 12, "stop": [" green"]}),
    "seeded": ("/generate", {"prompt": "def f(", "max_tokens": 8, **SAMPLED}),
    "long": ("/generate", {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 200, "stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "refused": ("/generate", {"prompt": [99999], "max_tokens": 5}),
    "refused_stream": ("/generate", {"prompt": [99999], "max_tokens": 5, "stream": True}),
}
TEXT = " blue, red, green, blue, red, green,"
LONG = SAID["long"][1]


@pytest.fixture
def replay():
    with replaying() as server:
        yield server


@pytest.fixture
def ask(replay):
    """(status, body or events) of a POST, or of what is said under a name."""
    return asking(replay.url)


def asking(url):
    client = relay.create_app(Options(engine=url)).test_client()

    def post(path, body=None):
        path, body = (path, body) if body else SAID[path]
        return asked(client, path, **body)

    post.client = client
    return post


def test_an_answer_has_the_engines_text_and_its_acceptance_whole_or_streamed(ask):
    status, body = ask("plain")
    assert status == 200 and body["text"] == TEXT and len(body["token_ids"]) == 12
    assert body["finish_reason"] == "length" and body["usage"]["prompt_tokens"] == 10
    figures = body["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] == 10 and figures["num_accepted_draft_tokens"] == 10
    assert figures["acceptance_histogram"] == [0, 0, 0, 0, 0, 2]
    assert figures["draft_acceptance_rate"] == 1.0 and figures["mean_acceptance_length"] == 6.0
    assert figures["target_passes"] is None and body["timings"] is None  # which it does not tell
    assert len(ask("ids")[1]["token_ids"]) == 5
    assert ask("stopped")[1]["finish_reason"] == "stop" and ask("seeded")[1]["seed"] == 7
    _, (*events, last) = ask("streamed")
    assert "".join(event["text"] for event in events) == last["text"] == TEXT
    tokens = [token for event in events for token in event["tokens"]]
    assert [token["id"] for token in tokens] == last["token_ids"]


def test_v1_goes_through_as_it_is_and_so_do_the_metrics(ask, replay, monkeypatch):
    monkeypatch.setenv(relay.KEY_VARIABLE, "theirs")
    body = json.dumps(CHAT | {"what the relay does not know": 1}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer ours", "Cookie": "a=b"}
    answer = ask.client.post("/v1/chat/completions", data=body, headers=headers)
    (turn,) = (turn for turn in replay.turns if turn["path"] == "/v1/chat/completions")
    assert answer.status_code == 200 and answer.mimetype == "text/event-stream"
    assert answer.text == "".join(turn["pieces"])
    path, sent, head = replay.seen[-1]
    assert sent == json.loads(body) and head["Authorization"] == "Bearer theirs"
    assert "Cookie" not in head
    answer = ask.client.get("/v1/no/such%20route?a=b%26c")
    assert answer.status_code == 404 and "not recorded" in answer.text
    assert replay.seen[-1][0] == "/v1/no/such%20route?a=b%26c"
    count = len(replay.seen)
    for outside in ("/v1/../metrics", "/v1/%2e%2e/metrics", "/v2/models", "/tokenize"):
        assert ask.client.get(outside).status_code == 404
    assert len(replay.seen) == count
    replay.status = 429
    answer = ask.client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 429 and answer.text == "Internal Server Error"
    (turn,) = (turn for turn in replay.turns if turn["path"] == "/metrics")
    assert ask.client.get("/metrics").text == "".join(turn["pieces"])
    assert ask.client.get("/v1/models").json["data"][0]["id"] == "target"


@pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp", "someone", None])
def test_an_engine_is_sent_defaults_that_it_knows_and_what_a_request_says(owner):
    card, options = {"id": "m", "owned_by": owner}, Options(temperature=0.5)
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    sent = relay.translated({"prompt": "x", "seed": None, "speculative": True}, options, card)
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0.5, 128)
    assert "seed" not in sent and ("top_k" in sent) == (owner in ("vllm", "sglang", "llamacpp"))
    sent = relay.translated({"prompt": [1, 2], "stop": ["a"], **penalties}, options, card)
    if owner == "llamacpp":
        assert sent.pop("repeat_penalty") == penalties.pop("repetition_penalty")
    assert sent.items() >= {"prompt": [1, 2], "stop": ["a"], **penalties}.items()
    chosen = {"top_k": 7, "top_p": 0.3, "min_p": 0.1, "seed": 5}
    sent = relay.translated({"prompt": "x", "min_p": 0.2}, Options(**chosen), card)
    assert sent.items() >= (chosen | {"min_p": 0.2}).items()


@pytest.mark.parametrize("field", [
    {"trace": True}, {"compare": True}, {"drafter": "ngram"}, {"speculative": False}, {"n": 2},
    {"num_speculative_tokens": 3}, {"prediction": "y"}, {"json_schema": {}}, {"logprobs": 1},
    {"chat": True}, {"max_tokenz": 1}, {"stream": "no"}, {"prompt": "\ud800"},
    {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]},
], ids=str)  # fmt: skip
def test_what_is_not_translated_is_refused_by_name(ask, replay, field):
    count = len(replay.seen)
    status, body = ask("/generate", {"prompt": COLOURS} | field)
    assert status == 400 and is_error(body, *field) and len(replay.seen) == count


def test_health_has_the_engines_acceptance_and_null_for_the_rest(ask, replay):
    answer = ask.client.get("/health")
    body = answer.json
    assert answer.status_code == 200 and body["engine"] == {"name": "vllm"}
    assert body["model"] == "target" and body["drafter"] is None
    figures = body["speculative_decoding"]
    assert figures["num_draft_tokens"] > figures["num_accepted_draft_tokens"] > 0
    assert 0 < figures["draft_acceptance_rate"] < 1 and figures["num_recovered_tokens"] is None
    assert "formulas" in figures and figures["formulas"].keys() < figures.keys()
    share = 'vllm:kv_cache_usage_perc{engine="%d"} %.1f\n'
    for turn in (turn for turn in replay.turns if turn["path"] == "/metrics"):
        turn["pieces"] = [
            re.sub("(?m)^vllm:kv_cache_usage_perc.*\n", "", p) for p in turn["pieces"]
        ]
        turn["pieces"] += [share % each for each in ((0, 0.8), (1, 0.6))]
        turn["pieces"] += [piece.replace("vllm:", "other:") for piece in turn["pieces"]]
    again = ask.client.get("/health").json
    assert again["speculative_decoding"] == figures  # each counts once
    assert round(again["kv_cache_usage_perc"], 6) == 0.7  # of two engines the mean


def test_health_says_when_the_engine_is_gone_or_silent(ask, replay, monkeypatch):
    monkeypatch.setattr(relay, "_QUESTION_S", 0.2)
    monkeypatch.setattr(replay, "answer", lambda *_: replay.go_on.wait(60))
    answer = ask.client.get("/health")
    assert answer.status_code == 503 and answer.json["status"] == "stuck"
    # Nor does another question keep its thread for as long as an answer may take.
    assert ask.client.get("/v1/models").status_code == 504
    replay.shutdown()
    replay.server_close()
    answer = ask.client.get("/health")
    assert answer.status_code == 503 and answer.json["status"] == "dead"
    for path, body in (SAID["plain"], ("/v1/chat/completions", CHAT)):
        status, body = ask(path, body)
        assert status == 503 and is_error(body) and "cannot be reached" in body["error"]["message"]


def test_what_the_engine_refuses_is_the_clients_mistake_and_what_fails_there_a_502(ask, replay):
    for name in ("refused", "refused_stream"):
        status, body = ask(name)
        assert status == 400 and "out of vocabulary" in body["error"]["message"]
    for replay.status in (500, 401, 302):
        assert [ask(name)[0] for name in ("plain", "long")] == [502, 502]  # before a stream begins


def test_an_engine_that_breaks_off_ends_streams_with_an_error(ask, replay):
    replay.cut = 2
    _, events = ask("long")
    assert "text" in events[0] and "broke off" in events[-1]["error"]["message"]
    status, body = ask("plain")
    assert status == 502 and is_error(body)
    answer = ask.client.post("/v1/chat/completions", json=CHAT)
    last = json.loads(answer.text.split("data: ")[-2])
    assert answer.status_code == 200 and "broke off" in last["error"]["message"]
    replay.cut = None
    generating(replay, lambda pieces: pieces[:1])
    assert "no end" in ask("long")[1][-1]["error"]["message"]


def raw(ask, path, body):
    return ask.client.post(path, json=body | {"stream": True}).text


def test_behind_half_an_event_stands_an_error_that_clients_can_read(ask, replay):
    """Each dialect's: Anthropic's clients know events by their names."""
    half = 'data: {"choices": [{"delta"'
    pieces = ["data: {}\r\n\r\nda", "ta: {}\n\n", half]
    replay.answer = lambda handler, _: handler.say(200, pieces, "text/event-stream")
    for pieces[2] in half, "event: half\n":
        events = raw(ask, "/v1/chat/completions", CHAT)
        assert pieces[2] not in events and events.startswith("data: {}\r\n\r\ndata: {}\n\n")
        assert "its last event has no end" in events and events.endswith("data: [DONE]\n\n")
    pieces[2] = ": ping\ndata: [DONE]\n"  # of which no line is cut
    assert raw(ask, "/v1/chat/completions", CHAT).endswith("\n\n: ping\ndata: [DONE]\n\n")
    pieces[2] = half
    answer = ask.client.post("/v1/messages", json=CHAT | {"stream": True})
    assert answer.headers["request-id"] == answer.headers["X-Request-Id"]
    events = answer.text.split("\n\n")
    name, data = events[-2].split("\n")
    assert name == "event: error" and not events[-1]
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_an_engine_that_has_another_model_by_now_is_asked_for_that(ask, replay):
    def knowing(handler, body):
        is_unknown = body and body.get("model") == "before"
        return handler.say(404, ["{}"]) if is_unknown else answer(handler, body)

    answer, replay.answer = replay.answer, knowing
    ask.client.application.extensions["worker"]._card = {"id": "before", "owned_by": "llamacpp"}
    assert ask("plain")[1]["text"] == TEXT
    _, sent, _ = replay.seen[-1]  # with the fields that this engine knows
    assert "repetition_penalty" in sent and "repeat_penalty" not in sent
    count = len(replay.seen)
    replay.status = 404  # for another reason: it is not asked again
    assert ask("plain")[0] == 400 and len(replay.seen) == count + 2


def generating(replay, change):
    """Change the pieces of what the engine generates."""
    for turn in replay.turns:
        if turn["path"].endswith("completions"):
            turn["pieces"] = change(turn["pieces"])


def event(**choice):
    choice = {"text": "a", "token_ids": [5], "finish_reason": None} | choice
    return json.dumps({"choices": [choice]})


DONE = event(finish_reason="stop"), "[DONE]"
DEEP = "[" * 200_000
NO_EVENTS = {
    "no JSON": "{", "no object": "[]", "deep": DEEP, "deep in an object": f'{{"usage": {DEEP}',
    "choices": '{"choices": 5}', "a choice": '{"choices": [[]]}', "usage": '{"usage": [1]}',
    "metrics": '{"metrics": "m"}', "an error": '{"error": 5}',
    "drafts": '{"metrics": {"speculative_decoding": {"num_draft_tokens": [1]}}}',
    "a text": event(text=["a"]), "ids": event(token_ids="abc"), "an id": event(token_ids=[{}]),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_EVENTS)
def test_an_event_of_another_shape_is_a_502_that_names_the_engine(ask, replay, caplog, name):
    told = [f"data: {each}\n\n" for each in (event(), NO_EVENTS[name], *DONE)]
    generating(replay, lambda _: told)
    status, body = ask("plain")
    assert status == 502 and is_error(body)
    assert body["error"]["message"].startswith("the engine broke off: ")
    assert "the engine broke off" in ask("long")[1][-1]["error"]["message"]
    assert not any(record.exc_info for record in caplog.records)


def test_an_engine_that_hangs_is_a_504_and_a_stream_without_end_is_cut(ask, replay, monkeypatch):
    monkeypatch.setattr(relay, "_MOST", 10_000)
    generating(replay, lambda _: [f"data: {event()}\n\n"] * 1000)
    assert ask("plain")[0] == 502
    monkeypatch.setattr(Options, "request_timeout", 0.5)
    replay.hang = 1
    status, body = ask("plain")
    assert status == 504 and body["error"]["message"] == "the engine took too long"
    assert ask("long")[1][-1]["error"]["code"] == "timeout"


@pytest.mark.parametrize("told", ["no JSON", DEEP, "{}", "[]", '{"error": ' + DEEP, "\ud7ff\0"])
@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
def test_an_engine_that_answers_anything_is_used_or_refused_in_one_line(replay, path, told):
    for status in (200, 400, 500):
        for turn in replay.turns:
            if turn["path"] == path:
                turn |= {"pieces": [told], "status": status}
        try:
            client = asking(replay.url).client
        except StartError as error:
            assert path == "/v1/models" and "\n" not in str(error)
        else:
            assert client.get("/health").json["status"] == "ok" and path == "/metrics"


# ---------------------------------------------------------------------------- on real sockets


@contextmanager
def hanging(path, fields):
    """A server with an engine behind that hangs, amid a request of a client."""
    limit = {"constants": {"grace_period": 1.0}}
    with replaying() as replay, serving("--engine", replay.url, **limit) as server:
        replay.hang = 1
        with server.connect(path, fields) as client:
            until(replay.is_hanging.is_set)
            yield replay, server, client


@pytest.mark.parametrize("asked", [("/generate", LONG), ("/v1/chat/completions", CHAT)], ids=str)
def test_a_client_that_leaves_is_cancelled_in_the_engine(asked):
    with hanging(*asked) as (replay, server, client):
        assert server.health()["num_requests_running"] == 1
        client.close()
        server.wait_until_running(0)
        replay.go_on.set()  # only now: the engine is to look for us once we are gone
        until(lambda: replay.num_left == 1)
        until(lambda: '"finish": "cancelled"' in server.log())
        assert '"status": 499' in server.log() and "engine_failed" not in server.log()
        server.end_well()


@pytest.mark.parametrize("name", ["streamed", "plain"])
def test_a_request_that_outlasts_the_grace_period_is_cut_off_with_an_error(name):
    with hanging(*SAID[name]) as (_, server, client), ThreadPoolExecutor(1) as pool:
        ended = pool.submit(server.end_well)
        assert b"the server is shutting down" in read_all(client)
        ended.result()
        assert "1 requests were cut off" in server.log() and "the engine" not in server.log()
        assert f'"status": {200 if name == "streamed" else 503}' in server.log()


def test_a_body_that_is_not_complete_does_not_look_whole():
    with replaying() as replay, serving("--engine", replay.url) as server:
        replay.cut = 1
        (turn,) = (turn for turn in replay.turns if turn["path"] == "/v1/chat/completions")
        turn["pieces"], turn["kind"] = ["{", "}"], "application/json"
        with server.connect("/v1/chat/completions", CHAT) as client:
            data = read_all(client)
        assert b"200 OK" in data and not data.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.network
def test_an_engine_that_runs_answers():
    ask = asking(os.environ["ENGINE_URL"])
    assert ask("plain")[1]["text"] == ask("streamed")[1][-1]["text"]
    status, body = ask("/v1/chat/completions", CHAT)
    assert status == 200 and body["choices"][0]["message"]["content"]
    print(re.sub(r'"formulas": {[^}]*}', "", json.dumps(ask.client.get("/health").json)))
