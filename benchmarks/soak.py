"""Does the server stay right, whole and quick while everything happens at once? A soak test.

The real server as a process of its own, and clients in threads here, each doing one thing after
another, chosen by chance: requests of every kind, whole or as a stream; clients that leave; bad
input; bursts that overfill the queue (429: they come again). All of it counts:

    wrong   an answer that contradicts itself (pieces and text, tokens and usage, stop strings), or
            differs from what the same request, seed included, gets once nothing runs beside it;
            of the answers a random sample is sent again
    lost    no proper answer: reset, truncated, another status, or none in two minutes
    leaked  what an idle server has in the end and had not after warming up: threads, open files,
            requests, tokens in the KV cache

GET /health is asked every 0.1 s; its times include what the clients' threads keep this process
from noticing. Memory is sampled with it: what is the server's own, without pages of files, which
the system takes back and reads again as it likes. Caches fill at first. Of 20 000 requests or more
the second half may add 5 MiB at most.

In the end SIGTERM must end the server with 0, and its log must hold no traceback. Exit status 1 for
any fault, a p99 of /health above 100 ms included.

    python -m benchmarks.soak [--minutes 20] [--warm-up 15] [--clients 24]
        [--sample 300] [--server-arguments="--model embedded"] [--json]

Linux only (/proc). Each run has the same clients, and only how they meet differs. Not covered:
/v1, an API key, shutting down under load, several servers, connections from elsewhere.
"""

import argparse
import http.client
import json
import random
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

import benchmarks as bench
from benchmarks import servers
from benchmarks.lossless import SAMPLINGS
from messages import Sampling
from models.prompts import read_prompts
from serving.options import seconds

TIMEOUT_S, MAX_TOKENS = 120.0, 160
BURST = 16  # requests at once: with the other clients' more than run and wait
REST_S = 60.0  # the server closes forgotten connections after 30 s
HEALTH_EVERY_S, MAX_HEALTH_P99_MS = 0.1, 100.0
MANY_REQUESTS, MAX_GROWTH = 20_000, 5.0  # of so many the second half may add so many MiB
MAX_THREADS = 100  # they are started when they are needed, up to a fixed number, and stay
GENERATE, POLL = "/generate", "GET /health"
Ask = dict[str, Any]  # the fields of a request for text

Sample = dict[str, float]  # the server at one moment: memory_mib, and what IN_USE names
IN_USE = ("threads", "open_files", "requests_running", "requests_waiting", "kv_cache_usage")


# ------------------------------------------------------------------------------------ requests
class Text(NamedTuple):
    """What an answer says, as far as it is the same whenever and beside whatever one asks."""

    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: Any


