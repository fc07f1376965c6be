"""Whatever a caller gets wrong, the answer says what it was and whose mistake; nothing breaks.

The answer is {"error": {"message", "type", "param", "code"}} with a status from 400 to 431. A new
field of requests needs a line in BAD (what is refused) and one in TAKEN (what is just allowed).
Bad framing is in test_connection.py, load in test_hostile.py.
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
from math import inf, nextafter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import TARGET, TEMPLATE, asked, body_for, module_client
from started import GOOD, LIMIT_S, ROUTES, is_error, module_server, parse, read_all, request, until
from transformers import AutoTokenizer

from runtime.models import prompts as reading
from runtime.models.prompts import chat_prompt, tokenize
from runtime.values import RequestError
from server.connection import WHEN_LEFT

CONTEXT, DEFAULT_LIMIT = 256, 4  # what is good by chance shall be short
GENERATE, COMPLETIONS, CHAT = ROUTES
each_route = pytest.mark.parametrize("route", ROUTES)
client = module_client(drafter="ngram", max_tokens=DEFAULT_LIMIT)
limits = ("--max-tokens", str(DEFAULT_LIMIT), "--max-running", "4", "--max-queued", "8")
server = module_server(*limits, chat="llama")  # of the same model, with few threads


WRONG_PATHS = {
    404: ["GET /nope", "GET /page/../../../etc/passwd", "GET /page/%2e%2e%2f__init__.py"],
    405: ["GET /generate", "BREW /generate", "PUT /v1/chat/completions", "POST /v1/models",
          "POST /v1/models/%1b[31m%00"],
}  # fmt: skip
EACH_PATH = [(status, *line.split()) for status, lines in WRONG_PATHS.items() for line in lines]


@pytest.mark.parametrize(("wanted", "method", "path"), EACH_PATH)
def test_a_wrong_path_or_method_is_a_json_error(client, wanted, method, path):
    answer = client.open(path, method=method)
    assert answer.status_code == wanted and answer.mimetype == "application/json"
    assert is_error(answer.data) and (wanted == 405) == ("Allow" in answer.headers)
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
        b'{"prompt": "a", "top_p": -Infinity}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\xff\xfe"}',
        '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "a"} {"prompt": "b"}',
    )),
    (413, b'{"prompt": "' + b"a" * (1 << 20) + b'"}', TYPE),
    *((415, b'{"prompt": "a", "max_tokens": 2}', headers) for headers in (
        {}, {"Content-Type": "text/plain"}, TYPE | {"Content-Encoding": "gzip"},
    )),
]  # fmt: skip


@each_route
@pytest.mark.parametrize(("wanted", "body", "headers"), WRONG_BODIES, ids=lambda v: str(v)[:40])
def test_a_body_that_is_no_json_object_of_1_mib_is_refused(client, route, wanted, body, headers):
    answer = client.post(route, data=body, headers=headers)
    assert answer.status_code == wanted and answer.mimetype == "application/json"
    assert is_error(answer.data) and answer.headers["X-Request-Id"]


PROMPTS = ["", None, 5, [], [True], [-1], [4096], [2**70], [1.0], {"text": "a"}, "\ud800",
           [5] * CONTEXT, [1, True], [[]]]  # fmt: skip
LISTS = [["a", "b"], [[5], [6]]]  # of prompts, for /v1/completions alone
STOPS = ["", 5, ["a"] * 65, ["a" * 4096] * 64, ["a", ""], ["a", 5], "\ud800", ["\ud800"],
         "a" * 1001, [["a"]], {}]  # fmt: skip
BIASES = [[], {"5": 101}, {"5": "1"}, {"5": True}, {"05": 1}, {"-1": 1}, {"five": 1}, {"4096": 1},
          {"9" * 400: 1}, {str(i): 1 for i in range(301)}]  # fmt: skip
BAD = {  # out of range, right behind the limits, and of another kind
    "prompt_logprobs": [-1, 21, True, "2", 1.0], "stop": STOPS, "logit_bias": BIASES,
    "max_tokens": [-1, 1.5, True, "5", 1_000_001, 10**400], "speculative": ["yes", 1],
    "num_speculative_tokens": [-1, 17, "4", 1.0], "trace": [1, "yes"], "compare": ["yes", 1, 0.0],
    "drafter": ["zzz", "", 3, ["ngram"], {}, "tests/faulty_server.py:Faulty"],
    "stream": ["maybe", 1],
    "stream_options": [{"include_usage": True}, "usage"],  # without a stream, and with one
    "verification": ["chance", ["coupled"], True, ""],
    "temperature": [-1, -5e-324, "hot", nextafter(100.0, inf), 10**400, True],
    "top_p": [-5e-324, nextafter(1.0, 2.0), [0.5], False], "top_k": [-2, 4.5, 2**31 + 1, False],
    "min_p": [-5e-324, nextafter(1.0, 2.0)], "typical_p": [0, nextafter(1.0, 2.0), "1"],
    "repetition_penalty": [0, nextafter(1e-9, 0.0), nextafter(100.0, inf)],
    "presence_penalty": [-2.1, nextafter(2.0, 3.0), "1", True],
    "frequency_penalty": [nextafter(-2.0, -3.0), 2.1, [1]],
    "n": [0, 9, True, "1", 1.0], "seed": ["a", 2**64, -(2**63) - 1, 1.5, True],
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), [1, "yes"]),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), [0, "yes"]),
    "stop_token_ids": [5, [-1], [4096], ["5"], [True], [1] * 1025],
    "allowed_token_ids": [[], [4096], [10**400], [[1]], {"1": 1}], "min_tokens": [-1, 1.5, 5, True],
    "bad_words": ["a", [""], [" "], [5], ["a"] * 65, ["a b c d e f g " * 9], ["\ud800"]],
    "truncate_prompt_tokens": [0, -2, "5", True], "truncation_side": ["up", 1],
}  # fmt: skip
UNSUPPORTED = {  # by /v1, where they would change the output
    "best_of": [3, True, "1"], "echo": [1], "suffix": ["x"],
    "tools": [[{"type": "function"}]], "tool_choice": ["required", {"type": "function"}],
    "functions": [[{"name": "f"}]], "function_call": [{"name": "f"}], "modalities": [["audio"]],
    "response_format": ["json"],  # and more in test_formats.py
}  # fmt: skip
BAD_CHATS = {
    "messages": [None, [], {}, "hello", [None], ["hello"], [{}], [{"content": "a"}],
                 [{"role": "user"}], [{"role": "user", "content": None}],
                 [{"role": 5, "content": "a"}], [{"role": "user", "content": 5}],
                 [{"role": "user", "content": [{"type": "image_url"}]}],
                 *([{"role": "user", "content": [{"type": kind, "text": "a"}]}]
                   for kind in ([], {}, [[]], None, 5)),
                 [{"role": "user", "content": [{"type": "text", "text": []}]}],
                 [{"role": "user", "content": [5]}], [{"role": "user", "content": "\ud800"}],
                 [{"role": "\ud800", "content": "a"}],
                 [{"role": "tool", "content": "what the template refuses"}],
                 [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
                 [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]],
    "top_logprobs": [-1, 21, 1.5, "2", True],
    "logprobs": [2, "all"],
    "max_completion_tokens": [-1, "5"],
    "add_generation_prompt": [1, "no"],
    "continue_final_message": [1, True],
    "add_special_tokens": ["no"],
    "chat_template_kwargs": [[], "x", {"messages": []}, {"self": 1}, {"x": "a" * 10_000}],
}  # fmt: skip
BAD_TEXTS = {"prompt": PROMPTS, "logprobs": [21, -1, 1.0, "all"]}
REFUSED = {
    GENERATE: BAD | BAD_TEXTS | {"prompt": PROMPTS + LISTS},
    COMPLETIONS: BAD | BAD_TEXTS | UNSUPPORTED,
    CHAT: BAD | BAD_CHATS | UNSUPPORTED | {"echo": [True]},
}
EACH_FIELD = [(route, name) for route, fields in REFUSED.items() for name in fields]


@pytest.mark.parametrize(("route", "name"), EACH_FIELD)
def test_a_bad_field_is_refused_by_the_name_it_was_sent_under(client, route, name):
    for value in REFUSED[route][name]:
        good = body_for(route, GOOD) | {"logprobs": True, "stream": value == "usage"}
        status, body = asked(client, route, **good | {name: value})
        assert status == 400 and is_error(body, name), value
        assert body["error"]["type"] == "invalid_request_error"
        assert name in body["error"]["message"] or name in ("prompt", "messages")


SENTENCES = [  # routes, fields, status, the field that is named, what is said
    (ROUTES, {"prompt": "a b c d " * CONTEXT}, 400, "prompt", rf"^[^\d]*\d{{4}}[^\d]+{CONTEXT}\b"),
    (ROUTES[2:], {"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    *((ROUTES, {"model": model}, 404, "model", "unknown model ")
      for model in ("gpt-5", "", 7, ["llama"], "x" * 100_000)),
    *((ROUTES[:1], {"drafter": drafter}, 400, "drafter", "choose: auto, grammar, ngram, none")
      for drafter in ("z" * 10_000, dict.fromkeys(map(str, range(10_000))))),
]  # fmt: skip


@pytest.mark.parametrize(("routes", "fields", "status", "name", "said"), SENTENCES, ids=range(9))
def test_a_refusal_says_what_is_wrong_in_few_words(client, routes, fields, status, name, said):
    for route in routes:
        answered, body = asked(client, route, **GOOD | fields)
        is_chat = route == CHAT and name == "prompt"
        assert answered == status and is_error(body, "messages" if is_chat else name)
        codes = {"model": "model_not_found", "prompt": "context_length_exceeded"}
        assert body["error"]["code"] == codes.get(name)
        message = body["error"]["message"]
        assert re.search(said, message) and len(message) < 200, message


@each_route
def test_null_is_the_default_and_nul_is_text(client, route):
    nothing = dict.fromkeys(("max_tokens", "temperature", "model"))
    status, body = asked(client, route, "a\0b", stop="\0", **nothing)
    assert status == 200 and 0 < body["usage"]["completion_tokens"] <= DEFAULT_LIMIT


TAKEN = {  # at the limits, and what is written otherwise
    "max_tokens": [0, 1, 1_000_000], "prompt_logprobs": [0, 20],
    "num_speculative_tokens": [0, 16], "drafter": ["ngram", "none"],
    "temperature": [0, 5e-324, 100], "top_p": [0, -0.0, 1], "top_k": [-1, 2**31], "min_p": [0, 1],
    "repetition_penalty": [1e-9, 100], "seed": [-(2**63), 2**64 - 1], "logprobs": [0, 20, False],
    "presence_penalty": [-2, 2.0], "frequency_penalty": [-2.0, 2],
    "logit_bias": [{}, {"0": -100, "4095": 100.0}, {str(i): 0.5 for i in range(300)}],
    "stop": ["x" * 1000, ["x" * 1000] * 64, []], "prompt": [[5], [CONTEXT]],
    "verification": ["rejection"],
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_field_at_its_limits_is_taken(client, name):
    for value in TAKEN[name]:
        fields = GOOD | {"temperature": 1, "seed": 3} | {name: value}
        status, body = asked(client, GENERATE, **fields)
        assert status == 200 and body["seed"] == (value if name == "seed" else 3), value
        lowered = [w for w in body["warnings"] if "max_tokens was lowered from 1000000" in w]
        assert body["warnings"] == lowered and len(lowered) == (value == 1_000_000)


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
LARGE = (  # what one operation makes, or a few
    "'a'.zfill(10**10)", "('a' * 10**9) * 9", "'a\nb' | indent(10**10)", "'a'.ljust(10**10)",
    "'a' | center(10**10)", "'%10000000000d' % 1", "'{:>10000000000}'.format(1)",
    "[1] * 10**10", "[1] | tojson(indent=10**10)", "('a,' * 10**6).split(',') | join('b' * 10**5)",
)  # fmt: skip
HOSTILE = {f"{{{{ {operation} }}}}": MEMORY for operation in LARGE} | {
    "{{ 10 ** (10 ** 10) }}": TIME,
    "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4: TIME,
    "{{ raise_exception('no\x1b[3m\0roles\n' + 'x' * 500) }}": r"refused: no\\x1b\[3m\\x00roles x",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "refused: maximum recursion depth exceeded",
    "{{ '\\ud800' }}": "wrote a lone surrogate, which is not text",
    "{{ ('a' * 10**7) * 2 }}": "writes 20000000 characters",
    "{% if": "refused: ",
}


def test_a_template_gets_no_more_time_and_memory_than_is_bounded(monkeypatch):
    """It is code that comes with a model. Its process goes on, or is another one next time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for template, said in HOSTILE.items():
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


