"""The soak test's clients: what they send, what they do with the answer, what must be in it.

Used by soak.py, which runs many at once, each in a thread; every thread writes into one Tally.
"""

import http.client
import io
import json
import random
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tqdm import tqdm

from benchmarks import core

HOST = "127.0.0.1"
BURST = 16  # requests at once: with the other clients' more than run and wait

# ------------------------------------------------------------------------------------ requests


@dataclass(frozen=True)
class Ask:
    """A request for text."""

    path: str
    fields: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return self.fields.get("stream", False)

    def alone(self) -> "Ask":
        """The same text, asked for without a stream."""
        kept = {k: v for k, v in self.fields.items() if k not in ("stream", "stream_options")}
        return Ask(self.path, kept)


@dataclass(frozen=True)
class Text:
    """What an answer says, as far as it is the same whenever and beside whatever one asks."""

    text: str
    finish_reason: str
    num_tokens: int
    token_ids: list[int] | None  # of /generate only
    logprobs: Any


GENERATE, COMPLETIONS = "/generate", "/v1/completions"
STOPS = ("\n", " the", ",", "return", "}", ". ", "green", "é")
SAMPLING: dict[str, tuple[float, ...]] = {
    "temperature": (0.3, 0.8, 1.0, 1.5),
    "top_k": (0, 5, 40),
    "top_p": (1.0, 0.95, 0.7),
    "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.2),
}


def random_prompt(rng: random.Random, texts: list[str]) -> str | list[int]:
    """A text, now and then a long one, or any token ids, of which most make no sense."""
    if rng.random() < 0.6:
        text = rng.choice(texts)
        return text * rng.randint(2, 6) if rng.random() < 0.2 else text
    length = rng.randint(300, 1200) if rng.random() < 0.2 else rng.randint(1, 40)
    return [rng.randrange(1, 1000) for _ in range(length)]


def random_ask(
    rng: random.Random, texts: list[str], drafters: list[str], path: str, stream: bool
) -> Ask:
    """Any request that must be answered, with a seed, so that it has one right answer."""
    fields: dict[str, Any] = {
        "prompt": random_prompt(rng, texts),
        "max_tokens": rng.randint(1, 160),
        "num_speculative_tokens": rng.choice((0, 1, 2, 3, 5, 8, 16)),
        "seed": rng.randrange(1 << 32),
    }
    drafter = rng.choice([None, *drafters])
    fields |= {"drafter": drafter} if drafter else {"speculative": False}
    if rng.random() < 0.5:
        fields |= {name: rng.choice(values) for name, values in SAMPLING.items()}
    if rng.random() < 0.25:
        fields["stop"] = rng.sample(STOPS, rng.randint(1, 3))
    if rng.random() < 0.2:
        fields["logprobs"] = rng.choice((0, 1, 5))
    if path == GENERATE and rng.random() < 0.1:
        fields[rng.choice(("trace", "compare"))] = True
    if stream:
        fields["stream"] = True
        if path == COMPLETIONS:
            fields["stream_options"] = {"include_usage": True}
    return Ask(path, fields)


@dataclass(frozen=True)
class Bad:
    """A request that must be refused, in JSON."""

    name: str
    status: int
    body: bytes
    path: str = GENERATE
    method: str = "POST"
    content_type: str = "application/json"


def _bad(name: str, path: str = GENERATE, status: int = 400, **fields: Any) -> Bad:
    return Bad(name, status, json.dumps({"prompt": "1, 2,"} | fields).encode(), path)


