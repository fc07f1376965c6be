"""Whatever a caller gets wrong, the answer says what it was and whose mistake; nothing breaks.

The answer is {"error": {"message", "type", "param", "code"}} with a status from 400 to 431, or
Anthropic's form of it. bad_requests.txt is the table of what is refused, and wants a line for each
new field; what is taken is in test_fields.py. Bad framing is in test_connection.py, load in
test_hostile.py.
"""

import json
import random
import re
import resource
import signal
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf, nextafter  # noqa: F401 for the table
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import LIMIT_S, TARGET, TEMPLATE, closed, module_client  # noqa: F401 for the table
from started import BODIES, ROUTES, is_error, module_server, parse, read_all, request, until
from test_fields import read_table
from transformers import AutoTokenizer

from runtime.grammars import probe
from runtime.models import chat as reading
from runtime.models.chat import chat_prompt
from runtime.models.child import Child
from runtime.models.prompts import FairLock, tokenize
from runtime.values import RequestError
from server.fields import NEUTRAL
from server.http import WHEN_LEFT
from server.parsing import KNOWN

GENERATE, COMPLETIONS, CHAT, MESSAGES, COUNT, RESPONSES = BODIES
CONTEXT, DEFAULT_LIMIT = 256, 4  # what is good by chance shall be short
client = module_client(drafter="ngram", max_tokens=DEFAULT_LIMIT)
limits = ("--max-tokens", str(DEFAULT_LIMIT), "--max-running", "4", "--max-queued", "8")
server = module_server(*limits, chat="llama")  # of the same model, with few threads


# ----------------------------------------------------------------------------------- the table

EOS, TEXT = "<|endoftext|>", {"type": "text", "text": "a"}
CODES = {  # what OpenAI's errors say beside their words
    "unknown model": "model_not_found", "there is no field": "unknown_parameter",
    "the prompt's": "context_length_exceeded", "the prediction's": "context_length_exceeded",
}  # fmt: skip


def tool(**function):
    return [{"type": "function", "function": {"name": "f"} | function}]


def said(*content, role="user", **more):
    """Messages of which the last one has this content."""
    return [{"role": "user", "content": "a"}, {"role": role, "content": [*content]} | more]


def called(turn=(), function=(), **changes):
    """Messages of which the last one has a call, each part changed in this way."""
    function = {"name": "f", "arguments": "{}"} | dict(function)
    call = {"id": "c1", "type": "function", "function": function} | changes
    last = {"role": "assistant", "content": None, "tool_calls": [call]} | dict(turn)
    return [{"role": "user", "content": "a"}, last]