def test_what_ends_the_process_of_templates_ends_one_prompt_alone():
    tokenizer = noting("{{ messages[0].content }}")
    assert reading._render(HI, tokenizer) == "é \n😀"
    child = reading.renderer.start()
    child.kill()
    with suppress(RequestError):  # it may not have ended yet
        reading._render(HI, tokenizer)
    with ThreadPoolExecutor(8) as pool:  # each gets its own text
        turns = [[{"role": "user", "content": str(i)}] for i in range(50)]
        assert [*pool.map(lambda t: reading._render(t, tokenizer), turns)] == [*map(str, range(50))]
    assert child.poll() == -signal.SIGKILL


def test_long_work_takes_turns_with_pauses_and_few_may_wait(monkeypatch):
    slept = []  # time goes on while somebody sleeps, and only then
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
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

NUM_REQUESTS, NUM_CLIENTS = 3_000, 4
EXPECTED = {None, 200, 400, 404, 405, 415, 431, 501, 505}
VALUES = [value for values in (BAD | BAD_TEXTS | BAD_CHATS).values() for value in values]
LINES = ["GET {} HTTP/1.1", "HEAD {} HTTP/1.1", "OPTIONS {} HTTP/1.1", "POST {} HTTP/9.9",
         "POST {}?a=%ff&b HTTP/1.1", "POST /%00{} HTTP/1.1", "post {} HTTP/1.1", "POST {}",
         "POST * HTTP/1.1"]  # fmt: skip
