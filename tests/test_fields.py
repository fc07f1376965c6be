"""A request has the fields of its route, and nobody's misspelt field is silently ignored.

What fields mean is tested where they are read: masks in test_masks.py, formats in test_formats.py,
and those of answers below. client_bodies.json has what ten clients send by default, one request a
line, each client with its version. They were recorded at a socket of this machine, but for
Open WebUI's, which are written down from its source.
"""

import json
from functools import partial

import pytest
from conftest import ROOT, TEMPLATE, asked, module_client
from started import CHAT, COMPLETIONS, GENERATE, ROUTES, is_error
from transformers import AutoTokenizer

from runtime.models.prompts import chat_prompt, template_options
from server.fields import NEUTRAL, SILENT
from server.parsing import KNOWN

ask = partial(asked, prompt="a b")
client = module_client(drafter="ngram", max_tokens=2)
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TURNS = [{"role": "user", "content": "a b"}]
BODIES = {
    GENERATE: {"prompt": "a b"}, COMPLETIONS: {"prompt": "a b"}, CHAT: {"messages": TURNS},
    MESSAGES: {"messages": TURNS, "max_tokens": 2}, COUNT: {"messages": TURNS},
    RESPONSES: {"input": "a b"},
}  # fmt: skip
HONOURED = {  # by each route, beside prompt, messages and those in FIELDS of formats.py
    "chat": False, "max_tokens": 2, "n": 2, "num_speculative_tokens": 2, "drafter": "ngram",
    "fixed_k": True, "speculative": True, "stream": False, "trace": True, "compare": False,
    "stop": ["zzz"], "temperature": 0.5, "top_k": 4, "top_p": 0, "typical_p": 0.5, "min_p": 0.1,
    "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1, "seed": 3,
    "logit_bias": {"5": 1}, "verification": "rejection", "logprobs": True, "prediction": "a b",
    "prompt_logprobs": 1,
    "model": None, "stream_options": None, "ignore_eos": True, "min_tokens": 1,
    "stop_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words": ["a"],
    "include_stop_str_in_output": True, "truncate_prompt_tokens": 1, "truncation_side": "right",
    "return_token_ids": True, "return_tokens_as_token_ids": True, "max_completion_tokens": 2,
}  # fmt: skip
IN_CHATS = {  # by chats alone
    "messages": TURNS, "tools": [], "tool_choice": "none", "add_generation_prompt": False,
    "continue_final_message": False, "chat_template_kwargs": {"enable_thinking": False},
    "top_logprobs": 1, "add_special_tokens": False, "parallel_tool_calls": False,
}  # fmt: skip
OWN = {CHAT: IN_CHATS, COMPLETIONS: ("echo", "suffix"), GENERATE: ()}  # beside HONOURED
each_protocol = pytest.mark.parametrize("route", BODIES)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_honoured_is_taken_without_a_warning(client, route):
    formats = {"response_format", "json_schema", "regex", "grammar", "choice"}
    assert KNOWN == HONOURED.keys() | formats | {"prompt"}
    rows = HONOURED | (IN_CHATS if route == CHAT else {})
    for name, value in rows.items():
        others = {"top_logprobs": {"logprobs": True}, "prediction": {"drafter": "auto"}}
        status, body = ask(client, route, **others.get(name, {}), **{name: value})
        assert status == 200 and body["warnings"] == [], (name, body)


@each_protocol
def test_what_can_change_no_text_is_taken_silently(client, route):
    """Fields of who asks, whatever they hold; what is off; and all that is null."""
    assert len(SILENT) <= 40 and not SILENT & (KNOWN | NEUTRAL.keys())
    asks = dict.fromkeys(SILENT - {"parallel_tool_calls"}, {"a": [1]})
    sent = [asks, dict.fromkeys([*HONOURED, *NEUTRAL, "unheard_of"])]
    off = {name: NEUTRAL[name] for name in NEUTRAL.keys() - {*OWN.get(route, IN_CHATS)}}
    sent += [{n: values[i] for n, values in off.items() if i < len(values)} for i in range(2)]
    if route not in (MESSAGES, COUNT):  # where a choice is an object
        sent.append({"tools": [], "tool_choice": "auto", "n": 1})
    expected = client.post(route, json=BODIES[route]).json
    for fields in sent:
        answer = client.post(route, json=fields | BODIES[route])
        assert answer.status_code == 200, answer.json
        for told in ("usage", "warnings", "input_tokens"):
            assert answer.json.get(told) == expected.get(told)
    if route in (GENERATE, COMPLETIONS):
        assert ask(client, route, n=2, best_of=2)[0] == 200


