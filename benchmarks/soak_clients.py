"""The soak test's clients: what they send, what they do with the answer, what must be in it.

soak.py runs many at once, each in a thread of its own.
"""

import http.client
import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import servers
from benchmarks.servers import Full, Lost, Told

TIMEOUT_S, MAX_TOKENS = 120.0, 160
BURST = 16  # requests at once: with the other clients' more than run and wait
GENERATE, COMPLETIONS = "/generate", "/v1/completions"

# ------------------------------------------------------------------------------------ requests


class Ask(NamedTuple):
    """A request for text."""

    path: str
    fields: dict[str, Any]

    def alone(self) -> "Ask":
        """The same text, asked for without a stream."""
        return Ask(self.path, {k: v for k, v in self.fields.items() if not k.startswith("stream")})


class Text(NamedTuple):
    """What an answer says, as far as it is the same whenever and beside whatever one asks."""

    text: str
    finish_reason: str
    num_tokens: int
    token_ids: list[int] | None  # of /generate only
    logprobs: Any


STOPS = ("\n", " the", ",", "return", "}", ". ", "green", "é")
SAMPLING: dict[str, tuple[float, ...]] = {
    "temperature": (0.3, 0.8, 1.0, 1.5),
    "top_k": (0, 5, 40),
    "top_p": (1.0, 0.95, 0.7),
    "min_p": (0.0, 0.05),
    "repetition_penalty": (1.0, 1.2),
}


# What is no request for text: method, path, body and status. The tests try many more.
OTHER: dict[str, tuple[str, str, str | None, int]] = {
    "the page": ("GET", "/", None, 200),
    "figures": ("GET", "/metrics", None, 200),
    "broken JSON": ("POST", GENERATE, '{"prompt": "1, 2,"', 400),
    "deep nesting": ("POST", GENERATE, "[" * 100_000, 400),
    "over 1 MiB": ("POST", GENERATE, json.dumps({"prompt": "x" * (1 << 20)}), 413),
    "too long prompt": ("POST", GENERATE, json.dumps({"prompt": [7] * 150_000}), 400),
    "another model": ("POST", COMPLETIONS, '{"prompt": "1, 2,", "model": "another"}', 404),
}

# ------------------------------------------------------------------------------------- answers


class Wrong(Exception):
    """An answer came that cannot be right."""


def require(claims: dict[str, bool], answer: Any) -> None:
    """Raises Wrong unless every claim about the answer holds."""
    if broken := [claim for claim, holds in claims.items() if not holds]:
        raise Wrong(f"it does not hold that {', '.join(broken)}: {answer!r:.2000}")


def require_error(body: bytes) -> None:
    """Raises Wrong unless it is the one error body."""
    error = json.loads(body)["error"]
    is_whole = {"message", "type", "param", "code"} == error.keys()
    require({"an error says what is wrong": is_whole and bool(error["message"])}, body)


def read_answer(ask: Ask, body: dict[str, Any]) -> Text:
    """The text, if the answer's figures fit it and the request. Raises Wrong."""
    choice = body if ask.path == GENERATE else body["choices"][0]
    logprobs, ids, usage = choice.get("logprobs"), body.get("token_ids"), body["usage"]
    count, limit = usage["completion_tokens"], ask.fields["max_tokens"]
    text, reason = choice["text"], choice["finish_reason"]
    listed = logprobs if ask.path == GENERATE or not logprobs else logprobs["tokens"]
    claims = {
        "usage adds up": usage["total_tokens"] == usage["prompt_tokens"] + count,
        "usage counts the tokens": ids is None or len(ids) == count,
        "timings count the tokens": body["timings"]["predicted_n"] == count,
        "each token has a log-probability": listed is None or len(listed) == count,
        "there are as many tokens as asked for, at most": 1 <= count <= limit,
        "it says why it ended": reason == "stop" or (reason == "length" and count == limit),
        "stop strings are left out": not any(s in text for s in ask.fields.get("stop", ())),
        "the seed is the request's": body["seed"] == ask.fields["seed"],
        "nothing is warned of": body["warnings"] == [],
        "plain decoding gives the same": body.get("compare", {}).get("identical") is not False,
    }
    require(claims, body)
    return Text(text, reason, count, ids, logprobs)


