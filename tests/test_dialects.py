"""Clients of Anthropic's and OpenAI's newer protocols get the answers of a chat, in their shapes.

A request is translated into a chat's, so most tests compare with that. What a model says in the
first tests is written here; then a tiny model speaks. OpenAI's own client is in test_openai.py.
"""

import json
from pathlib import Path

import pytest
from conftest import application
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from started import CHAT, COUNT, MESSAGES, RESPONSES
from test_tools import GENERAL, HERMES, ROME, TAGGED, WEATHER, call_text, says, service  # noqa: F401, I001 fixtures

from runtime.values import RequestError
from server import core
from server.options import Options

KEY = "secret key"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
BODIES = {MESSAGES: HI, COUNT: HI, RESPONSES: {"input": "Hi"}, CHAT: HI}
FLAT = WEATHER | {"type": "function"}
TOOL = {"name": "weather", "input_schema": WEATHER["parameters"]}


def answered(answer):
    """(status, body or events) of an answer; each event has its type as a name, too."""
    if answer.mimetype != "text/event-stream":
        return answer.status_code, answer.json
    events = []
    for block in answer.text.split("\n\n"):
        if block and block != ": ping":
            name, said = block.split("\n")
            events.append(json.loads(said.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return answer.status_code, events


@pytest.fixture(scope="module")
def post(service):  # noqa: F811
    """(status, body or events) of what the canned service answers."""
    app = core.create_app(service)
    client = app.test_client()
    yield lambda path, **fields: answered(client.post(path, json=BODIES[path] | fields))
    app.extensions["worker"].drain(60)


# ------------------------------------------------------------------------------- what is read

# A chat, and what says the same in Anthropic's and in OpenAI's newer protocol.
SAME = json.loads(Path(__file__).with_name("same_requests.json").read_text("utf-8"))


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("form", [TAGGED, GENERAL], ids=["tags", "general"])
def test_a_request_is_that_of_a_chat(post, service, says, monkeypatch, form, name):  # noqa: F811
    """The same tokens, and the same limits of the text."""
    if form is TAGGED:
        monkeypatch.setattr(service.engine.target.tokenizer, "chat_template", HERMES)
    read = []
    for path, fields in zip((CHAT, MESSAGES, RESPONSES), SAME[name], strict=True):
        says("", form)
        limit = {} if "max_output_tokens" in fields else {"max_tokens": 8}
        status, _ = post(path, **limit | fields)
        assert status == 200
        same = {name: value for name, value in service.fields.items() if value not in (None, False)}
        if path == RESPONSES and "max_output_tokens" not in fields:
            assert same["max_tokens"] == 8  # which /generate has, too
        constraint = same.get("response_format", {})
        schema = constraint.get("json_schema", constraint).get("schema")
        read.append(same | {"response_format": schema})
    assert read[0] == read[1] == read[2]


def test_reasoning_in_a_history_is_the_template_s_to_write(post, service, monkeypatch):  # noqa: F811
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    monkeypatch.setattr(service.engine.target.tokenizer, "chat_template", template)
    said = [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "a"}]
    (hi,) = HI["messages"]
    turns = [hi, {"role": "assistant", "content": said}, hi]
    without = [hi, {"role": "assistant", "content": said[1:]}, hi]
    few, many = (post(COUNT, messages=each)[1]["input_tokens"] for each in (without, turns))
    assert few < many
    post(MESSAGES, messages=turns)
    assert service.engine.target.tokenizer.decode(service.fields["prompt"]) == "|Hi;Hm|a;|Hi;"


# ------------------------------------------------------------------------------ what they read

SAID = f"<think>\nHm.\n</think>\nI ask.\n{call_text('weather', ROME, TAGGED)}"
THINKING = TAGGED._replace(thinks=True)


@pytest.mark.parametrize("size", [7, 1000])
def test_a_message_has_blocks_whole_or_streamed(post, says, size):  # noqa: F811
    says(SAID, THINKING, size=size)
    _, body = post(MESSAGES, tools=[TOOL])
    call = {"type": "tool_use", "id": body["content"][2]["id"], "name": "weather"}
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I ask."},
        call | {"input": json.loads(ROME)},
    ]
    assert body["stop_reason"] == "tool_use" and body["type"] == "message"
    assert body["id"].startswith("msg_") and call["id"].startswith("toolu_")
    first, ping, *events, last, stop = post(MESSAGES, tools=[TOOL], stream=True)[1]
    assert first["type"] == "message_start" and ping == {"type": "ping"}
    assert stop == {"type": "message_stop"}
    assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] > 0
    blocks, told = [], []
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            blocks.append(event["content_block"])
            told.append("")
        assert event["index"] == len(blocks) - 1
        if kind == "delta":
            (name,) = event["delta"].keys() - {"type"}
            told[-1] += event["delta"][name]
    assert told == ["Hm.", "I ask.", ROME]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert [e["type"] for e in events].count("content_block_stop") == 3
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("size", [7, 1000])
def test_a_response_has_items_whole_or_streamed(post, says, size):  # noqa: F811
    """OpenAI's own classes check the shapes."""
    says(SAID, THINKING, size=size)
    _, body = post(RESPONSES, tools=[FLAT])
    response, adapter = Response.model_validate(body), TypeAdapter(ResponseStreamEvent)
    thought, message, call = response.output
    assert thought.content[0].text == "Hm." and message.content[0].text == "I ask."
    assert (call.name, call.arguments) == ("weather", ROME) and response.status == "completed"
    assert {item.status for item in response.output} == {"completed"}
    events = [adapter.validate_python(e) for e in post(RESPONSES, tools=[FLAT], stream=True)[1]]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert (kinds[:2], kinds[-1]) == (["created", "in_progress"], "completed")
    once = [k for i, k in enumerate(kinds) if kinds[i - 1] != k][2:-1]
    part = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done",
            "output_item.done"]  # fmt: skip
    texts = [kind.format(name) for name in ("reasoning_text", "output_text") for kind in part]
    arguments = [f"function_call_arguments.{what}" for what in ("delta", "done")]
    assert once == [*texts, part[0], *arguments, part[-1]]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == events[-1].response.output
    for item, index in zip(items, range(3), strict=True):
        of_it = [e for e in events if getattr(e, "output_index", None) == index]
        assert {getattr(e, "item_id", None) or e.item.id for e in of_it} == {item.id}
    no_ids = {"id": "", "call_id": ""}
    one, other = ([i.model_copy(update=no_ids) for i in each] for each in (items, response.output))
    assert one == other