BAD = (
    Bad("broken JSON", 400, b'{"prompt": "1, 2,"'),
    Bad("an array", 400, b"[1, 2]"),
    Bad("NaN", 400, b'{"prompt": "1, 2,", "temperature": NaN}'),
    Bad("not UTF-8", 400, b'{"prompt": "\xff\xfe"}'),
    Bad("deep nesting", 400, b"[" * 100_000),
    Bad("over 1 MiB", 413, b'{"prompt": "' + b"x" * (1 << 20) + b'"}'),
    Bad("plain text", 415, b"1, 2,", content_type="text/plain"),
    Bad("unknown path", 404, b"{}", path="/generated"),
    Bad("GET of a POST", 405, b"", method="GET"),
    _bad("a word as number", max_tokens="ten"),
    _bad("below its range", temperature=-1),
    _bad("a word as flag", stream="yes"),
    _bad("unknown drafter", drafter="oracle"),
    _bad("empty stop string", stop=[""]),
    _bad("empty prompt", prompt=""),
    _bad("lone surrogate", prompt="\ud800"),
    _bad("unknown token", prompt=[1, 1 << 40]),
    _bad("too long prompt", prompt=[7] * 150_000),
    _bad("two choices", COMPLETIONS, n=2),
    _bad("another model", COMPLETIONS, 404, model="another"),
)
# What is no HTTP is refused before there is a request.
NOT_HTTP = {
    "no request line": b"hello\r\n\r\n",
    "no colon": b"GET /health HTTP/1.1\r\nHost: x\r\nno colon here\r\n\r\n",
    "bad length": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
    "bad chunk": b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}
HALF = b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt": '
PAGES = {"/": b"<html", "/metrics": b"generation_tokens_total", "/v1/models": b'"data"'}

# ------------------------------------------------------------------------------------- answers


class Lost(Exception):
    """No proper answer came."""


class Wrong(Exception):
    """An answer came that cannot be right."""


def require(is_right: bool, otherwise: str) -> None:
    """Raises Wrong."""
    if not is_right:
        raise Wrong(otherwise)


def require_status(response: http.client.HTTPResponse, status: int) -> None:
    """Raises Lost, with what the answer says."""
    if response.status != status:
        raise Lost(f"status {response.status}, not {status}: {response.read(500)!r}")


def require_error(body: bytes) -> None:
    """Raises Wrong unless it is the one error body."""
    error = json.loads(body)["error"]
    require({"message", "type", "param", "code"} == error.keys(), f"no error body: {body!r}")
    require(bool(error["message"]), "an error without message")


def check(ask: Ask, text: Text, body: dict[str, Any]) -> Text:
    """The text, if the answer's figures fit it and the request. Raises Wrong."""
    usage, limit = body["usage"], ask.fields["max_tokens"]
    sum_of_both = usage["prompt_tokens"] + usage["completion_tokens"]
    require(usage["total_tokens"] == sum_of_both, f"usage does not add up: {usage}")
    require(usage["completion_tokens"] == text.num_tokens, f"{text.num_tokens} tokens, {usage}")
    require(body["timings"]["predicted_n"] == text.num_tokens, f"{body['timings']}")
    reasons = ("stop", "length") if text.num_tokens == limit else ("stop",)
    is_ended = 1 <= text.num_tokens <= limit and text.finish_reason in reasons
    require(is_ended, f"{text.num_tokens} of {limit} tokens, then {text.finish_reason}")
    found = [stop for stop in ask.fields.get("stop", ()) if stop in text.text]
    require(not found, f"the text holds the stop string {found}: {text.text!r}")
    require(body["seed"] == ask.fields["seed"], f"seed {body['seed']}")
    require(body["warnings"] == [], f"warnings {body['warnings']}")
    compared = body.get("compare", {}).get("identical")
    require(compared is not False, f"plain decoding differs: {body.get('compare')}")
    return text


def read_answer(ask: Ask, body: dict[str, Any]) -> Text:
    """Of a whole answer. Raises Wrong."""
    choice = body if ask.path == GENERATE else body["choices"][0]
    logprobs, ids = choice.get("logprobs"), body.get("token_ids")
    count = body["usage"]["completion_tokens"] if ids is None else len(ids)
    if logprobs is not None:
        listed = logprobs if ask.path == GENERATE else logprobs["tokens"]
        require(len(listed) == count, f"{len(listed)} log-probabilities of {count} tokens")
    return check(ask, Text(choice["text"], choice["finish_reason"], count, ids, logprobs), body)


def read_stream(ask: Ask, events: list[dict[str, Any]]) -> Text:
    """Of all events of a stream. Raises Wrong, or Lost where one is an error."""
    failed = [event for event in events if "error" in event]
    if failed:
        raise Lost(f"the stream ended with {failed}")
    return (_read_cycles if ask.path == GENERATE else _read_chunks)(ask, events)