HEADERS = ["Content-Type: text/plain", "Content-Encoding: br", "Expect: 100-continue",
           "Content-Type: application/json; charset=utf-16", "Host: elsewhere",
           "Content-Length: 7", "Transfer-Encoding: chunked", "X: a\r\n folded", "\0: zero",
           "X-Long: " + "b" * 70_000, "X-Request-Id: é", "If-None-Match: *"]  # fmt: skip


@pytest.fixture(scope="module")
def half_sent(server):
    """They stop in the middle of a header and of a body, beside those of the next test."""
    whole = request(GENERATE, b'{"prompt": ', "Content-Length: 100")
    with server.open_socket() as one, server.open_socket() as two:
        one.sendall(whole[:40])
        two.sendall(whole)
        yield one, two


def mutated(rng):
    route = rng.choice(ROUTES)
    fields = body_for(route, {"prompt": "a b c a b c a"})
    names = [*REFUSED[route], "model", "user"]
    fields |= {rng.choice(names): rng.choice(VALUES) for _ in range(rng.choice((0, 1, 1, 2)))}
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


def test_mutated_requests_get_an_answer_or_a_json_error(server, half_sent):
    """No 500, no hang, nothing lost; to repeat one that failed: `check(server, seed)`."""
    good = {"prompt": "a b a b a b a", "max_tokens": 12, "seed": 3}
    before = server.generate(**good)[1]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        statuses = list(pool.map(lambda seed: check(server, seed), range(NUM_REQUESTS)))
    assert set(statuses) == EXPECTED and statuses.count(200) > NUM_REQUESTS / 10
    server.wait_until_idle()  # from those, too, who have left
    state = server.health()
    assert state["status"] == "ok"
    assert [w for w in state["warnings"] if "draft tokens are accepted" not in w] == []
    after = server.generate(**good)[1]
    assert after["token_ids"] == before["token_ids"] and server.call("GET", "/page/")[0] == 200


def test_half_sent_requests_are_closed_in_the_end(half_sent):
    """After 10 s, with a reason."""
    for client in half_sent:
        status, headers, body = parse(read_all(client))
        assert status == 408 and headers["Connection"] == "close" and is_error(body)
