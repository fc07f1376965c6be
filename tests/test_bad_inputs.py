"""What a caller can get wrong, on every route of the real process, byte by byte where HTTP matters.

Every mistake is answered with {"error": {"message", "type", "param", "code"}} and a status that
says whose mistake it was, and the next request is served as if nothing had been: first what we
thought of, in tables, then mutated requests by the thousand. Faults of our own are in
test_faults.py, load and leaving clients in test_server.py, the command line's mistakes in
test_command_line.py.
"""

import json
import random
import re
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from math import inf, nextafter

import pytest
from conftest import TARGET, TEMPLATE
from server import (
    GOOD,
    LIMIT_S,
    call,
    generate,
    health,
    is_error,
    parse,
    read_all,
    request,
    serving,
    until,
    wait_until_idle,
)
from transformers import AutoTokenizer

from messages import RequestError
from models import prompts as reading
from models.prompts import chat_prompt, tokenize
from serving.parsing import parse_fields

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
CONTEXT, DEFAULT_LIMIT = 256, 4  # what is good by chance shall be short
JSON = "Content-Type: application/json"
each_route = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def port(chat_folder):
    """A tiny model that all three routes can serve."""
    arguments = ["--drafter", "ngram", "--max-tokens", str(DEFAULT_LIMIT)]
    arguments += ["--max-running", "4", "--max-queued", "8"]  # fewer threads than half_sent
    with serving("--model", str(chat_folder("llama")), *arguments) as server:
        yield server.port
        server.end_well()


@pytest.fixture(scope="module", autouse=True)
def half_sent(port):
    """40 clients that stop in the middle of a header or a body, beside everything else here."""
    header = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Le"
    body = request("/generate", b'{"prompt": ', "Content-Length: 100")
    with ExitStack() as stack:
        address = ("127.0.0.1", port)
        clients = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(40)]
        for i, client in enumerate(clients):
            client.sendall(header if i % 2 else body)
        yield clients


def body_for(route, fields):
    """A body of /generate as the route wants it."""
    body = dict(fields)
    if "chat" in route and "prompt" in body:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return body


def post(port, route, fields):
    """(status, body) of a request in the words of /generate."""
    status, _, data = call(port, "POST", route, body_for(route, fields))
    return status, json.loads(data)


# ---------------------------------------------------------------------------- bodies and HTTP

NO_OBJECTS = [
    b'{"prompt": "a"', b"", b'[{"prompt": "a"}]', b"3", b'"prompt"', b"null",
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "top_p": -Infinity}', b"[" * 100_000,
    b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\xff\xfe"}',
    '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "a"} {"prompt": "b"}',
]  # fmt: skip
TYPES = [
    {}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "application/json", "Content-Encoding": "gzip"},
]  # fmt: skip


@each_route
def test_a_body_that_is_no_json_object_of_at_most_1_mib_is_refused(port, route):
    good, large = (body_for(route, GOOD | more) for more in ({}, {"prompt": "a" * (1 << 20)}))
    usual = {"Content-Type": "application/json"}
    cases = [(400, body, usual) for body in NO_OBJECTS] + [(413, large, usual)]
    for wanted, body, about in cases + [(415, good, about) for about in TYPES]:
        status, headers, data = call(port, "POST", route, body, about)
        assert status == wanted and headers["Content-Type"] == "application/json", body[:50]
        assert is_error(data) and headers["X-Request-Id"]
    assert post(port, route, GOOD)[0] == 200


@pytest.mark.parametrize(
    ("path", "methods", "wanted"),
    [
        ("/nope", "GET", 404),
        ("/page/../../../etc/passwd", "GET", 404),
        ("/page/%2e%2e%2f__init__.py", "GET", 404),
        ("/generate", "GET DELETE BREW", 405),
        ("/v1/chat/completions", "GET PUT", 405),
        ("/v1/models", "POST", 405),
    ],
)
def test_a_wrong_path_or_method_is_a_json_error(port, path, methods, wanted):
    for method in methods.split():
        status, headers, data = call(port, method, path, headers={})
        assert status == wanted and headers["Content-Type"] == "application/json"
        assert is_error(data) and (status == 405) == ("Allow" in headers)