def read_stream(ask: Ask, events: Sequence[dict[str, Any]]) -> Text:
    """Of all events of a stream. Raises Wrong."""
    *parts, last = events
    if ask.path == GENERATE:  # cycles, those of a comparison's plain decoding, and the answer
        cycles = [event for event in parts if "plain" not in event]
        plain = "".join(event["plain"]["text"] for event in parts if "plain" in event)
        ids = [token["id"] for cycle in cycles for token in cycle["tokens"]]
        logprobs = [entry for cycle in cycles for entry in cycle.get("logprobs", ())]
        said = plain, "".join(cycle["text"] for cycle in cycles), ids, logprobs
        compared = last.get("compare", {"plain": {"text": ""}})["plain"]["text"]
        answer = compared, last["text"], last["token_ids"], last.get("logprobs") or []
        require({"the pieces make the answer": said == answer}, events)
        return read_answer(ask, last)
    choices = [chunk["choices"][0] for chunk in parts]  # OpenAI's chunks, and the usage
    *others, reason = [choice["finish_reason"] for choice in choices]
    claims = {"usage comes last": last["choices"] == [], "it ends once": not any(others)}
    require(claims, events)
    listed = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {key: [one for part in listed for one in part[key]] for key in (listed or [{}])[0]}
    text = "".join(choice["text"] for choice in choices)
    whole = {"text": text, "finish_reason": reason, "logprobs": joined or None}
    return read_answer(ask, last | {"choices": [whole]})


# --------------------------------------------------------------------------- what came of them

POLL = "GET /health"  # the behaviour that only looks on
COUNTS = ("sent", "answered", "refused", "retried_429", "left_early", "lost", "wrong")


