"""What a caller can get wrong, on every route of the real process, byte by byte where HTTP matters.

Every mistake is answered with {"error": {"message", "type", "param", "code"}} and a status that
says whose mistake it was, and the next request is served as if nothing had been. Faults of our own
are in test_faults.py, load and leaving clients in test_server.py, the command line's mistakes in
test_command_line.py.
"""

import json
import re
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from test_server import call, events_of, start

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
CONTEXT = 256
GOOD = {"prompt": "x = 1", "max_tokens": 2}
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def port(chat_folder):
    """A tiny model that all three routes can serve."""
    arguments = ("--drafter", "ngram", "--max-running", "4")
    process, port = start("--model", str(chat_folder("llama")), *arguments)
    with process:
        yield port
        process.terminate()
        assert process.wait(40) == 0
        assert "Traceback" not in process.log() and '"status": 500' not in process.log()


@pytest.fixture(scope="module", autouse=True)
def half_sent(port):
    """40 clients that stop in the middle of a header or a body, beside everything else here."""
    header = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Le"
    body = request("/generate", b'{"prompt": ', JSON, "Content-Length: 100")
    clients = []
    for half in [header, body] * 20:
        clients.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        clients[-1].sendall(half)
    yield clients
    for client in clients:
        client.close()


def body_for(route, fields):
    """A body of /generate as the route wants it."""
    body = dict(fields)
    if route.endswith("chat/completions") and "prompt" in body:
        prompt = body.pop("prompt")
        body["messages"] = [{"role": "user", "content": prompt}]
    return body


def post(port, route, fields):
    """(status, body) of a request in the words of /generate."""
    status, _, data = call(port, "POST", route, body_for(route, fields))
    return status, json.loads(data)