# ------------------------------------------------------------------------------------- fields

BAD = {  # out of range, right behind the limits, and of another kind
    "prompt": ["", None, 5, [], [True], [-1], [4096], [2**70], [1.0], {"text": "a"}, "\ud800",
               [5] * CONTEXT, [1, True], [[]], ["a", "b"], [[5], [6]]],
    "max_tokens": [0, -1, 1.5, True, "5", 1_000_001, 10**400],
    "num_speculative_tokens": [-1, 17, 1000, "4", 1.0],
    "drafter": ["zzz", "", 3, ["ngram"], {}, "tests/faulty_server.py:Faulty"],
    "speculative": ["yes", 1],
    "stop": ["", 5, ["a"] * 9, ["a", ""], ["a", 5], "\ud800", ["\ud800"], "a" * 1001, [["a"]], {}],
    "stream": ["maybe", 1],
    "stream_options": [{"include_usage": True}, "usage"],  # without a stream, and with one
    "trace": [1, "yes"],
    "compare": ["yes", 1, 0.0],
    "verification": ["chance", ["coupled"], True, ""],
    "temperature": [-1, -5e-324, "hot", nextafter(100.0, inf), 1e9, 10**400, True],
    "top_p": [0, -0.0, nextafter(1e-9, 0.0), nextafter(1.0, 2.0), 2, [0.5]],
    "top_k": [-2, 4.5, 2**31 + 1, False],
    "min_p": [-5e-324, -0.1, nextafter(1.0, 2.0), 2],
    "repetition_penalty": [0, -1, nextafter(1e-9, 0.0), nextafter(100.0, inf)],
    "seed": ["a", 2**64, -(2**63) - 1, 1.5, True],
    "logprobs": [999, 21, -1, 1.0, "all"],
}  # fmt: skip
TAKEN = {  # at the limits
    "max_tokens": [1, 1_000_000], "num_speculative_tokens": [0, 16], "drafter": ["ngram"],
    "temperature": [0, 5e-324, 100], "top_p": [1e-9, 1], "top_k": [-1, 2**31], "min_p": [0, 1],
    "repetition_penalty": [1e-9, 100], "seed": [-(2**63), 2**64 - 1], "verification": ["rejection"],
    "stream": [True], "trace": [True], "compare": [True],
}  # fmt: skip
CHANGED = [  # name, what is given, what it becomes
    ("stop", "x" * 1000, ("x" * 1000,)), ("stop", ["x"] * 8, ("x",) * 8), ("stop", [], ()),
    ("logprobs", 20, 20), ("logprobs", True, 0), ("logprobs", False, None),
    ("drafter", "none", None), ("prompt", [5], [5]),
]  # fmt: skip
DEFAULTS = {
    "max_tokens": 128, "num_speculative_tokens": 5, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
    "min_p": 0.0, "repetition_penalty": 1.0, "verification": "coupled", "seed": 3, "drafter": "mtp",
}  # fmt: skip
UNSUPPORTED = {  # by /v1, where they would change the output
    "n": [True, 2, "1"], "best_of": [3], "echo": [True], "suffix": ["x"],
    "presence_penalty": [0.5], "frequency_penalty": [0.5], "logit_bias": [{"5": 1}],
    "tools": [[{"type": "function"}]], "tool_choice": ["required", {"type": "function"}],
    "functions": [[{"name": "f"}]], "function_call": [{"name": "f"}], "modalities": [["audio"]],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
}  # fmt: skip