def wrapped(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def every_other(first, count):
    """So many characters, none of which stands beside another one."""
    return "".join(chr(first + 2 * i) for i in range(count))


def many(count):
    return {f"p{i}": {"type": "integer"} for i in range(count)}


BAD = list(read_table("bad_requests.txt", globals()))


def check_error(route, answer, field=None):
    """Whether it is the one error body, which names the field where its protocol can."""
    assert answer.mimetype == "application/json"
    body, number = answer.json, answer.headers["X-Request-Id"]
    error = body["error"]
    if route in (MESSAGES, COUNT):
        assert body == {"type": "error", "error": error, "request_id": number}
        assert answer.headers["request-id"] == number  # where Anthropic's clients look
        kinds = {404: "not_found_error", 413: "request_too_large"}
        assert error["type"] == kinds.get(answer.status_code, "invalid_request_error")
    else:
        assert is_error(body, field) and error["type"] == "invalid_request_error", body
        codes = [CODES[words] for words in CODES if error["message"].startswith(words)]
        assert "prompt[" in str(field) or error["code"] == (codes[0] if codes else None)


def test_each_field_has_a_row():
    assert KNOWN <= {field for field, routes, *_ in BAD if GENERATE in routes}


@pytest.mark.parametrize("name", dict.fromkeys(field for field, *_ in BAD))
def test_what_is_wrong_is_refused_by_the_name_it_was_sent_under(client, monkeypatch, name):
    """Before anything is run, and in few words."""
    monkeypatch.setattr(client.application.extensions["worker"], "submit", None)
    check = probe.Probe.check
    for field, routes, words, _, sent in BAD:
        is_too_large = "at most" in words  # which is not even tried
        monkeypatch.setattr(probe.Probe, "check", None if is_too_large else check)
        pattern = ".*".join(map(re.escape, words.split("…")))
        for route in routes if field == name else ():
            answer = client.post(route, json=BODIES[route] | sent)
            assert answer.status_code == (404 if field == "model" else 400), (route, sent)
            check_error(route, answer, field)
            message = answer.json["error"]["message"]
            assert re.match(pattern, message), (route, sent, message)
            assert len(message) < (300 if "cannot be used" in message else 200)


OF_CHATS = {
    "tools", "tool_choice", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "top_logprobs",
}  # fmt: skip
DONE = {GENERATE: {"n", "chat"}, COMPLETIONS: {"n", "echo", "suffix"}, CHAT: {"n", *OF_CHATS}}


@pytest.mark.parametrize("route", BODIES)
def test_what_a_route_does_not_do_is_refused(client, route):
    """In JSON true is not 1. A name is told as far as people read."""
    for name in NEUTRAL.keys() - DONE.get(route, OF_CHATS) - {"logprobs"}:
        first = NEUTRAL[name][0]
        for value in ({"a": 1}, 7, int(first) if isinstance(first, bool) else bool(first)):
            answer = client.post(route, json=BODIES[route] | {name: value})
            assert answer.status_code == 400, (name, value)
            check_error(route, answer, name)
            message = answer.json["error"]["message"]
            assert message.startswith(f"{name} is not supported here, other than as ")
    for name in ("x" * 9999, "\ud800\n", ""):
        answer = client.post(route, json=BODIES[route] | {name: 0})
        assert answer.status_code == 400 and len(answer.json["error"]["message"]) < 120
        check_error(route, answer, name[:100])
    many = {f"{'x' * 100}{i}": i for i in range(5000)}
    assert client.post(route, json=BODIES[route] | many).status_code == 400


WRONG_PATHS = {
    404: ["GET /nope", "GET /page/../../../etc/passwd", "GET /page/%2e%2e%2f__init__.py"],
    405: ["GET /generate", "BREW /generate", "PUT /v1/chat/completions", "GET /v1/messages",
          "POST /v1/models", "POST /v1/models/%1b[31m%00"],
}  # fmt: skip


@pytest.mark.parametrize("wanted", WRONG_PATHS)
def test_a_wrong_path_or_method_is_a_json_error(client, wanted):
    for method, path in map(str.split, WRONG_PATHS[wanted]):
        answer = client.open(path, method=method)
        assert answer.status_code == wanted and (wanted == 405) == ("Allow" in answer.headers)
        check_error(path, answer)
        message = answer.json["error"]["message"]
        assert (wanted == 405) == (" needs " in message)
        assert message.isprintable() and len(message) <= 300


def test_access_is_checked_once(client):
    """By the server, when it has read a head; by the application where there is no server."""
    for environ, status in (({}, 403), ({WHEN_LEFT: bool}, 200)):
        asked = {"headers": {"Host": "evil.example"}, "environ_overrides": environ}
        assert client.get("/health", **asked).status_code == status


TYPE = {"Content-Type": "application/json"}
WRONG_BODIES = [  # status, body, headers
    *((400, body, TYPE) for body in (
        b'{"prompt": "a"', b"", b'[{"prompt": "a"}]', b"null", b'{"prompt": "a", "top_p": NaN}',
        b'{"prompt": "a", "top_p": -Infinity}', b'{"prompt": "a", "metadata": {"a": 1e999}}',
        b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\xff\xfe"}',
        '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "a"} {"prompt": "b"}',
    )),
    (413, b'{"prompt": "' + b"a" * (1 << 20) + b'"}', TYPE),
    *((415, b'{"prompt": "a", "max_tokens": 2}', headers) for headers in (
        {}, {"Content-Type": "text/plain"}, TYPE | {"Content-Encoding": "gzip"},
    )),
]  # fmt: skip


@pytest.mark.parametrize("route", BODIES)
def test_a_body_that_is_no_json_object_of_1_mib_is_refused(client, route):
    for wanted, body, headers in WRONG_BODIES:
        answer = client.post(route, data=body, headers=headers)
        assert answer.status_code == wanted, (body[:40], headers)
        check_error(route, answer)


def noting(template=TEMPLATE):
    """A tokenizer that notes its calls; each character is a token, and none has more than four."""
    tokenizer = Mock(side_effect=lambda text, **_: {"input_ids": [5] * len(text)})
    tokenizer.real = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.real.chat_template = tokenizer.chat_template = template
    tokenizer.get_chat_template.return_value = template
    tokenizer.get_vocab.return_value = {"four": 0}
    tokenizer.special_tokens_map = tokenizer.real.special_tokens_map
    return tokenizer


def test_what_cannot_fit_is_refused_before_it_is_rendered_or_read():
    """Reading 1 MB takes up to 7 s. The longest token of a vocabulary is looked for once."""
    tokenizer = noting()
    too_many = "messages has 28000 entries; at most 2000 are read"
    too_long = f"characters are more than a context of {CONTEXT} tokens holds"
    for messages, said in (
        ([None] * 28_000, too_many),
        ([{"role": "user", "content": "a" * 1_000_000}], too_long),
        ([{"role": "a" * 1_000_000, "content": ""}], too_long),
        ([{"role": "user", "content": [{"type": "text", "text": "a" * 500}]}] * 2000, too_long),
    ):
        with pytest.raises(RequestError, match=said):
            chat_prompt(messages, tokenizer, CONTEXT)
    with pytest.raises(RequestError, match=too_long):
        tokenize("a" * 1_000_000, tokenizer, CONTEXT)
    assert [name for name, *_ in tokenizer.mock_calls] == ["get_vocab"]
    few = [{"role": "user", "content": "a"}] * 2000
    assert len(chat_prompt(few, tokenizer, CONTEXT)) == len("user: a\n") * 2000 + 10
    calls = ["get_vocab", "get_chat_template", ""]  # of which the last one reads the text
    assert [name for name, *_ in tokenizer.mock_calls] == calls


HI = [{"role": "user", "content": "é \n😀", "name": "a"}, {"role": "assistant", "content": " b "}]


@pytest.mark.parametrize("template", [
    TEMPLATE,
    "{{ bos_token }}{{ eos_token }}{{ messages | tojson(indent=1) }}{{ messages[0].role }}\n",
    "  {% for m in messages %}\n{{ loop.index }}{% if loop.first %}{% continue %}{% endif %}"
    "{% generation %}{{ m['content'] | trim }}{% endgeneration %}{% endfor %}",
    "{% if tools is defined and tools %}t{% endif %}{{ add_generation_prompt }}"
    "{{ strftime_now('%Y') }}{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}",
])  # fmt: skip
def test_a_template_is_written_as_transformers_writes_it(template):
    tokenizer = noting(template)
    expected = tokenizer.real.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert reading._render(HI, tokenizer) == expected


def test_a_special_token_may_have_any_name():
    """Those of the renderer's own are its own; a template may write the others."""
    tokenizer = noting("{{ own }}{{ messages[0].content }}")
    names = *reading._TEMPLATES_OWN, "limit_s", "asked", "own"
    tokenizer.special_tokens_map = {name: f"<{name}>" for name in names}
    assert reading._render(HI, tokenizer) == f"<own>{HI[0]['content']}"


MEMORY, TIME = "needs more than 512 MiB of memory", r"took longer than 0\.2 s"
TEMPLATES = Path(__file__).with_name("hostile_templates.txt").read_text("utf-8")
HOSTILE = [tuple(map(eval, row.split(" | ", 1))) for row in TEMPLATES.splitlines()[1:]]


def test_a_template_gets_no_more_time_and_memory_than_is_bounded(monkeypatch):
    """It is code that comes with a model. Its process goes on, or is another one next time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for said, template in HOSTILE:
        monkeypatch.setattr(reading, "_TEMPLATE_LIMIT_S", 0.2 if said == TIME else LIMIT_S)
        with pytest.raises(RequestError, match=f"chat template {said}") as caught:
            chat_prompt(HI, noting(template), CONTEXT)
        how = (503, "machine_too_slow") if said == TIME else (400, None)  # no client's mistake
        assert (caught.value.status, caught.value.code) == how
        assert len(caught.value.message) <= 300
        child = reading.renderer.child
        assert (child.poll() == -signal.SIGPROF) == (said == TIME)
        if said != TIME and sys.platform == "linux":
            status = Path(f"/proc/{child.pid}/status").read_text()
            peak = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])
            assert peak < 1 << 20  # KiB; what was asked for is 9 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (100 << 10)


def test_what_cannot_be_written_for_a_template_is_refused_and_ends_no_process():
    """json.dumps has less depth left here than json.loads had before."""
    tokenizer, child = noting(), reading.renderer.start()
    deep = "x"
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(RequestError, match="^the chat template .*recursion") as caught:
        chat_prompt(HI, tokenizer, CONTEXT, how={"chat_template_kwargs": {"x": deep}})
    assert caught.value.status == 400 and reading.renderer.start() is child


@pytest.mark.parametrize(("end", "times"), [("sys.exit(3)", 1), ("os.kill(os.getpid(), 9)", 2)])
def test_a_child_is_asked_once_more_only_where_it_was_killed(tmp_path, end, times):
    file, log = tmp_path / "child.py", tmp_path / "log"
    file.write_text(f"import os, sys\ninput()\nopen({str(log)!r}, 'a').write('x')\n{end}")
    with pytest.raises(EOFError):
        Child(str(file)).ask(1)
    assert log.read_text() == "x" * times


def test_what_ends_the_process_of_templates_costs_no_prompt():
    tokenizer = noting("{{ messages[0].content }}")
    assert reading._render(HI, tokenizer) == "é \n😀"
    child = reading.renderer.start()
    child.kill()  # it may not have ended when it is asked
    assert reading._render(HI, tokenizer) == "é \n😀"
    with ThreadPoolExecutor(8) as pool:  # each gets its own text
        turns = [[{"role": "user", "content": str(i)}] for i in range(50)]
        assert [*pool.map(lambda t: reading._render(t, tokenizer), turns)] == [*map(str, range(50))]
    assert child.poll() == -signal.SIGKILL


def test_long_work_takes_turns_with_pauses_and_few_may_wait(monkeypatch):
    slept = []  # time goes on while somebody sleeps, and only then
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("runtime.models.prompts.time", clock)
    places, order = threading.BoundedSemaphore(2), []
    turns = FairLock("long tests", short=10, pause=0.5, places=places)

    def second():
        with turns.take(20):
            order.append("second")

    thread = threading.Thread(target=second)
    with turns.take(11):
        thread.start()
        until(lambda: places._value == 0)
        with turns.take(10):
            order.append("short")
        with pytest.raises(RequestError, match="too many long tests at once") as error:
            turns.take(11).__enter__()
        order.append("first")
    thread.join()
    assert order == ["short", "first", "second"] and error.value.status == 429
    assert slept == [0, 5.5]  # half a second for each of the eleven
    with suppress(ValueError), turns.take(12):
        raise ValueError
    second()
    assert slept == [0, 5.5, 10, 6] and places._value == 2


# ------------------------------------------------------------------------------------ mutations

NUM_REQUESTS, NUM_CLIENTS = 2_000, 4
EXPECTED = {None, 200, 400, 404, 405, 415, 431, 501, 505}
VALUES = [value for *_, value, sent in BAD if sent is not value]
NAMES = {route: [*dict.fromkeys(row[0] for row in BAD if route in row[1])] for route in ROUTES}
LINES = ["GET {} HTTP/1.1", "HEAD {} HTTP/1.1", "OPTIONS {} HTTP/1.1", "POST {} HTTP/9.9",
         "POST {}?a=%ff&b HTTP/1.1", "POST /%00{} HTTP/1.1", "post {} HTTP/1.1", "POST {}",
         "POST * HTTP/1.1"]  # fmt: skip
HEADERS = ["Content-Type: text/plain", "Content-Encoding: br", "Expect: 100-continue",
           "Content-Type: application/json; charset=utf-16", "Host: elsewhere",
           "Content-Length: 7", "Transfer-Encoding: chunked", "X: a\r\n folded", "\0: zero",
           "X-Long: " + "b" * 70_000, "X-Request-Id: é", "If-None-Match: *"]  # fmt: skip


def mutated(rng):
    route = rng.choice(ROUTES)
    names = [*NAMES[route], "model", "user"]
    changes = {rng.choice(names): rng.choice(VALUES) for _ in range(rng.choice((0, 1, 1, 2)))}
    fields = BODIES[route] | changes
    body = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode(errors="replace")
    if rng.random() < 0.25:
        piece = rng.choice((b"[", b'{"a":', b"\\u", b"9")) * rng.choice((1, 10, 3000))
        at = rng.randrange(len(body))
        end = rng.randrange(at, len(body))
        body = body[:at] + rng.choice((b"", piece, rng.randbytes(9), body[at:] * 2)) + body[end:]
    extra = [rng.choice(HEADERS)] * (rng.random() < 0.15)
    data = request(route, body, *extra, f"Content-Length: {len(body)}")
    if rng.random() < 0.1:
        line = rng.choice(LINES).format(route)
        data = line.encode() + data[data.index(b"\r\n") :]
    return data


def check(server, seed):
    """The status of request `seed`; None where the client has left."""
    rng = random.Random(seed)
    data = mutated(rng)
    with server.open_socket() as client:
        client.sendall(data)
        if rng.random() < 0.05:  # with a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return None
        response = read_all(client).removeprefix(b"HTTP/1.1 100 \r\n\r\n")
    assert b"Traceback" not in response and b"server/" not in response, (seed, response)
    assert response.startswith(b"HTTP/"), (seed, response[:200])
    status = int(response.split()[1])
    if status >= 400 and not data.startswith(b"HEAD"):
        body = parse(response)[2]
        assert is_error(body, body["error"]["param"]), (seed, response)
    return status


@pytest.mark.slow
def test_mutated_requests_get_an_answer_or_a_json_error(server):
    """No 500, no hang, nothing lost; to repeat one that failed: `check(server, seed)`.

    Beside them one stops amid a header, and one amid a body: after 10 s each is told, and closed.
    """
    good = {"prompt": "a b a b a b a", "max_tokens": 12, "seed": 3}
    before = server.generate(**good)[1]
    whole = request(GENERATE, b'{"prompt": ', "Content-Length: 100")
    with server.open_socket() as one, server.open_socket() as two:
        one.sendall(whole[:40])
        two.sendall(whole)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            statuses = list(pool.map(lambda seed: check(server, seed), range(NUM_REQUESTS)))
        for status, headers, body in (parse(read_all(client)) for client in (one, two)):
            assert status == 408 and headers["Connection"] == "close" and is_error(body)
    assert set(statuses) == EXPECTED and statuses.count(200) > NUM_REQUESTS / 10
    server.wait_until_idle()  # from those, too, who have left
    state = server.health()
    assert state["status"] == "ok"
    assert [w for w in state["warnings"] if "draft tokens are accepted" not in w] == []
    after = server.generate(**good)[1]
    assert after["token_ids"] == before["token_ids"] and server.call("GET", "/page/")[0] == 200