@each_protocol
def test_what_is_not_done_is_a_400_that_names_it(client, route):
    for name in NEUTRAL.keys() - KNOWN - {*OWN.get(route, IN_CHATS)}:
        first = NEUTRAL[name][0]
        as_other = int(first) if isinstance(first, bool) else bool(first)
        for value in ({"a": 1}, 7, as_other):
            answer = client.post(route, json=BODIES[route] | {name: value})
            assert answer.status_code == 400, (name, value)
            said = answer.json["error"]["message"]
            assert said.startswith(f"{name} is not supported here, other than as ")


NEAR = {  # a misspelt field, and the one that is meant
    "temprature": "temperature", "max_token": "max_tokens", "topp": "top_p", "sead": "seed",
    "num_speculative_token": "num_speculative_tokens", "streaming": "stream", "x" * 9999: "",
    "n_predict": "", "\ud800\n": "", "": "",
}  # fmt: skip


@each_protocol
def test_an_unknown_field_is_a_400_that_names_it_and_the_nearest(client, route):
    for name, near in NEAR.items():
        answer = client.post(route, json=BODIES[route] | {name: 0})
        error = answer.json["error"]
        assert answer.status_code == 400 and len(error["message"]) < 120, name
        assert "there is no field " in error["message"]
        if near:
            assert f"'{name}' here: the nearest one is {near}" in error["message"]
        assert error.get("param", name[:100]) == name[:100]  # Anthropic has none
    assert client.post(route, json=BODIES[route] | dict.fromkeys(NEAR)).status_code == 200
    many = {f"{'x' * 100}{i}": i for i in range(5000)}
    assert client.post(route, json=BODIES[route] | many).status_code == 400


def test_a_field_of_another_route_is_named(client):
    """Which would be overwritten if it were taken."""
    others = {CHAT: "prompt", RESPONSES: "prompt", MESSAGES: "prompt", GENERATE: "messages"}
    for route, name in others.items():
        answer = client.post(route, json=BODIES[route] | {name: "a"})
        assert answer.status_code == 400 and name in answer.json["error"]["message"]


def test_two_names_of_a_limit_may_say_the_same(client):
    for route, other in ((GENERATE, "max_completion_tokens"), (RESPONSES, "max_output_tokens")):
        same, unlike = (BODIES[route] | {other: n, "max_tokens": 1} for n in (1, 2))
        assert client.post(route, json=same).status_code == 200
        answer = client.post(route, json=unlike)
        assert answer.status_code == 400 and is_error(answer.json, other)
    for stop, status in (["b"], 200), (["c"], 400):
        fields = BODIES[MESSAGES] | {"stop_sequences": ["b"], "stop": stop}
        assert client.post(MESSAGES, json=fields).status_code == status


def test_names_inside_of_messages_are_those_that_servers_gave(client):
    said = {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "x": 1}
    assert ask(client, CHAT, messages=[*TURNS, said, *TURNS])[0] == 200
    block = {"type": "text", "text": "c", "citations": None, "x": 1}
    turns = [*TURNS, {"role": "assistant", "content": [block], "id": "msg_1"}, *TURNS]
    assert client.post(MESSAGES, json=BODIES[MESSAGES] | {"messages": turns}).status_code == 200