@each_route
@pytest.mark.parametrize("name", [*BAD, *UNSUPPORTED])
def test_a_bad_field_is_refused_by_name(port, route, name):
    if name in UNSUPPORTED and route == "/generate":
        status, body = post(port, route, GOOD | {name: UNSUPPORTED[name][0]})
        assert status == 200 and body["warnings"] == [f"unknown field {name!r} was ignored"]
        return
    param = "messages" if name == "prompt" and "chat" in route else name
    for value in (BAD | UNSUPPORTED)[name]:
        if param == "messages" and value == "":
            continue  # an empty message is a message
        status, body = post(port, route, GOOD | {"stream": value == "usage"} | {name: value})
        assert status == 400 and is_error(body, param), value
        assert body["error"]["type"] == "invalid_request_error"
        assert param in body["error"]["message"] or name == "prompt"


BAD_CHATS = {
    "messages": [None, [], {}, "hello", [None], ["hello"], [{}], [{"content": "a"}],
                 [{"role": "user"}], [{"role": "user", "content": None}],
                 [{"role": 5, "content": "a"}], [{"role": "user", "content": 5}],
                 [{"role": "user", "content": [{"type": "image_url"}]}],
                 [{"role": "user", "content": [5]}], [{"role": "user", "content": "\ud800"}],
                 [{"role": "\ud800", "content": "a"}],
                 [{"role": "tool", "content": "what the template refuses"}],
                 [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
                 [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]],
    "top_logprobs": [-1, 21, 1.5, "2", True],
    "logprobs": [2],
    "max_completion_tokens": [0, "5"],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHATS)
def test_what_only_a_chat_has_is_refused_by_the_name_it_was_sent_under(port, name):
    good = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True}
    for value in BAD_CHATS[name]:
        status, _, data = call(port, "POST", ROUTES[2], good | {name: value})
        assert status == 400 and is_error(data, name), value
        message = json.loads(data)["error"]["message"]
        assert message.startswith(f"{name} ") or name == "messages"
    status, body = post(port, ROUTES[2], GOOD | {"top_logprobs": 2})  # without logprobs: true
    assert status == 400 and is_error(body, "top_logprobs")


@each_route
def test_prompts_beyond_the_context_are_refused_naming_both_numbers(port, route):
    param = "messages" if "chat" in route else "prompt"
    status, body = post(port, route, {"prompt": "a b c d " * CONTEXT})
    assert status == 400 and is_error(body, param)
    length, context = map(int, re.findall(r"\d+", body["error"]["message"]))
    assert length >= context == CONTEXT


@each_route
def test_null_is_the_default_and_nul_is_text(port, route):
    nothing = dict.fromkeys(("max_tokens", "temperature", "model"))
    status, body = post(port, route, {"prompt": "a\0b", "stop": "\0"} | nothing)
    assert status == 200 and 0 < body["usage"]["completion_tokens"] <= DEFAULT_LIMIT


@each_route
def test_an_unknown_model_is_not_found(port, route):
    for model in ("gpt-5", "", 7, ["llama"], "x" * 100_000):
        status, body = post(port, route, GOOD | {"model": model})
        assert status == 404 and is_error(body, "model")
        assert body["error"]["code"] == "model_not_found"
        assert len(body["error"]["message"]) < 500


@each_route
def test_of_many_unknown_fields_some_are_named_in_the_warnings(port, route):
    status, body = post(port, route, GOOD | {f"{'x' * 100}{i}": i for i in range(5000)})
    assert status == 200 and len(json.dumps(body["warnings"])) < 3000
    assert body["warnings"][-1] == f"{5000 - 16} more unknown fields were ignored"


def test_an_unknown_drafter_is_told_the_choices(port):
    for drafter in ("z" * 10_000, dict.fromkeys(map(str, range(10_000)))):
        _, body = post(port, "/generate", GOOD | {"drafter": drafter})
        assert "choose: auto, ngram, none" in body["error"]["message"]
        assert len(body["error"]["message"]) < 200