class Tally:
    """What came of all clients' requests, by behaviour; every thread writes here."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.times_ms: list[tuple[str, float]] = []  # of whole answers, by what was asked
        self.texts: list[tuple[Ask, Text]] = []
        self._lock = threading.Lock()

    def add(self, behaviour: str, count: str) -> None:
        with self._lock:
            self.counts[behaviour][count] += 1

    @property
    def num_tokens(self) -> int:
        return sum(text.num_tokens for _, text in list(self.texts))

    @property
    def num_sent(self) -> int:
        return sum(n["sent"] for name, n in list(self.counts.items()) if name != POLL)

    @contextmanager
    def sent(self, behaviour: str, what: Any) -> Iterator[None]:
        """Count a request as sent, and count and print what goes wrong until its answer is read."""
        self.add(behaviour, "sent")
        try:
            yield
        except Exception as error:
            is_lost = isinstance(error, (Lost, OSError, http.client.HTTPException))
            kind = "lost" if is_lost else "wrong"  # or not of the shape that was promised
            self.add(behaviour, kind)
            said = f"{kind.upper()} ({behaviour}): {what}\n  {type(error).__name__}: {error}"
            tqdm.write(said, file=sys.stderr)
            if is_lost:
                time.sleep(1.0)  # a server that has gone is not asked thousands of times

    def rows(self) -> list[dict[str, Any]]:
        """By behaviour, then in all."""
        every = dict(sorted(self.counts.items())) | {"in all": sum(self.counts.values(), Counter())}
        return [{"behaviour": name} | {c: n[c] for c in COUNTS} for name, n in every.items()]


# ------------------------------------------------------------------------------------- clients


@dataclass
class Client:
    """One client: its own random choices; what came of them goes into everyone's tally."""

    port: int
    tally: Tally
    rng: random.Random
    drafters: list[str]
    texts: list[str]
    behaviour: str = ""

    def run(self, stop: threading.Event) -> None:
        """One thing after another until `stop`."""
        weights = [weight for weight, _ in BEHAVIOURS.values()]
        while not stop.is_set():
            self.behaviour = self.rng.choices(list(BEHAVIOURS), weights)[0]
            BEHAVIOURS[self.behaviour][1](self)

    def count(self, name: str) -> None:
        self.tally.add(self.behaviour, name)

    def ask(self, path: str) -> Ask:
        """Any request that must be answered, with a seed, so that it has one right answer.

        Its prompt is a text, now and then a long one, or words that nobody has sent before, or any
        token ids, of which most make no sense.
        """
        rng, kind = self.rng, self.rng.random()
        prompt: Any = rng.choice(self.texts) * (rng.randint(2, 6) if rng.random() < 0.2 else 1)
        if kind < 0.4:
            length = rng.randint(300, 1200) if rng.random() < 0.2 else rng.randint(1, 40)
            prompt = [rng.randrange(1, 1000) for _ in range(length)]
        elif kind < 0.6:
            letters = rng.choices("   abcdefghijklmnopqrstuvwxyzé🙂", k=rng.randint(2, 400))
            prompt = "".join(letters) + "."
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, MAX_TOKENS)}
        fields |= {"seed": rng.randrange(1 << 32), "drafter": rng.choice(self.drafters)}
        fields["num_speculative_tokens"] = rng.choice((0, 1, 2, 3, 5, 8, 16))  # 0: plain decoding
        if rng.random() < 0.5:
            fields |= {name: rng.choice(values) for name, values in SAMPLING.items()}
        if rng.random() < 0.25:
            fields["stop"] = rng.sample(STOPS, rng.randint(1, 3))
        if rng.random() < 0.2:
            fields["logprobs"] = rng.choice((0, 1, 5))
        if path == GENERATE and rng.random() < 0.1:
            fields[rng.choice(("trace", "compare"))] = True
        if rng.random() < 0.5:
            usage = {"stream_options": {"include_usage": True}} if path == COMPLETIONS else {}
            fields |= {"stream": True} | usage
        return Ask(path, fields)

    def reply(self, ask: Ask) -> Told:
        """Send it, again after a pause while the queue is full. Raises Lost if it stays full."""
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return servers.ask(self.port, ask.path, ask.fields, TIMEOUT_S)
            except Full as full:
                require_error(full.body)
                self.count("retried_429")
                if time.monotonic() > give_up:
                    raise
                time.sleep(full.pause_s * self.rng.uniform(0.5, 1.5))

    def get(self, ask: Ask) -> Text | None:
        """The answer, checked, counted and timed; None if it came to nothing, which is counted."""
        with self.tally.sent(self.behaviour, ask):
            told = self.reply(ask)
            is_stream = ask.fields.get("stream")
            text = read_stream(ask, told.events) if is_stream else read_answer(ask, told.answer)
            self.tally.times_ms.append((f"POST {ask.path}", told.ms))
            self.tally.texts.append((ask, text))
            self.count("answered")
            return text


# ---------------------------------------------------------------------------------- behaviours


def leave(client: Client) -> None:
    """Ask and go: after a few events, or before, while or after the request runs."""
    ask, patience_s = (
        client.ask(client.rng.choice((GENERATE, COMPLETIONS))),
        client.rng.uniform(0.01, 1),
    )
    with client.tally.sent(client.behaviour, ask):
        events = servers.events_of(client.port, ask.path, ask.fields, patience_s)
        with suppress(TimeoutError, Full), closing(events):
            list(islice(events, client.rng.randint(1, 8)))
        client.count("left_early")


def burst(client: Client) -> None:
    """More at once than run and wait; who is refused comes again."""
    asks = [client.ask(GENERATE) for _ in range(BURST)]
    short = [Ask(ask.path, ask.fields | {"max_tokens": 16}) for ask in asks]
    with ThreadPoolExecutor(BURST) as pool:
        list(pool.map(client.get, short))


def send_other(client: Client) -> None:
    """A page, or something that is refused."""
    name = client.rng.choice(list(OTHER))
    *request, status = OTHER[name]
    with client.tally.sent(client.behaviour, name):
        with servers.answering(client.port, *request, status, TIMEOUT_S) as response:
            body = response.read()
        if status != 200:
            require_error(body)
        client.count("answered" if status == 200 else "refused")


BEHAVIOURS: dict[str, tuple[float, Callable[[Client], Any]]] = {
    "generate": (10, lambda client: client.get(client.ask(GENERATE))),
    "completions": (5, lambda client: client.get(client.ask(COMPLETIONS))),
    "leave": (5, leave),
    "pages, bad input": (8, send_other),
    "burst": (0.4, burst),
}
