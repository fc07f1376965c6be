"""A request has the fields of its route, and nobody's misspelt field is silently ignored.

good_requests.txt is the table of what each field does; what is refused is in test_bad_inputs.py.
client_bodies.json has what ten clients send by default, one request a line, each client with its
version. They were recorded at a socket of this machine, but for Open WebUI's, which are written
down from its source.
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, asked, module_client
from started import BODIES, ROUTES
from transformers import AutoTokenizer

from runtime.models.chat import chat_prompt, template_options
from runtime.values import RequestError
from server import answers
from server.fields import NEUTRAL, SILENT
from server.parsing import KNOWN

GENERATE, COMPLETIONS, CHAT, MESSAGES, COUNT, RESPONSES = BODIES
ANSWERING = [*ROUTES, MESSAGES, RESPONSES]
TURNS = [{"role": "user", "content": "a b"}]


def read_table(name, known):
    """For each field and value of a table beside this file: (field, routes, words, value, sent).

    Values are Python's, which knows these names. What is sent is the field, or all that the value
    has, if the values stand behind `with`.
    """
    for line in Path(__file__).with_name(name).read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            routes, fields, words, values = line.split(" | ", 3)
            listed = eval(f"[{values.removeprefix('with ')}]", known)
            for field, value in product(fields.split(), listed):
                sent = value if values.startswith("with ") else {field: value}
                yield field, routes_of(routes), words.replace("~", field), value, sent


def routes_of(words):
    """The paths of routes that a table names."""
    names = "generate completions chat messages count responses".split()
    paths = dict(zip(names, BODIES, strict=True))
    groups = {"openai": ROUTES, "each": (*ROUTES, MESSAGES, RESPONSES)}
    return [path for word in words.split() for path in groups.get(word) or [paths[word]]]


TABLE = list(read_table("good_requests.txt", globals()))
ask = partial(asked, prompt="a b")
client = module_client(drafter="ngram", max_tokens=4)


@pytest.fixture
def wanted(client, monkeypatch):
    """The attributes of the request that the engine gets; those of a text are beside them."""
    submitted = []

    def submit(*requests):
        submitted.append(requests)
        raise RequestError("not now", status=503)

    def wanted(route, fields):
        submitted.clear()
        answer = client.post(route, json={"seed": 3} | BODIES[route] | fields)
        if route == COUNT:
            return answer.json
        assert submitted, answer.json
        first, *others = submitted[0]
        own = vars(first) | vars(first.sampling) | {"runs": 1 + len(others)}
        return {name: value for name, value in own.items() if name != "sampling"}

    monkeypatch.setattr(client.application.extensions["worker"], "submit", submit)
    return wanted


def changes(was, now):
    return {name: value for name, value in now.items() if value != was[name]}


@pytest.mark.parametrize("route", ANSWERING)
def test_a_field_changes_what_it_says_and_nothing_else(wanted, route):
    was = wanted(route, {})

    def ids_of(text):
        return wanted(GENERATE, {"prompt": text})["prompt"]

    for field, routes, changed, value, sent in TABLE:
        if route in routes:
            expected = eval(f"dict({changed})", {"v": value, "was": was, "ids_of": ids_of})
            assert changes(was, wanted(route, sent)) == changes(was, was | expected), (field, sent)


def test_each_field_has_a_row():
    formats = {"response_format", "json_schema", "regex", "grammar", "choice"}
    assert KNOWN - formats <= {field for field, *_ in TABLE}


def test_what_is_taken_is_served(client):
    """At its limits, too: whatever a number is, there is a text."""
    for field, routes, _, _, sent in TABLE:
        if GENERATE in routes:
            fields = {"temperature": 1, "seed": 3} | sent
            status, body = ask(client, GENERATE, **fields)
            body = body[-1] if isinstance(body, list) else body
            assert status == 200 and body["seed"] == fields["seed"], (fields, body)
            limit = fields.get("max_tokens", 0)
            lowered = [w for w in body["warnings"] if f"max_tokens was lowered from {limit}" in w]
            assert len(lowered) == (limit > 256)  # the context
            unused = ["prediction was not used: the drafter is ngram"]
            assert body["warnings"] == lowered + unused * (field == "prediction")
    for route in ROUTES:
        assert asked(client, route, "a\0b", stop="\0")[0] == 200


def test_a_chat_without_a_limit_goes_on_until_the_context_is_full(wanted, client, monkeypatch):
    options = client.application.extensions["worker"].options
    monkeypatch.setitem(vars(options), "max_tokens", None)  # as without the option
    was = wanted(CHAT, {"messages": TURNS, "max_tokens": None})
    assert was["max_tokens"] == 256 - len(was["prompt"])
    same = wanted(GENERATE, {"prompt": TURNS, "chat": True, "max_tokens": None})
    assert (same["prompt"], same["max_tokens"]) == (was["prompt"], was["max_tokens"])
    assert wanted(GENERATE, {"max_tokens": None})["max_tokens"] == 128


def test_silence_is_filled_while_nothing_is_shown(monkeypatch):
    """A call is held back until it is whole, say."""
    job = SimpleNamespace(read=lambda: iter([[(0, {})]] * 3), cancelled=True, cancel=lambda: None)
    shape = SimpleNamespace(opening="", closing="", shown=lambda *_: "")
    for silent_s, expected in ((-1.0, [answers.PING] * 3), (1e9, [])):
        monkeypatch.setattr(answers, "LONGEST_POLL_S", silent_s)
        assert [*answers.stream(job, shape, dict)] == expected


@pytest.mark.parametrize("route", BODIES)
def test_what_can_change_no_text_is_taken_silently(wanted, route):
    """Fields of who asks, whatever they hold; what is off; and all that is null."""
    assert len(SILENT) <= 40 and not SILENT & (KNOWN | NEUTRAL.keys())
    names = {*KNOWN, *NEUTRAL, "unheard_of"} - {"seed", *BODIES[route]}
    sent = [dict.fromkeys(SILENT - {"parallel_tool_calls"}, {"a": [1]}), dict.fromkeys(names)]
    other = {CHAT: "top_logprobs", MESSAGES: "tool_choice", COUNT: "tool_choice"}.get(route)
    off = {name: values for name, values in NEUTRAL.items() if name != other}
    sent += [{n: values[i] for n, values in off.items() if i < len(values)} for i in range(2)]
    was = wanted(route, {})
    for fields in sent:
        assert changes(was, wanted(route, fields)) == {}


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


def test_a_token_s_bytes_and_place_are_the_same_under_its_number(client):
    """Also behind a byte that is no character, which is told only with the next token."""
    fields = {"logprobs": True, "temperature": 3, "seed": 3, "max_tokens": 6}
    fields["allowed_token_ids"] = [128, 65, 66]  # the byte C3, two letters
    given = {"prompt": [88, 128, 65], "echo": True} | fields
    numbers = {"return_tokens_as_token_ids": True}
    texts, named = (
        ask(client, "/v1/completions", **given | more)[1]["choices"][0] for more in ({}, numbers)
    )
    assert "\ufffd" in texts["text"] == named["text"]
    assert texts["logprobs"]["text_offset"] == named["logprobs"]["text_offset"]
    texts, named = (
        ask(client, CHAT, **fields | more)[1]["choices"][0]["logprobs"]["content"]
        for more in ({}, numbers)
    )
    assert [one["bytes"] for one in texts] == [one["bytes"] for one in named]
    assert texts != named


def test_a_template_reads_the_variables_that_are_sent(chat_folder):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder("llama"))
    tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}{{ tone['x'] }}"
    how = template_options({"chat_template_kwargs": {"mood": "!", "tone": {"x": 7}}})
    assert tokenizer.decode(chat_prompt(TURNS, tokenizer, 256, how=how)) == "a b!7"