def _read_cycles(ask: Ask, events: list[dict[str, Any]]) -> Text:
    """Cycles, those of a comparison's plain decoding, and the answer."""
    *parts, last = events
    cycles = [event for event in parts if "plain" not in event]
    text = read_answer(ask, last)
    streamed = "".join(cycle["text"] for cycle in cycles)
    require(streamed == text.text, f"streamed {streamed!r}, the answer says {text.text!r}")
    ids = [token["id"] for cycle in cycles for token in cycle["tokens"]]
    require(ids == text.token_ids, f"streamed {ids}, the answer says {text.token_ids}")
    steps = [cycle["step"] for cycle in cycles]
    require(steps == list(range(len(cycles))), f"steps {steps}")
    logprobs = [entry for cycle in cycles for entry in cycle.get("logprobs", ())]
    require(logprobs == (text.logprobs or []), "the streamed log-probabilities are others")
    plain = "".join(event["plain"]["text"] for event in parts if "plain" in event)
    if "compare" in last:
        require(plain == last["compare"]["plain"]["text"], f"streamed as plain: {plain!r}")
    return text


def _read_chunks(ask: Ask, events: list[dict[str, Any]]) -> Text:
    """Chunks of OpenAI's, the one with the reason of the end, and the usage."""
    *chunks, usage = events
    require(usage["choices"] == [], "no chunk with the usage")
    choices = [chunk["choices"][0] for chunk in chunks]
    reasons = [choice["finish_reason"] for choice in choices]
    require(not any(reasons[:-1]) and bool(reasons[-1]), f"reasons of the end: {reasons}")
    listed = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {key: [one for part in listed for one in part[key]] for key in (listed or [{}])[0]}
    whole = {
        "text": "".join(choice["text"] for choice in choices),
        "finish_reason": reasons[-1],
        "logprobs": joined or None,
    }
    return read_answer(ask, usage | {"choices": [whole]})


def read_events(response: http.client.HTTPResponse, until: float) -> Iterator[dict[str, Any]]:
    """A stream's events as they come. Raises Lost if the last is not [DONE], or not in time."""
    for line in response:
        if time.monotonic() > until:
            raise Lost("the stream did not end in time")
        if line.startswith(b"data: [DONE]"):
            require(response.read().strip() == b"", "something came after [DONE]")
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    raise Lost("the stream ended without [DONE]")


# --------------------------------------------------------------------------- what came of them

COUNTS = ("sent", "answered", "refused", "retried_429", "left_early", "lost", "wrong")


class Tally:
    """What came of all clients' requests, by behaviour; every thread writes here."""

    def __init__(self, sample_size: int, seed: int) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.times_ms: dict[str, list[float]] = defaultdict(list)  # by path
        self.num_tokens = self.num_texts = 0
        self.sample: list[tuple[Ask, Text]] = []
        self._size, self._rng = sample_size, random.Random(seed)
        self._lock = threading.Lock()

    def add(self, behaviour: str, count: str) -> None:
        with self._lock:
            self.counts[behaviour][count] += 1

    def time(self, path: str, began: float) -> None:
        """An answer came whole, as fast as the server could."""
        ms = (time.monotonic() - began) * 1e3
        with self._lock:
            self.times_ms[path].append(ms)

    def keep(self, ask: Ask, text: Text) -> None:
        """Count an answer's tokens; each answer is as likely as any other to be in the sample."""
        with self._lock:
            self.num_tokens += text.num_tokens
            self.num_texts += 1
            place = self._rng.randrange(self.num_texts)
            if len(self.sample) < self._size:
                self.sample.append((ask, text))
            elif place < self._size:
                self.sample[place] = (ask, text)

    @contextmanager
    def sent(self, behaviour: str, what: Any) -> Iterator[None]:
        """Count a request as sent, and print what goes wrong until its answer is read."""
        self.add(behaviour, "sent")
        try:
            yield
        except (Lost, OSError, http.client.HTTPException) as error:
            self._fault(behaviour, "lost", what, error)
        except Wrong as error:
            self._fault(behaviour, "wrong", what, error)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            self._fault(behaviour, "wrong", what, error)  # not of the shape that was promised

    def _fault(self, behaviour: str, kind: str, what: Any, error: Exception) -> None:
        self.add(behaviour, kind)
        reason = f"{type(error).__name__}: {error}"
        tqdm.write(f"{kind.upper()} ({behaviour}): {what}\n  {reason}", file=sys.stderr)
        if kind == "lost":
            time.sleep(1.0)  # a server that has gone is not asked thousands of times

    def total(self, count: str) -> int:
        with self._lock:
            return sum(counts[count] for counts in self.counts.values())

    def rows(self) -> list[dict[str, Any]]:
        """By behaviour, then in all."""
        rows = {name: [counts[c] for c in COUNTS] for name, counts in sorted(self.counts.items())}
        rows["in all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        return [
            {"behaviour": name} | dict(zip(COUNTS, row, strict=True)) for name, row in rows.items()
        ]