def test_a_field_at_its_limits_is_taken_as_it_is_given():
    """In its final type; all others have their defaults, and so has what is null."""

    def parse(**body):
        body, drafters = {"prompt": "x"} | body, ["ngram", "mtp"]
        known = DEFAULTS, "m", 256, 4096
        fields, notes = parse_fields(body, lambda *_, **__: {"input_ids": [7]}, drafters, *known)
        return fields | vars(fields.pop("sampling")), notes

    usual, _ = parse(**dict.fromkeys(TAKEN))
    assert usual.items() >= DEFAULTS.items() and usual["prompt"] == [7]
    unchanged = [(name, value, value) for name, values in TAKEN.items() for value in values]
    for name, given, becomes in unchanged + CHANGED:
        fields, notes = parse(**{name: given})
        assert fields == usual | {name: becomes} and notes == []
        assert type(fields[name]) is float or not isinstance(usual.get(name), float)
    for more in ({"speculative": False}, {"speculative": True, "drafter": "none"}):
        assert parse(**more)[0] == usual | {"drafter": None}


# --------------------------------------------------------------------- what is refused unread


class Tokenizer:
    """Notes what it is asked to do. Each character becomes a token, and none has more than four."""

    def __init__(self, template=None):
        self.real = AutoTokenizer.from_pretrained(TARGET)
        self.chat_template = self.real.chat_template = template or TEMPLATE
        self.calls = []

    def get_vocab(self):
        self.calls.append("get_vocab")
        return {"four": 0}

    def apply_chat_template(self, turns, **options):
        self.calls.append("render")
        return self.real.apply_chat_template(turns, **options)

    def __call__(self, text, **options):
        self.calls.append("tokenize")
        return {"input_ids": [5] * len(text)}


def test_what_cannot_fit_is_refused_before_it_is_rendered_or_read():
    """Reading 1 MB takes up to 7 s. The longest token of a vocabulary is looked for once."""
    tokenizer = Tokenizer()
    too_many = "messages has 28000 entries; at most 2000 are read"
    too_long = f"characters are more than a context of {CONTEXT} tokens holds"
    for messages, said in (
        ([{"role": "user", "content": ""}] * 28_000, too_many),
        ([None] * 28_000, too_many),
        ([{"role": "user", "content": "a" * 1_000_000}], too_long),
        ([{"role": "a" * 1_000_000, "content": ""}], too_long),
        ([{"role": "user", "content": [{"type": "text", "text": "a" * 500}]}] * 2000, too_long),
    ):
        with pytest.raises(RequestError, match=said):
            chat_prompt(messages, tokenizer, CONTEXT)
    with pytest.raises(RequestError, match=too_long):
        tokenize("a" * 1_000_000, tokenizer, CONTEXT)
    assert tokenizer.calls == ["get_vocab"]
    few = [{"role": "user", "content": "a"}] * 2000
    assert len(chat_prompt(few, tokenizer, CONTEXT)) == len("user: a\n") * 2000 + 10
    assert tokenizer.calls == ["get_vocab", "render", "tokenize"]


def test_a_template_that_loops_is_ended(monkeypatch):
    """It is code that comes with a model."""
    monkeypatch.setattr(reading, "_TEMPLATE_LIMIT_S", 0.05)
    one = "{% for i in range(99999) %}"
    tokenizer = Tokenizer(one * 4 + "{% endfor %}" * 4)
    with pytest.raises(RequestError, match=r"the chat template took longer than 0\.05 s"):
        chat_prompt([{"role": "user", "content": "a"}], tokenizer, CONTEXT)
    for thread in threading.enumerate():
        if thread.name == "chat template":
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert tokenizer.calls == ["render"]


