"""10 000 mutated requests against the real process: no 500, no hang, no traceback, nothing lost.

Each is a good request of one of the three routes with some of its parts replaced: values of fields,
fields, bytes of the body, headers, the request line. Request i comes from random.Random(i) alone,
so that a failure can be repeated: `send(port, mutated(random.Random(i)))`.
"""

import json
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_bad_inputs import ROUTES, body_for, is_error, parse, read_all
from test_server import call, generate, health, seconds_until, start

NUM_REQUESTS, NUM_CLIENTS = 10_000, 4
EXPECTED = {200, 400, 404, 405, 413, 415, 431, 501, 505}
GOOD = {"prompt": "a b a b a b a", "max_tokens": 12, "seed": 3}
FIELDS = {
    "prompt": "a b c a b c a", "max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
    "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5, "stop": ["zz"], "logprobs": 2,
    "verification": "rejection",
    "speculative": True, "drafter": "ngram", "num_speculative_tokens": 3, "stream": False,
    "trace": True, "compare": True, "model": None, "stream_options": None, "n": 1,
    "messages": [{"role": "user", "content": "hello"}], "top_logprobs": 1, "user": "me",
}  # fmt: skip
VALUES = [
    None, True, False, 0, 1, -1, 2, 17, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 0.0, -0.0, 0.5,
    1e-320, 1e308, -1e308, "", "a", "\0", "\ud800", "é", "🙂", "\u202e", "0", "1", "true", "null",
    "<script>", "../../etc/passwd", "%s%n", "{{ 7 * 7 }}", "a" * 5000, [], [[]], {}, [0], [1, 2, 3],
    [-1], [4096], [2**70], [0.5], [None], ["a"], ["a", "b"], [["a"]], [5] * 40, {"a": {"b": []}},
    {"type": "text", "text": "a"}, {"role": "user", "content": "a"}, [{"role": "user"}],
    [{"role": "user", "content": "a"}] * 3, [{"role": "system", "content": None}],
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


@pytest.fixture(scope="module")
def port(chat_folder):
    folder = chat_folder("qwen2")
    limits = ("--max-model-len", "48", "--max-tokens", "4")  # what is good by chance shall be short
    process, port = start("--model", str(folder), "--drafter", "ngram", *limits)
    with process:
        yield port
        assert process.poll() is None
        process.terminate()
        assert process.wait(40) == 0
        lines = process.log().splitlines()
        assert [line for line in lines if "Traceback" in line or '"ERROR"' in line] == []


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
    line, headers, extra = f"POST {route} HTTP/1.1", ["Host: x"], ""
    if rng.random() < 0.1:
        line = rng.choice(LINES).format(route)
    if rng.random() < 0.9:
        headers.append("Content-Type: application/json")
    if rng.random() < 0.15:
        extra = rng.choice(HEADERS)
        headers.insert(rng.randrange(len(headers) + 1), extra)
    headers += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    may_want_more = extra.startswith(("Content-Length", "Transfer-Encoding"))
    then = "leave" if rng.random() < 0.05 else "end" if may_want_more else "read"
    return "\r\n".join([line, *headers]).encode() + body, then


def mutate_fields(rng, fields):
    kind, name = rng.randrange(5), rng.choice(sorted(FIELDS))
    if kind == 0:
        fields.pop(rng.choice([*fields, name]), None)
    elif kind == 1:
        fields[name.upper() if rng.random() < 0.3 else name + "_"] = rng.choice(VALUES)
    elif kind == 2 and fields:  # a good value under another name
        fields[name] = rng.choice(list(fields.values()))
    else:
        fields[name] = rng.choice(VALUES)


def mutate_bytes(rng, body):
    at = rng.randrange(len(body))
    kind = rng.randrange(5)
    if kind == 0:
        body[at] = rng.randrange(256)
    elif kind == 1:
        del body[at:]
    elif kind == 2:
        body[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 3:
        body[at:at] = rng.choice((b"[", b'{"a":', b"\\u", b"9")) * rng.choice((1, 10, 3000))
    else:
        body += body[at:]


def send(port, data):
    """What comes back until the server closes; fails after 30 s of silence."""
    request, then = data
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(request)
        if then == "leave":  # with a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        if then == "end":
            client.shutdown(socket.SHUT_WR)
        return read_all(client)


def check(port, seed):
    """The status of request `seed`; None where the client has left, or it was never whole."""
    data = mutated(random.Random(seed))
    response = send(port, data)
    assert b"Traceback" not in response and b"serving/" not in response, (seed, response)
    if not response and data[1] != "read":
        return None
    head = response.partition(b"\r\n\r\n")[0]
    if not head.startswith(b"HTTP/"):
        raise AssertionError((seed, response[:200]))
    status = int(head.split()[1])
    if status == 100:
        return None
    assert status in EXPECTED, (seed, response)
    if status >= 400 and data[1] == "read" and not data[0].startswith(b"HEAD"):
        _, _, body = parse(response)
        assert is_error(body, body["error"]["param"]), (seed, response)
    return status


def test_10_000_mutated_requests_get_an_answer_or_a_json_error(port):
    before = generate(port, **GOOD)[1]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        statuses = list(pool.map(lambda seed: check(port, seed), range(NUM_REQUESTS)))
    counts = {status: statuses.count(status) for status in set(statuses)}
    print(dict(sorted(counts.items(), key=str)))
    assert counts[200] > NUM_REQUESTS / 10 and counts[400] > NUM_REQUESTS / 10
    assert len(counts) >= 7  # the mutations reach every kind of error
    seconds_until(lambda: not health(port)["num_requests_running"])  # of those who have left
    state = health(port)
    assert state["status"] == "ok" and state["warnings"] == []
    assert state["num_requests_waiting"] == 0 and state["kv_cache_usage_perc"] == 0
    after = generate(port, **GOOD)[1]
    assert after["token_ids"] == before["token_ids"] and call(port, "GET", "/")[0] == 200