# ------------------------------------------------------------------------------------- clients


class _Slowly(io.RawIOBase):
    """Reads a few bytes, with a pause before."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        time.sleep(0.005)
        return self._raw.readinto(memoryview(buffer)[:50])

    def close(self) -> None:
        self._raw.close()
        super().close()


class SlowResponse(http.client.HTTPResponse):
    """A response that is read slowly, to its end."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Slowly(sock.makefile("rb", buffering=0)), 50)


class SlowConnection(http.client.HTTPConnection):
    """The server's side feels it: little fits into this one's buffers."""

    response_class = SlowResponse

    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)


class Client:
    """One client: its own random choices; what came of them goes into everyone's tally."""

    def __init__(
        self, port: int, timeout_s: float, tally: Tally, rng: random.Random, drafters: list[str]
    ) -> None:
        self.port, self.timeout_s, self.tally, self.rng = port, timeout_s, tally, rng
        self.drafters, self.texts = drafters, list(core.read_prompts().values())
        self.behaviour = ""

    def run(self, stop: threading.Event) -> None:
        """One thing after another until `stop`."""
        names, weights = list(BEHAVIOURS), [weight for weight, _ in BEHAVIOURS.values()]
        while not stop.is_set():
            self.behaviour = self.rng.choices(names, weights)[0]
            BEHAVIOURS[self.behaviour][1](self)

    def ask(self, path: str = GENERATE, stream: bool = False) -> Ask:
        return random_ask(self.rng, self.texts, self.drafters, path, stream)

    def sent(self, what: Any) -> Any:
        return self.tally.sent(self.behaviour, what)

    def count(self, name: str) -> None:
        self.tally.add(self.behaviour, name)

    def connect(
        self, kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    ) -> http.client.HTTPConnection:
        return kind(HOST, self.port, timeout=self.timeout_s)

    @contextmanager
    def reply(
        self, ask: Ask, connection: http.client.HTTPConnection
    ) -> Iterator[tuple[http.client.HTTPResponse, float]]:
        """Send it, again after a pause while the queue is full; the 200 and when it was sent.

        Raises Lost for another status, and if the queue stays full.
        """
        give_up = time.monotonic() + self.timeout_s
        while True:
            began = time.monotonic()
            post(connection, ask)
            with connection.getresponse() as response:
                if response.status != 429:
                    require_status(response, 200)
                    yield response, began
                    return
                require_error(response.read())
                pause_s = float(response.headers["Retry-After"])
            self.count("retried_429")
            if time.monotonic() > give_up:
                raise Lost(f"the queue was full for {self.timeout_s:g} s")
            time.sleep(pause_s * self.rng.uniform(0.5, 1.5))

    def read(self, ask: Ask, connection: http.client.HTTPConnection) -> Text:
        """The whole answer, checked, counted and timed. Raises Lost and Wrong."""
        is_slow = isinstance(connection, SlowConnection)
        with self.reply(ask, connection) as (response, began):
            until = began + self.timeout_s * (10 if is_slow else 1)
            if ask.is_stream:
                events = list(read_events(response, until))
                text = read_stream(ask, events)
            else:
                text = read_answer(ask, json.load(response))
        if not is_slow:
            self.tally.time(f"POST {ask.path}", began)
        self.tally.keep(ask, text)
        self.count("answered")
        return text

    def get(self, ask: Ask) -> Text | None:
        """A request on a connection of its own; None if it came to nothing, which is counted."""
        with self.sent(ask), closing(self.connect()) as connection:
            return self.read(ask, connection)