def text_of(answer):
    """The text in an answer of any route."""
    if "choices" not in answer:
        return answer["text"]
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def raw(port, data, timeout_s=20):
    """(status, headers, body) of bytes as they are; the body as JSON."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        client.sendall(data)
        return parse(read_all(client))


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
    """A POST as bytes, with these headers beside the usual ones."""
    lines = [f"POST {route} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def is_error(body, param=None):
    """Whether it is the one error body, naming the field."""
    assert list(body) == ["error"], body
    error = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and error["message"]
    assert "Traceback" not in error["message"] and "<" not in error["message"][:1]
    return error["param"] == param


def goes_on(port):
    """Whether the server still answers as it should."""
    return all(post(port, route, GOOD)[0] == 200 for route in ROUTES)


# ------------------------------------------------------------------------------------- bodies

BODIES = {
    "broken": b'{"prompt": "a"',
    "empty": b"",
    "array": b'[{"prompt": "a"}]',
    "number": b"3",
    "string": b'"prompt"',
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "a", "top_p": -Infinity}',
    "nested": b"[" * 100_000,
    "nested in a field": b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "long integer": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "trailing": b'{"prompt": "a"} {"prompt": "b"}',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_json_object_is_a_400(port, route, body):
    status, headers, data = call(port, "POST", route, body)
    assert status == 400 and headers["Content-Type"] == "application/json"
    assert is_error(json.loads(data)) and headers["X-Request-Id"]
    assert goes_on(port)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
     {"Content-Type": "application/json", "Content-Encoding": "gzip"}],
    ids=str,
)  # fmt: skip
def test_a_body_of_another_type_is_a_415(port, route, headers):
    body = json.dumps(body_for(route, GOOD)).encode()
    status, _, data = call(port, "POST", route, body, headers)
    assert status == 415 and is_error(json.loads(data))


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_beyond_1_mib_is_a_413_in_json(port, route):
    body = json.dumps(body_for(route, GOOD | {"prompt": "a" * (1 << 20)})).encode()
    status, headers, data = call(port, "POST", route, body)
    assert status == 413 and headers["Content-Type"] == "application/json"
    assert is_error(json.loads(data))
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part)
        for part in (body[i : i + 65536] for i in range(0, len(body), 65536))
    )
    chunked = request(route, chunks + b"0\r\n\r\n", JSON, "Transfer-Encoding: chunked")
    status, headers, data = raw(port, chunked)
    assert status == 413 and headers["Content-Type"] == "application/json" and is_error(data)
    assert goes_on(port)


def test_a_chunked_body_within_the_limit_is_read(port):
    body = json.dumps(GOOD).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    status, _, data = raw(port, request("/generate", chunks, JSON, "Transfer-Encoding: chunked"))
    assert status == 200 and data["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("route", ROUTES)
def test_an_announced_body_of_10_gb_is_refused_without_waiting_for_it(port, route):
    status, headers, data = raw(port, request(route, b"", JSON, "Content-Length: 10000000000"))
    assert status == 413 and headers["Content-Type"] == "application/json" and is_error(data)


MALFORMED = {
    "length is a word": (["Content-Length: ten"], b"{}"),
    "length is negative": (["Content-Length: -5"], b"{}"),
    "length is given twice": (["Content-Length: 2", "Content-Length: 3"], b"{}"),
    "length with a sign": (["Content-Length: +2"], b"{}"),
    "chunk without a size": (["Transfer-Encoding: chunked"], b"zz\r\n{}\r\n0\r\n\r\n"),
    "chunk without its end": (["Transfer-Encoding: chunked"], b"2\r\n{}XX0\r\n\r\n"),
    "header without a colon": (["what is this"], b"{}"),
}


@pytest.mark.parametrize(("headers", "body"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_http_is_a_400_in_json(port, headers, body):
    status, answered, data = raw(port, request("/generate", body, JSON, *headers))
    assert status == 400 and answered["Content-Type"] == "application/json" and is_error(data)
    assert answered["X-Request-Id"] and goes_on(port)


def test_a_transfer_encoding_that_nobody_knows_is_a_501_in_json(port):
    status, _, data = raw(port, request("/generate", b"{}", JSON, "Transfer-Encoding: zip"))
    assert status == 501 and is_error(data)


def test_headers_of_300_kb_are_a_431(port):
    header = "X-Long: " + "a" * 300_000
    status, answered, data = raw(port, request("/generate", b"{}", JSON, header))
    assert status == 431 and answered["Content-Type"] == "application/json" and is_error(data)
    assert goes_on(port)


def test_half_sent_requests_leave_health_fast(port, half_sent):
    times = []
    for _ in range(21):
        began = time.perf_counter()
        assert call(port, "GET", "/health")[0] == 200
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.1  # the median, as this machine may be busy
    assert goes_on(port)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/page/../../../etc/passwd", 404),
        ("GET", "/page/%2e%2e%2f__init__.py", 404),
        ("GET", "/generate", 405),
        ("DELETE", "/generate", 405),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/models", 405),
        ("BREW", "/generate", 405),
    ],
)
def test_a_wrong_path_or_method_is_a_json_error(port, method, path, status):
    got, headers, data = call(port, method, path)
    assert got == status and headers["Content-Type"] == "application/json"
    assert is_error(json.loads(data))
    assert (status == 405) == ("Allow" in headers)


# ------------------------------------------------------------------------------------- fields

BAD_FIELDS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"num_speculative_tokens": 1000}, "num_speculative_tokens"),
    ({"num_speculative_tokens": "4"}, "num_speculative_tokens"),
    ({"drafter": "zzz"}, "drafter"),
    ({"drafter": 3}, "drafter"),
    ({"drafter": ["ngram"]}, "drafter"),
    ({"drafter": "tests/faulty_server.py:Faulty"}, "drafter"),
    ({"speculative": "yes"}, "speculative"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 20}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stream": "maybe"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": "usage"}, "stream_options"),
    ({"trace": 1}, "trace"),
    ({"compare": "yes"}, "compare"),
    ({"verification": "chance"}, "verification"),
    ({"verification": ["coupled"]}, "verification"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 4.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"seed": "a"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logprobs": 999}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": "all"}, "logprobs"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_refused_by_name(port, route, fields, param):
    is_chat = route.endswith("chat/completions")
    if is_chat and param == "prompt":
        param = "messages"
        if fields["prompt"] == "":
            pytest.skip("an empty message is a message")
    status, body = post(port, route, GOOD | fields)
    assert status == 400 and is_error(body, param)
    assert param in body["error"]["message"] or param in ("prompt", "messages")


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "hello", [None], ["hello"], [{}], [{"content": "a"}], [{"role": "user"}],
     [{"role": "user", "content": None}], [{"role": 5, "content": "a"}],
     [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}],
     [{"role": "user", "content": [5]}], [{"role": "user", "content": "\ud800"}],
     [{"role": "\ud800", "content": "a"}],
     [{"role": "tool", "content": "what the template refuses"}]],
    ids=str,
)  # fmt: skip
def test_messages_that_are_none_are_a_400(port, messages):
    status, _, data = call(port, "POST", ROUTES[2], {"messages": messages, "max_tokens": 2})
    assert status == 400 and is_error(json.loads(data), "messages")


@pytest.mark.parametrize("top", [-1, 21, 1.5, "2", True])
def test_top_logprobs_beyond_20_are_refused_by_their_own_name(port, top):
    fields = GOOD | {"logprobs": True, "top_logprobs": top}
    status, body = post(port, ROUTES[2], fields)
    assert status == 400 and is_error(body, "top_logprobs")
    assert body["error"]["message"].startswith("top_logprobs ")


def test_a_limit_is_refused_by_the_name_it_was_sent_under(port):
    status, body = post(port, ROUTES[2], {"prompt": "a", "max_completion_tokens": 0})
    assert status == 400 and is_error(body, "max_completion_tokens")
    assert body["error"]["message"].startswith("max_completion_tokens must be")


@pytest.mark.parametrize("value", [True, 2, "1"])
def test_several_choices_are_refused(port, value):
    for route in ROUTES[1:]:
        status, body = post(port, route, GOOD | {"n": value})
        assert status == 400 and is_error(body, "n")


@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_beyond_the_context_is_refused_naming_both_numbers(port, route):
    status, body = post(port, route, {"prompt": "a b c d " * CONTEXT})
    assert status == 400 and is_error(body, "messages" if "chat" in route else "prompt")
    length, context = map(int, re.findall(r"\d+", body["error"]["message"]))
    assert length >= context == CONTEXT


@pytest.mark.parametrize("route", ROUTES)
def test_a_flood_of_endless_prompts_is_refused_and_disturbs_nobody(port, route):
    """Reading a text takes time, up to 7 s for 1 MB: what cannot fit is refused unread."""
    fields = {"prompt": "1" * 1_000_000}
    with ThreadPoolExecutor(20) as pool:
        refused = [pool.submit(post, port, route, fields) for _ in range(40)]
        assert call(port, "GET", "/health")[0] == 200
        answers = [future.result() for future in refused]
    assert {status for status, _ in answers} <= {400, 429}
    assert any("characters are more than a context" in b["error"]["message"] for _, b in answers)
    for status, body in answers:
        assert status == 429 or is_error(body, "messages" if "chat" in route else "prompt")
    assert goes_on(port)


@pytest.mark.parametrize("route", ROUTES)
def test_max_tokens_beyond_the_context_is_clamped_and_said(port, route):
    fields = {"prompt": "a b c " * 30, "max_tokens": 1000}
    status, body = post(port, route, fields)
    assert status == 200
    reason = body.get("finish_reason") or body["choices"][0]["finish_reason"]
    usage = body["usage"]
    assert (reason, usage["total_tokens"]) == ("length", CONTEXT) or reason == "stop"
    (warning,) = body["warnings"]
    assert re.match(r"max_tokens was lowered from 1000 to \d+", warning)


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_the_default_and_nul_is_text(port, route):
    fields = GOOD | {"prompt": "a\0b", "max_tokens": None, "temperature": None, "stop": None}
    status, body = post(port, route, fields)
    assert status == 200 and 0 < body["usage"]["completion_tokens"] <= 128
    status, _ = post(port, route, GOOD | {"stop": "\0"})
    assert status == 200


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_model_is_not_found_and_none_is_this_one(port, route):
    for model in ("gpt-5", "", 7, ["llama"], "x" * 100_000):
        status, body = post(port, route, GOOD | {"model": model})
        assert status == 404 and is_error(body, "model")
        assert body["error"]["code"] == "model_not_found"
        assert len(body["error"]["message"]) < 500
    assert post(port, route, GOOD | {"model": None})[0] == 200


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_fields_are_named_in_the_warnings(port, route):
    status, body = post(port, route, GOOD | {"n_predict": 7})
    assert status == 200 and body["warnings"] == ["unknown field 'n_predict' was ignored"]
    many = {f"{'x' * 100}{i}": i for i in range(5000)}
    status, body = post(port, route, GOOD | many)
    assert status == 200 and len(json.dumps(body["warnings"])) < 3000
    assert body["warnings"][-1] == f"{5000 - 16} more unknown fields were ignored"


def test_an_unknown_drafter_is_told_the_choices(port):
    _, body = post(port, "/generate", GOOD | {"drafter": "z" * 10_000})
    assert "choose: auto, ngram" in body["error"]["message"]
    assert len(body["error"]["message"]) < 200


# ---------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize("route", ROUTES)
def test_speculation_on_and_off_write_the_same(port, route):
    fields = {"prompt": "a b a b a b a", "max_tokens": 60}
    texts = {
        text_of(post(port, route, fields | more)[1])
        for more in ({}, {"speculative": False}, {"num_speculative_tokens": 2})
    }
    assert len(texts) == 1 and texts != {""}


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_string_cuts_exactly_wherever_it_begins(port, route):
    """Within a token, across two of them, inside an accepted draft; and streams never show it."""
    fields = {"prompt": "a b a b a b a", "max_tokens": 60}
    whole = text_of(post(port, route, fields)[1])
    for begin in range(1, len(whole) - 4, max(1, len(whole) // 12)):
        stop = whole[begin : begin + 4]
        if "\ufffd" in stop:
            continue
        _, body = post(port, route, fields | {"stop": [stop, "never written"]})
        expected = whole[: whole.find(stop)]
        assert text_of(body) == expected
        asked = body_for(route, fields | {"stop": stop, "stream": True})
        _, _, data = call(port, "POST", route, asked)
        pieces = [piece_of(event) for event in events_of(data)[:-1]]
        assert "".join(pieces) == expected


def piece_of(event):
    """The text in a stream's event of any route."""
    if "choices" not in event:
        return event["text"]
    return "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in event["choices"])


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_s_text_is_the_answer_s_and_characters_stay_whole(port, route):
    """A random model writes parts of characters all the time."""
    seen = ""
    for seed in range(5):
        fields = {"prompt": "naïve 日本", "max_tokens": 50, "temperature": 5, "seed": seed}
        whole = text_of(post(port, route, fields)[1])
        status, _, data = call(port, "POST", route, body_for(route, fields | {"stream": True}))
        assert status == 200
        *events, _ = events_of(data)
        pieces = [piece_of(event) for event in events]
        assert "".join(pieces) == whole
        if "\ufffd" not in whole:  # then every character is whole, and so it must be in a piece
            assert not any("\ufffd" in piece for piece in pieces)
        seen += whole
    assert any(ord(character) > 127 for character in seen)


def test_half_sent_requests_are_closed_in_the_end(half_sent):
    """After waitress' 30 s. The last test here, as most of them have passed by now."""
    for client in half_sent:
        assert client.recv(1) == b""