CLIENTS = json.loads((ROOT / "tests" / "client_bodies.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CLIENTS)
def test_what_a_client_sends_by_default_is_answered(client, name):
    assert len(CLIENTS) == 10
    for route, body in CLIENTS[name]:
        limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & body.keys()
        fields = body | {"model": None} | {limit: min(body[limit], 2) for limit in limits}
        answer = client.post(route, json=fields)
        assert answer.status_code == 200, (route, body, answer.json)
        assert b'"error": {' not in answer.data


def test_a_long_prompt_is_cut_where_it_is_asked_for(client):
    ids = list(range(5, 400))

    def prompt(**fields):
        _, body = ask(client, GENERATE, prompt=ids, return_token_ids=True, **fields)
        return body["prompt_token_ids"]

    assert ask(client, GENERATE, prompt=ids)[0] == 400
    assert prompt(truncate_prompt_tokens=7) == ids[-7:]
    assert prompt(truncate_prompt_tokens=7, truncation_side="right") == ids[:7]
    assert prompt(truncate_prompt_tokens=-1, max_tokens=6) == ids[-250:]


@pytest.mark.parametrize("route", ROUTES[1:])
def test_an_answer_and_a_stream_tell_the_same_ids_and_tokens_by_them(client, route):
    """As vLLM has it: a chat's body has the prompt's ids, and a choice of a completion its own."""
    fields = {"n": 2, "seed": 1, "temperature": 1, "max_tokens": 6, "logprobs": True}
    fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    _, whole = ask(client, route, **fields)
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = ask(client, route, **fields, stream=True, stream_options=options)
    holder = whole if route == CHAT else whole["choices"][0]
    prompt = holder["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    holders = chunks if route == CHAT else sum([chunk["choices"] for chunk in chunks], [])
    told = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
    assert told == [prompt] * (1 if route == CHAT else 2) and "prompt_token_ids" in holders[0]
    for choice in whole["choices"]:
        parts = [p for c in chunks for p in c["choices"] if p["index"] == choice["index"]]
        ids = [token for part in parts for token in part["token_ids"]]
        assert ids == choice["token_ids"] and len(ids) == 6
        listed = choice["logprobs"]
        names = [one["token"] for one in listed["content"]] if route == CHAT else listed["tokens"]
        assert names == [f"token_id:{token}" for token in ids]
    *going, last = chunks
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for chunk in going:
        usage = chunk["usage"]
        assert usage["total_tokens"] == len(prompt) + usage["completion_tokens"]
    assert going[-1]["usage"]["completion_tokens"] == 6
    plain = ask(client, route, stream=True, stream_options={"continuous_usage_stats": True})[1]
    assert all("usage" not in c and "token_ids" not in json.dumps(c) for c in plain)


def test_stream_options_are_checked(client):
    for options, said in (({"include_usage": 1}, "include_usage"), ([], "object")):
        status, body = ask(client, CHAT, stream=True, stream_options=options)
        assert status == 400 and is_error(body, "stream_options")
        assert said in body["error"]["message"]
    _, events = ask(client, COMPLETIONS, stream=True, stream_options={"x": 1})
    assert events[-1]["warnings"] == []  # of names, those at the top count


def test_a_chat_may_say_how_the_template_is_used(client):
    """The template begins the assistant's turn, or the last turn is continued."""
    turns = [*TURNS, {"role": "assistant", "content": "c d"}]

    def ids(**fields):
        _, body = ask(client, CHAT, return_token_ids=True, **fields)
        return body["prompt_token_ids"]

    def read(text):
        return ask(client, GENERATE, prompt=text, return_token_ids=True)[1]["prompt_token_ids"]

    assert "add_generation_prompt" in TEMPLATE
    assert ids() == read("user: a b\nassistant:")
    assert ids(add_generation_prompt=False) == read("user: a b\n")
    assert ids(messages=turns, continue_final_message=True) == read("user: a b\nassistant: c d")
    status, body = ask(client, CHAT, continue_final_message=True)
    assert status == 400 and is_error(body, "continue_final_message")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert is_error(ask(client, CHAT, messages=turns, **both)[1], "add_generation_prompt")
    assert ids(truncate_prompt_tokens=2) == ids()[-2:]


def test_a_template_reads_the_variables_that_are_sent(chat_folder):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder("llama"))
    tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}{{ tone['x'] }}"
    how = template_options({"chat_template_kwargs": {"mood": "!", "tone": {"x": 7}}})
    assert tokenizer.decode(chat_prompt(TURNS, tokenizer, 256, how=how)) == "a b!7"