def post(connection: http.client.HTTPConnection, ask: Ask) -> None:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", ask.path, json.dumps(ask.fields), headers)


# ---------------------------------------------------------------------------------- behaviours


def ask_several(client: Client) -> None:
    """One after another over one connection."""
    with closing(client.connect()) as connection:
        for ask in [client.ask(stream=client.rng.random() < 0.5) for _ in range(3)]:
            with client.sent(ask):
                client.read(ask, connection)
                continue
            connection.close()  # what went wrong may have left half an answer in it


def leave_stream(client: Client) -> None:
    """Read a few events and go."""
    ask = client.ask(client.rng.choice((GENERATE, COMPLETIONS)), stream=True)
    with (
        client.sent(ask),
        closing(client.connect()) as connection,
        client.reply(ask, connection) as (response, began),
    ):
        events = read_events(response, began + client.timeout_s)
        list(islice(events, client.rng.randint(1, 8)))
        client.count("left_early")


def leave(client: Client) -> None:
    """Ask and go, before, while or after it runs."""
    ask = client.ask(client.rng.choice((GENERATE, COMPLETIONS)))
    with client.sent(ask), closing(client.connect()) as connection:
        post(connection, ask)
        time.sleep(client.rng.uniform(0, 0.5))
        client.count("left_early")


def read_slowly(client: Client) -> None:
    """A few bytes at a time, to the end."""
    ask = client.ask(stream=client.rng.random() < 0.7)
    with client.sent(ask), closing(client.connect(SlowConnection)) as connection:
        client.read(ask, connection)


def burst(client: Client) -> None:
    """More at once than run and wait; who is refused comes again."""
    asks = [client.ask() for _ in range(BURST)]
    short = [Ask(ask.path, ask.fields | {"max_tokens": 16}) for ask in asks]
    with ThreadPoolExecutor(BURST) as pool:
        list(pool.map(client.get, short))


def send_bad_input(client: Client) -> None:
    """Well-formed HTTP with something wrong in it."""
    bad = client.rng.choice(BAD)
    with client.sent(bad.name), closing(client.connect()) as connection:
        connection.request(bad.method, bad.path, bad.body, {"Content-Type": bad.content_type})
        with connection.getresponse() as response:
            body = response.read()
            if response.status >= 500:
                raise Lost(f"status {response.status}: {body!r}")
            require(response.status == bad.status, f"status {response.status}: {body[:500]!r}")
            require_error(body)
        client.count("refused")


def send_no_http(client: Client) -> None:
    """Bytes that are no request, or half of one and then nothing."""
    name = client.rng.choice(["half a body", *NOT_HTTP])
    with (
        client.sent(name),
        socket.create_connection((HOST, client.port), client.timeout_s) as connection,
    ):
        connection.sendall(NOT_HTTP.get(name, HALF))
        if name not in NOT_HTTP:
            time.sleep(client.rng.uniform(0, 0.5))
            client.count("left_early")
            return
        response = http.client.HTTPResponse(connection)
        response.begin()
        require(400 <= response.status < 500, f"status {response.status}")
        require_error(response.read())
        client.count("refused")


def look(client: Client) -> None:
    """A page, or figures."""
    path = client.rng.choice(list(PAGES))
    with client.sent(path), closing(client.connect()) as connection:
        connection.request("GET", path)
        with connection.getresponse() as response:
            require_status(response, 200)
            require(PAGES[path] in response.read(), "the page is another")
        client.count("answered")


BEHAVIOURS: dict[str, tuple[float, Callable[[Client], Any]]] = {
    "generate": (6, lambda client: client.get(client.ask())),
    "generate, streamed": (6, lambda client: client.get(client.ask(stream=True))),
    "generate, one connection": (2, ask_several),
    "completions": (3, lambda client: client.get(client.ask(COMPLETIONS))),
    "completions, streamed": (3, lambda client: client.get(client.ask(COMPLETIONS, stream=True))),
    "leave a stream": (3, leave_stream),
    "leave": (2, leave),
    "read slowly": (2, read_slowly),
    "bad input": (4, send_bad_input),
    "no HTTP": (2, send_no_http),
    "page, metrics": (2, look),
    "burst": (0.4, burst),
}