class Clock:
    """In the place of the module `time`: its time goes on while somebody sleeps, and only then."""

    def __init__(self):
        self.now, self.slept = 0.0, []
        self.monotonic = lambda: self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_long_work_takes_turns_with_pauses_and_few_may_wait(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(reading, "time", clock)
    places, order = threading.BoundedSemaphore(2), []
    turns = reading.Turns("long tests", short=10, pause=0.5, places=places)

    def second():
        with turns.take(20):
            order.append("second")

    thread = threading.Thread(target=second)
    with turns.take(11):
        thread.start()
        until(lambda: places._value == 0)
        with turns.take(10):  # which is short
            order.append("short")
        with pytest.raises(RequestError, match="too many long tests at once") as error:
            turns.take(11).__enter__()
        order.append("first")
    thread.join()
    assert order == ["short", "first", "second"] and error.value.status == 429
    assert clock.slept == [0, 5.5]  # half a second for each of the eleven
    clock.now += 9
    with suppress(ZeroDivisionError), turns.take(12):
        1 / 0  # noqa: B018
    second()
    assert clock.slept == [0, 5.5, 1, 6] and places._value == 2


# ------------------------------------------------------------------------------------ mutations

NUM_REQUESTS, NUM_CLIENTS = 3_000, 4
EXPECTED = {200, 400, 403, 404, 405, 413, 415, 431, 501, 505}
FIELDS = {
    "prompt": "a b c a b c a", "max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
    "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5, "stop": ["zz"], "logprobs": 2,
    "verification": "rejection",
    "speculative": True, "drafter": "ngram", "num_speculative_tokens": 3, "stream": False,
    "trace": True, "compare": True, "model": None, "stream_options": None, "n": 1,
    "messages": [{"role": "user", "content": "hello"}], "top_logprobs": 1, "user": "me",
}  # fmt: skip
VALUES = [value for values in BAD.values() for value in values] + [
    None, False, 0, 1, 17, 2**31, 2**63, 10**30, 0.5, 1e-320, 1e308, "a", "\0", "é", "🙂", "\u202e",
    "true", "null", "<script>", "../../etc/passwd", "%s%n", "{{ 7 * 7 }}", "a" * 5000, [0],
    [1, 2, 3], [None], ["a"], [5] * 40, {"a": {"b": []}}, {"type": "text", "text": "a"},
    {"role": "user", "content": "a"}, [{"role": "user"}], [{"role": "user", "content": "a"}] * 3,
    [{"role": "system", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {"include_usage": True},
]  # fmt: skip
HEADERS = [
    "Content-Type: text/plain", "Content-Type:", "Content-Type: application/json; charset=utf-16",
    "Content-Encoding: br", "Expect: 100-continue", "Accept: image/png", "Range: bytes=0-1",
    "X-Request-Id: é", "X-Request-Id: " + "a" * 3000, "Authorization: Bearer", "Cookie: a=b; =;;",
    "X-Forwarded-For: ::1", "Host: elsewhere", "Upgrade: h2c", "Content-Length: 7",
    "Content-Length: -1", "Content-Length: 99999999999", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "no header at all", " folded: header",
    "X-Long: " + "b" * 9000, "If-None-Match: *", "Origin: null", "\x00: zero",
]  # fmt: skip
LINES = [
    "GET {} HTTP/1.1", "PUT {} HTTP/1.1", "HEAD {} HTTP/1.1", "OPTIONS {} HTTP/1.1",
    "POST {} HTTP/1.0", "POST {} HTTP/9.9", "POST {}?a=%ff&b HTTP/1.1", "POST {}/ HTTP/1.1",
    "POST /%00{} HTTP/1.1", "POST http://x{} HTTP/1.1", "POST //{} HTTP/1.1", "post {} HTTP/1.1",
    "POST {}", "{}", "POST /v1/models HTTP/1.1", "GET /v1/models/{} HTTP/1.1", "POST * HTTP/1.1",
    "GET /page/..%2f{} HTTP/1.1", "GET /health HTTP/1.1", "GET /metrics HTTP/1.1",
]  # fmt: skip


def mutated(rng):
    """(bytes to send, what the client does then: read, end its side first, or leave)."""
    route = rng.choice(ROUTES)
    names = rng.sample(sorted(FIELDS), rng.randrange(6))
    fields = body_for(route, {"prompt": FIELDS["prompt"]}) | {n: FIELDS[n] for n in names}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        mutate_fields(rng, fields)
    body = bytearray(json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode(errors="replace"))
    if rng.random() < 0.25:
        mutate_bytes(rng, body)
    line, headers, extra = f"POST {route} HTTP/1.1", ["Host: localhost"], ""
    if rng.random() < 0.1:
        line = rng.choice(LINES).format(route)
    if rng.random() < 0.9:
        headers.append(JSON)
    if rng.random() < 0.15:
        extra = rng.choice(HEADERS)
        headers.insert(rng.randrange(len(headers) + 1), extra)
    headers += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    may_want_more = extra.startswith(("Content-Length", "Transfer-Encoding"))
    then = "leave" if rng.random() < 0.05 else "end" if may_want_more else "read"
    return "\r\n".join([line, *headers]).encode() + body, then


def mutate_fields(rng, fields):
    kind, name, value = rng.randrange(5), rng.choice(sorted(FIELDS)), rng.choice(VALUES)
    if kind == 0:
        fields.pop(rng.choice([*fields, name]), None)
    elif kind == 1:
        fields[rng.choice((name.upper(), name + "_"))] = value
    elif kind == 2 and fields:  # a good value under another name
        fields[name] = rng.choice(list(fields.values()))
    else:
        fields[name] = value


def mutate_bytes(rng, body):
    at = rng.randrange(len(body))
    deep = rng.choice((b"[", b'{"a":', b"\\u", b"9")) * rng.choice((1, 10, 3000))
    cut = slice(at, rng.choice((at, at + 1, len(body))))
    body[cut] = rng.choice((b"", deep, rng.randbytes(rng.randrange(1, 9)), body[at:] * 2))


def check(port, seed):
    """The status of request `seed`; None where the client has left, or it was never whole."""
    data, then = mutated(random.Random(seed))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        if then == "leave":  # with a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return None
        if then == "end":
            client.shutdown(socket.SHUT_WR)
        response = read_all(client)
    assert b"Traceback" not in response and b"serving/" not in response, (seed, response)
    if not response and then != "read":
        return None
    assert response.startswith(b"HTTP/"), (seed, response[:200])
    status = int(response.split()[1])
    if status == 100:
        return None
    assert status in EXPECTED, (seed, response)
    if status >= 400 and then == "read" and not data.startswith(b"HEAD"):
        body = parse(response)[2]
        assert is_error(body, body["error"]["param"]), (seed, response)
    return status


def test_mutated_requests_get_an_answer_or_a_json_error(port):
    """No 500, no hang, nothing lost; to repeat one that failed: `check(port, seed)`."""
    good = {"prompt": "a b a b a b a", "max_tokens": 12, "seed": 3}
    before = generate(port, **good)[1]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        statuses = list(pool.map(lambda seed: check(port, seed), range(NUM_REQUESTS)))
    counts = {status: statuses.count(status) for status in set(statuses)}
    assert counts[200] > NUM_REQUESTS / 10 and counts[400] > NUM_REQUESTS / 10
    assert len(counts) >= 7, counts  # the mutations reach every kind of error
    wait_until_idle(port)  # from those, too, who have left
    state = health(port)
    assert state["status"] == "ok"
    assert [w for w in state["warnings"] if "draft tokens are accepted" not in w] == []
    after = generate(port, **good)[1]
    assert after["token_ids"] == before["token_ids"] and call(port, "GET", "/")[0] == 200


def test_half_sent_requests_are_closed_in_the_end(half_sent):
    """After 10 s, with a reason. The last test here, as they have passed by now."""
    for client in half_sent:
        status, headers, body = parse(read_all(client))
        assert status == 408 and headers["Connection"] == "close" and is_error(body)