def test_what_was_cut_says_so(post, says):  # noqa: F811
    cut = call_text("weather", ROME, TAGGED).partition("ome")[0]
    says(cut, TAGGED, reason="length")
    _, body = post(MESSAGES, tools=[TOOL])
    assert body["stop_reason"] == "max_tokens" and body["content"][0]["input"] == {}
    _, body = post(RESPONSES, tools=[FLAT])
    assert body["status"] == "incomplete" and body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    *_, last = post(RESPONSES, stream=True)[1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["content"]
    says("", TAGGED)  # nothing is a text, too: clients read the first block
    assert post(MESSAGES)[1]["content"] == [{"type": "text", "text": ""}]
    assert post(RESPONSES)[1]["output"][0]["content"][0]["text"] == ""
    assert [e["type"] for e in post(MESSAGES, stream=True)[1]].count("content_block_start") == 1


def test_an_error_in_a_stream_is_the_last_event(post, service, says, monkeypatch):  # noqa: F811
    def fail(*_):
        raise RequestError("no more", status=503, code="unavailable")

    says("a", TAGGED)
    monkeypatch.setattr(service, "answer", fail)
    *_, last = post(MESSAGES, stream=True)[1]
    assert last["error"] == {"type": "overloaded_error", "message": "no more"}
    assert last["type"] == "error" and last["request_id"]
    *_, last = post(RESPONSES, stream=True)[1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "no more"}


# ---------------------------------------------------------------------------- a model speaks


@pytest.fixture(scope="module")
def ask(chat_folder):
    """(status, body or events) of a tiny model, with the key as Anthropic's clients send it."""
    options = Options(str(chat_folder("llama")), drafter="ngram", api_key=KEY)
    with application(core.load_engine(options), options) as client:
        yield lambda path, **fields: answered(
            client.post(path, json=BODIES[path] | fields, headers={"X-Api-Key": KEY})
        )


def test_the_text_and_the_figures_are_a_chat_s(ask):
    """With any stop string; what was read before is counted apart."""
    chat = ask(CHAT)[1]
    text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    for stop in (None, text[3:5]):
        _, body = ask(MESSAGES, stop_sequences=stop and ["<none>", stop], drafter="ngram")
        expected = text if stop is None else text[: text.index(stop)]
        assert body["content"] == [{"type": "text", "text": expected}]
        assert body["stop_sequence"] == stop
        assert body["stop_reason"] == ("stop_sequence" if stop else "max_tokens")
        assert body["metrics"]["timings"] and "timings" not in body and body["warnings"] == []
    _, events = ask(MESSAGES, stream=True)
    told = [event["delta"].get("text", "") for event in events if "delta" in event]
    assert "".join(told) == text
    sums = []
    for counted in (events[0]["message"]["usage"], events[-2]["usage"], body["usage"]):
        sums.append(counted["input_tokens"] + counted["cache_read_input_tokens"])
        assert counted["cache_creation_input_tokens"] == 0
    assert {*sums} == {usage["prompt_tokens"]} == {ask(COUNT)[1]["input_tokens"]}
    many = ask(MESSAGES, tools=[TOOL], max_tokens=1)[1]["usage"]["input_tokens"]
    assert many == ask(COUNT, tools=[TOOL])[1]["input_tokens"] > usage["prompt_tokens"]
    assert events[-2]["usage"]["output_tokens"] == usage["completion_tokens"] == 8
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_tokens": 8}
    listed = ask(CHAT, logprobs=True, top_logprobs=2)[1]["choices"][0]["logprobs"]["content"]
    response = ask(RESPONSES, **asked)[1]
    content, counted = response["output"][0]["content"][0], response["usage"]
    assert content["text"] == text and content["logprobs"] == listed
    assert counted["total_tokens"] == usage["total_tokens"]
    assert counted["input_tokens_details"]["cached_tokens"] <= counted["input_tokens"]
    assert response["metrics"]["speculative_decoding"] and response["timings"]


def test_each_message_has_the_log_probabilities_of_its_own_tokens(post, service, says):  # noqa: F811
    """Not those of reasoning, calls and tags, and those of a stop string, which no text has."""
    tokenizer, said = service.tokenizer, f"{SAID}\nDone, now"
    ids = tokenizer(f"{said};")["input_ids"]
    listed = [
        {"id": i, "token": tokenizer.decode([i]), "logprob": -1, "top_logprobs": []} for i in ids
    ]
    says(said, THINKING, logprobs=listed)
    asked = {"tools": [FLAT], "include": ["message.output_text.logprobs"]}
    *events, last = post(RESPONSES, **asked, stream=True)[1]
    for response in (post(RESPONSES, **asked)[1], last["response"]):
        items = [item for item in response["output"] if item["type"] == "message"]
        texts = [
            ["".join(entry["token"] for entry in part["logprobs"]), part["text"]]
            for part in (item["content"][0] for item in items)
        ]
        assert texts == [["I ask.", "I ask."], ["\nDone, now;", "\nDone, now"]]
    for item in items:
        told = [e["logprobs"] for e in events if e["type"].endswith("text.delta")
                and e["item_id"] == item["id"]]  # fmt: skip
        assert sum(told, []) == item["content"][0]["logprobs"]