TEXTS = list(read_prompts().values())
STOPS = ("\n", " the", ",", "return", "}", ". ", "green", "é")
# What is no request for text: method, path, body and status. The tests try many more.
OTHER: dict[str, tuple[str, str, str | None, int]] = {
    "the page": ("GET", "/page/", None, 200),
    "figures": ("GET", "/metrics", None, 200),
    "over 1 MiB": ("POST", GENERATE, json.dumps({"prompt": "x" * (1 << 20)}), 413),
    "too long prompt": ("POST", GENERATE, json.dumps({"prompt": [7] * 150_000}), 400),
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
    ids, usage, limit = body["token_ids"], body["usage"], ask["max_tokens"]
    count = len(ids)
    text, reason, logprobs = body["text"], body["finish_reason"], body.get("logprobs")
    claims = {
        "usage adds up": usage["total_tokens"] == usage["prompt_tokens"] + count,
        "usage counts the tokens": usage["completion_tokens"] == count,
        "timings count the tokens": body["timings"]["predicted_n"] == count,
        "each token has a log-probability": logprobs is None or len(logprobs) == count,
        "there are as many tokens as asked for, at most": 1 <= count <= limit,
        "it says why it ended": reason == "stop" or (reason == "length" and count == limit),
        "stop strings are left out": not any(s in text for s in ask.get("stop", ())),
        "the seed is the request's": body["seed"] == ask["seed"],
        "nothing is warned of": body["warnings"] == [],
        "plain decoding gives the same": body.get("compare", {}).get("identical") is not False,
    }
    require(claims, body)
    return Text(text, reason, ids, logprobs)


def read_stream(ask: Ask, *events: dict[str, Any]) -> Text:
    """The text of a stream, if its events fit it and the request. Raises Wrong."""
    *parts, last = events
    # Cycles, those of a comparison's plain decoding, and the answer.
    cycles = [event for event in parts if "plain" not in event]
    plain = "".join(event["plain"]["text"] for event in parts if "plain" in event)
    ids = [token["id"] for cycle in cycles for token in cycle["tokens"]]
    logprobs = [entry for cycle in cycles for entry in cycle.get("logprobs", ())]
    said = plain, "".join(cycle["text"] for cycle in cycles), ids, logprobs
    compared = last.get("compare", {"plain": {"text": ""}})["plain"]["text"]
    answer = compared, last["text"], last["token_ids"], last.get("logprobs") or []
    require({"the pieces make the answer": said == answer}, events)
    return read_answer(ask, last)


# --------------------------------------------------------------------------- what came of them
COUNTS = ("sent", "answered", "refused", "retried_429", "left_early", "lost", "wrong")


@dataclass
class Tally:
    """What came of all clients' requests, by behaviour; every thread writes here."""

    seen: list[tuple[str, str]] = field(default_factory=list)  # behaviours, and one of COUNTS
    times_ms: list[tuple[str, float]] = field(default_factory=list)  # of what was asked
    texts: list[tuple[Ask, Text]] = field(default_factory=list)

    def throughput(self) -> tuple[int, int]:
        """Requests until now, and tokens of their answers."""
        num_sent = sum(name != POLL and count == "sent" for name, count in list(self.seen))
        return num_sent, sum(len(text.token_ids) for _, text in list(self.texts))

    @contextmanager
    def sent(self, behaviour: str, what: Any, outcome: str = "answered") -> Iterator[None]:
        """Count a request as sent, then its outcome, or what goes wrong, which is printed, too."""
        self.seen.append((behaviour, "sent"))
        try:
            yield
            self.seen.append((behaviour, outcome))
        except Exception as error:
            is_lost = isinstance(error, (servers.Lost, OSError, http.client.HTTPException))
            kind = "lost" if is_lost else "wrong"  # or not of the shape that was promised
            self.seen.append((behaviour, kind))
            said = f"{kind.upper()} ({behaviour}): {what}\n  {type(error).__name__}: {error}"
            tqdm.write(said, file=sys.stderr)
            if is_lost:
                time.sleep(1.0)  # a server that has gone is not asked thousands of times

    def rows(self) -> list[dict[str, Any]]:
        """By behaviour, then in all."""
        found = Counter([*self.seen, *(("in all", count) for _, count in self.seen)])
        names = [*sorted({name for name, _ in self.seen}), "in all"]
        return [{"behaviour": n} | {count: found[n, count] for count in COUNTS} for n in names]


# ------------------------------------------------------------------------------------- clients
@dataclass
class Client:
    """One client: its own random choices; what came of them goes into everyone's tally."""

    port: int
    tally: Tally
    rng: random.Random
    drafters: list[str]
    behaviour: str = ""

    def run(self, stop: threading.Event) -> None:
        """One thing after another until `stop`."""
        weights = [weight for weight, _ in BEHAVIOURS.values()]
        while not stop.is_set():
            self.behaviour = self.rng.choices(list(BEHAVIOURS), weights)[0]
            BEHAVIOURS[self.behaviour][1](self)

    def ask(self) -> Ask:
        """Any request that must be answered, with a seed, so that it has one right answer.

        Its prompt is a text, now and then a long one, or words that nobody has sent before, or any
        token ids, of which most make no sense.
        """
        rng, kind = self.rng, self.rng.random()
        prompt: Any = rng.choice(TEXTS) * (rng.randint(2, 6) if rng.random() < 0.2 else 1)
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
            sampling = vars(rng.choice(list(SAMPLINGS.values())))
            fields |= {name: v for name, v in sampling.items() if v != getattr(Sampling, name)}
        if rng.random() < 0.25:
            fields["stop"] = rng.sample(STOPS, rng.randint(1, 3))
        if rng.random() < 0.2:
            fields["logprobs"] = rng.choice((0, 1, 5))
        if rng.random() < 0.1:
            fields[rng.choice(("trace", "compare"))] = True
        return fields | {"stream": rng.random() < 0.5}

    def patiently(self, send: Callable[[], Any]) -> Any:
        """What `send` gives, again after a pause while the queue is full. Raises Full at last."""
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return send()
            except servers.Full as full:
                require_error(full.body)
                self.tally.seen.append((self.behaviour, "retried_429"))
                if time.monotonic() > give_up:
                    raise
                time.sleep(full.pause_s * self.rng.uniform(0.5, 1.5))

    def get(self, ask: Ask) -> Text | None:
        """The answer, checked, counted and timed; None if it came to nothing, which is counted."""
        with self.tally.sent(self.behaviour, ask):
            told = self.patiently(lambda: servers.ask(self.port, GENERATE, ask, TIMEOUT_S))
            text = (read_stream if ask["stream"] else read_answer)(ask, *told.events)
            self.tally.times_ms.append((f"POST {GENERATE}", told.at_ms[-1]))
            self.tally.texts.append((ask, text))
            return text


# ---------------------------------------------------------------------------------- behaviours
def leave(client: Client) -> None:
    """Ask and go: after a few events, or before, while or after the request runs."""
    ask, patience_s = client.ask(), client.rng.uniform(0.01, 1)
    with client.tally.sent(client.behaviour, ask, "left_early"):
        events = servers.events_of(client.port, GENERATE, ask, patience_s)
        with suppress(TimeoutError, servers.Full), closing(events):
            list(islice(events, client.rng.randint(1, 8)))


def burst(client: Client) -> None:
    """More at once than run and wait; who is refused comes again."""
    short = [client.ask() | {"max_tokens": 16} for _ in range(BURST)]
    with ThreadPoolExecutor(BURST) as pool:
        list(pool.map(client.get, short))


def send_other(client: Client) -> None:
    """A page, or something that is refused."""
    name = client.rng.choice(list(OTHER))
    *request, status = OTHER[name]
    outcome = "answered" if status == 200 else "refused"

    def send() -> bytes:
        with servers.answering(client.port, *request, status, TIMEOUT_S) as response:
            return response.read()

    with client.tally.sent(client.behaviour, name, outcome):
        body = client.patiently(send)
        if status != 200:
            require_error(body)


BEHAVIOURS: dict[str, tuple[float, Callable[[Client], Any]]] = {
    "generate": (15, lambda client: client.get(client.ask())),
    "leave": (5, leave),
    "pages, bad input": (8, send_other),
    "burst": (0.4, burst),
}


# ------------------------------------------------------------------------------------ the soak
class Soaked(servers.Server):
    """Our server, and what it has in use."""

    def sample(self, health: dict[str, Any]) -> Sample:
        """What Linux and /health say."""
        return {
            "memory_mib": round(self.own_mib(), 2),
            "threads": int(self.status()["Threads"][0]),
            "open_files": len(list(Path(f"/proc/{self.process.pid}/fd").iterdir())),
            "requests_running": health["num_requests_running"],
            "requests_waiting": health["num_requests_waiting"],
            "kv_cache_usage": health["kv_cache_usage_perc"],
        }

    def rest(self, before: Sample | None = None) -> Sample:
        """A sample once nobody asks: like the one before it, with no more in use than `before`.

        If that takes too long it is the last one. Raises RuntimeError if /health does not answer.
        """
        until, sample = time.monotonic() + REST_S, None
        while True:
            last, health = sample, self.wait_for_health(REST_S)
            time.sleep(1.0)  # this request's own connection is closed by then
            sample = self.sample(health)
            limits = [each for each in (last, before) if each]
            is_less = all(sample[name] <= limit[name] for name in IN_USE[1:] for limit in limits)
            if last and is_less and not sample["requests_running"] or time.monotonic() > until:
                return sample


def load(server: Soaked, clients: list[Client], tally: Tally, duration_s: float) -> list[Sample]:
    """All clients at once for so long, or until the server has gone. Then each finishes.

    Meanwhile /health is asked ten times a second, and each time a sample is taken.
    """
    stop, samples, until = threading.Event(), [], time.monotonic() + duration_s
    with ThreadPoolExecutor(len(clients)) as pool:
        threads = [pool.submit(client.run, stop) for client in clients]
        try:
            while (began := time.monotonic()) < until and server.is_alive:
                with tally.sent(POLL, "poll"):
                    health = server.health(TIMEOUT_S)
                    tally.times_ms.append((POLL, (time.monotonic() - began) * 1e3))
                    samples.append(server.sample(health))
                time.sleep(max(0.0, began + HEALTH_EVERY_S - time.monotonic()))
        finally:
            stop.set()
    for thread in threads:
        thread.result()  # a fault of this file's own is raised here
    return samples


def send_again(client: Client, sample: list[tuple[Ask, Text]]) -> dict[str, Any]:
    """Each of the sample alone: how many were sent again, and how many differ.

    Stops at the first without a proper answer: a server that hangs would take hours.
    """
    client.behaviour, num_sent, num_different = "again, alone", 0, 0
    for ask, before in tqdm(sample, desc="again, alone"):
        if (now := client.get(ask | {"stream": False})) is None:
            break
        num_sent += 1
        if now != before:
            num_different += 1
            client.tally.seen.append((client.behaviour, "wrong"))
            tqdm.write(f"WRONG: {ask}\n  under load {before}\n  alone      {now}", file=sys.stderr)
    return {"kept": len(sample), "sent_again": num_sent, "differ": num_different}


def soak(flags: argparse.Namespace, log: IO[bytes]) -> dict[str, Any]:
    """Start, warm up, load, rest, send the sample again, stop; what there is to report."""
    command = [*servers.OURS, "--max-queued", "16", *flags.server_arguments]
    server, tally = Soaked(command, log), Tally()
    try:
        health = server.wait_for_health()
        if not health["bitwise_lossless"]:
            raise RuntimeError("this server's texts may differ by rounding, so none is wrong")
        start, chances = server.sample(health), map(random.Random, range(flags.clients))
        names = [name for name in health["drafters"] if name != "prediction"]  # which needs one
        clients = [Client(server.port, tally, rng, names) for rng in chances]
        load(server, clients, tally, flags.warm_up)
        warm, began, before = server.rest(), time.monotonic(), tally.throughput()
        samples = load(server, clients, tally, flags.minutes * 60)
        load_s = round(time.monotonic() - began, 1)
        num_sent, num_tokens = (n - old for n, old in zip(tally.throughput(), before, strict=True))
        times_ms = list(tally.times_ms)
        end = server.rest(warm)
        random.Random(0).shuffle(tally.texts)
        rerun = send_again(clients[0], tally.texts[: flags.sample])
        exit_code = server.stop()
    finally:
        server.process.kill()  # if it still runs
    num_tracebacks = Path(log.name).read_bytes().count(b"Traceback")
    return {
        "requests": tally.rows(),
        "throughput": [{"load_s": load_s, "requests": num_sent, "tokens": num_tokens}],
        "latency": [latency_row(path, times_ms) for path in sorted({path for path, _ in times_ms})],
        "memory": [memory_row(start, warm, end, samples)],
        "at_rest": [rest_row(name, warm, end) for name in IN_USE],
        "rerun": [rerun],
        "server": [{"exit_code": exit_code, "tracebacks": num_tracebacks}],
        "memory_mib": [round(sample["memory_mib"]) for sample in samples[::50]],  # every 5 s
    }


# -------------------------------------------------------------------------------------- report
def latency_row(path: str, times_ms: list[tuple[str, float]]) -> dict[str, Any]:
    """In milliseconds."""
    times = [round(ms, 1) for asked, ms in times_ms if asked == path]
    p50, p99 = np.percentile(times, [50, 99]).round(1).tolist()
    row = {"answered": path, "count": len(times), "p50_ms": p50}
    return row | {"p99_ms": p99, "max_ms": max(times)}


def memory_row(start: Sample, warm: Sample, end: Sample, samples: list[Sample]) -> dict[str, Any]:
    """The server's own memory in MiB: how high it had gone by the end of each quarter."""
    row = {"mib_at_start": start["memory_mib"], "after_warm_up": warm["memory_mib"]}
    for i in range(1, 5):
        quarters = samples[: -(-len(samples) * i // 4)]
        row[f"quarter_{i}"] = max((each["memory_mib"] for each in quarters), default=None)
    return row | {"at_rest": end["memory_mib"]}


def rest_row(name: str, warm: Sample, end: Sample) -> dict[str, Any]:
    """What the idle server has in use, and how much of that is left over."""
    allowed = {"threads": max(MAX_THREADS, warm[name]), "open_files": warm[name]}.get(name, 0)
    row = {"at_rest": name.replace("_", " "), "after_warm_up": warm[name], "at_the_end": end[name]}
    return row | {"leaked": max(end[name] - allowed, 0)}


def find_faults(document: dict[str, Any]) -> list[str]:
    """All that should not have been, in words."""
    in_all, rerun, server = document["requests"][-1], document["rerun"][0], document["server"][0]
    memory, num_requests = document["memory"][0], document["throughput"][0]["requests"]
    is_long = num_requests >= MANY_REQUESTS
    growth = memory["quarter_4"] - memory["quarter_2"] if is_long else 0.0
    p99_ms = max((r["p99_ms"] for r in document["latency"] if r["answered"] == POLL), default=0.0)
    faults = {f"{in_all[kind]} {kind}": in_all[kind] for kind in ("lost", "wrong")}
    faults |= {f"{r['leaked']} {r['at_rest']} leaked": r["leaked"] for r in document["at_rest"]}
    faults |= {
        f"p99 of /health missed: {p99_ms} > {MAX_HEALTH_P99_MS:g} ms": p99_ms > MAX_HEALTH_P99_MS,
        f"memory grew by {growth:.1f} > {MAX_GROWTH:g} MiB in the second half": growth > MAX_GROWTH,
        "not all of the sample could be sent again": rerun["sent_again"] < rerun["kept"],
        f"exit code {server['exit_code']} after SIGTERM": server["exit_code"] != 0,
        "a traceback in the log": server["tracebacks"],
    }
    return [fault for fault, is_so in faults.items() if is_so]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 1 for any fault."""
    options = bench.parser(__doc__, runs=None)
    shown = {"type": seconds, "help": "(default: %(default)s)"}
    options.add_argument("--minutes", **shown, default=20.0)
    options.add_argument("--warm-up", **shown, default=15.0)
    bench.add_count(options, "--clients", 1, 500, 24, "at once")
    bench.add_count(options, "--sample", 1, 10**6, 300, "answers to compare in the end")
    words = {"type": shlex.split, "default": ["--model", "embedded"], "metavar": "WORDS"}
    options.add_argument("--server-arguments", **words)
    flags = options.parse_args(arguments)
    if not Path("/proc/self/status").exists():
        options.error("this needs /proc, which Linux has")
    with NamedTemporaryFile(prefix="soak-", suffix=".log", delete=False) as log:
        print(f"the server's log, kept if there are faults: {log.name}", file=sys.stderr)
        try:
            found = soak(flags, log)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    found["faults"] = find_faults(found)
    bench.report(__spec__.name, arguments, flags, found)
    if found["faults"]:
        print("faults: " + "; ".join(found["faults"]), file=sys.stderr)
        return 1
    Path(log.name).unlink()
    return 0


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM):  # the server must not outlive this process
        signal.signal(name, signal.default_int_handler)
    sys.exit(main())
