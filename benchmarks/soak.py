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

    python -m benchmarks.soak [--minutes 20] [--warm-up 15] [--clients 24] [--seed 0]
        [--sample 300] [--server-arguments="--model embedded"] [--json]

Linux only (/proc). The seed fixes what each client does, not how the clients meet. Not covered:
chats, an API key, shutting down under load, several servers, connections from elsewhere.
"""

import argparse
import random
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from tempfile import NamedTemporaryFile
from typing import Any

from tqdm import tqdm

import benchmarks as bench
import demo
from benchmarks.servers import OURS, Server
from benchmarks.soak_clients import POLL, TIMEOUT_S, Ask, Client, Tally, Text
from serving.options import seconds

REST_S = 60.0  # the server closes forgotten connections after 30 s
HEALTH_EVERY_S = 0.1
MAX_HEALTH_P99_MS = 100.0
MANY_REQUESTS, MAX_GROWTH_MIB = 20_000, 5.0  # of so many the second half may add so much memory
MAX_THREADS = 100  # they are started when they are needed, up to a fixed number, and stay

Sample = dict[str, float]  # the server at one moment: memory_mib, and what IN_USE names
OWN_MEMORY = ("RssAnon", "RssShmem")
IN_USE = ("threads", "open_files", "requests_running", "requests_waiting", "kv_cache_usage")


class Soaked(Server):
    """Our server, and what it has in use."""

    def sample(self, health: dict[str, Any]) -> Sample:
        """What Linux and /health say."""
        status = self.status()
        return {
            "memory_mib": round(sum(int(status[part][0]) for part in OWN_MEMORY) / 1024, 2),
            "threads": int(status["Threads"][0]),
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


# ----------------------------------------------------------------------------------- the soak


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
                    tally.add(POLL, "answered")
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
        if (now := client.get(ask.alone())) is None:
            break
        num_sent += 1
        if now != before:
            num_different += 1
            client.tally.add(client.behaviour, "wrong")
            tqdm.write(f"WRONG: {ask}\n  under load {before}\n  alone      {now}", file=sys.stderr)
    return {"kept": len(sample), "sent_again": num_sent, "differ": num_different}


def soak(given: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Start, warm up, load, rest, send the sample again, stop; what there is to report."""
    tally, texts = Tally(), list(demo.read_prompts().values())
    with log.open("wb") as output:
        server = Soaked([*OURS, "--max-queued", "16", *given.server_arguments], output)
    try:
        health = server.wait_for_health()
        if not health["bitwise_lossless"]:
            raise RuntimeError("this server's texts may differ by rounding, so none is wrong")
        start, common = server.sample(health), (health["drafters"], texts)
        chances = [random.Random(f"{given.seed} {i}") for i in range(given.clients)]
        clients = [Client(server.port, tally, chance, *common) for chance in chances]
        load(server, clients, tally, given.warm_up)
        warm, began, before = server.rest(), time.monotonic(), (tally.num_tokens, tally.num_sent)
        samples = load(server, clients, tally, given.minutes * 60)
        load_s = time.monotonic() - began
        num_tokens, num_sent = tally.num_tokens - before[0], tally.num_sent - before[1]
        times_ms = list(tally.times_ms)
        end = server.rest(warm)
        random.Random(given.seed).shuffle(tally.texts)
        rerun = send_again(clients[0], tally.texts[: given.sample])
        exit_code = server.stop()
    finally:
        server.process.kill()  # if it still runs
    return {
        "requests": tally.rows(),
        "throughput": [{"load_s": round(load_s, 1), "requests": num_sent, "tokens": num_tokens}],
        "latency": [latency_row(path, times_ms) for path in sorted({path for path, _ in times_ms})],
        "memory": [memory_row(start, warm, end, samples)],
        "at_rest": [rest_row(name, warm, end) for name in IN_USE],
        "rerun": [rerun],
        "server": [{"exit_code": exit_code, "tracebacks": log.read_bytes().count(b"Traceback")}],
        "memory_mib": [round(sample["memory_mib"]) for sample in samples[::50]],  # every 5 s
    }


# -------------------------------------------------------------------------------------- report


def latency_row(path: str, times_ms: list[tuple[str, float]]) -> dict[str, Any]:
    """In milliseconds."""
    times = [ms for asked, ms in times_ms if asked == path]
    cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    row = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(times)}
    return {"answered": path, "count": len(times)} | {k: round(v, 1) for k, v in row.items()}


def memory_row(start: Sample, warm: Sample, end: Sample, samples: list[Sample]) -> dict[str, Any]:
    """The server's own memory in MiB: how high it had gone by the end of each quarter."""
    mib = [sample["memory_mib"] for sample in samples]
    ends = {f"quarter_{i}": -(-len(mib) * i // 4) for i in range(1, 5)}
    peaks = {name: max(mib[:end], default=None) for name, end in ends.items()}
    begin = {"mib_at_start": start["memory_mib"], "after_warm_up": warm["memory_mib"]}
    return begin | peaks | {"at_rest": end["memory_mib"]}


def rest_row(name: str, warm: Sample, end: Sample) -> dict[str, Any]:
    """What the idle server has in use, and how much of that is left over."""
    allowed = {"threads": max(MAX_THREADS, warm[name]), "open_files": warm[name]}.get(name, 0)
    row = {"after_warm_up": warm[name], "at_the_end": end[name]}
    return {"at_rest": name.replace("_", " ")} | row | {"leaked": max(end[name] - allowed, 0)}


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
        f"memory grew by {growth:.1f} > {MAX_GROWTH_MIB:g} MiB in the second half": (
            growth > MAX_GROWTH_MIB
        ),
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
    bench.add_count(options, "--seed", 0, 10**9, 0, "of the clients' choices")
    bench.add_count(options, "--clients", 1, 500, 24, "at once")
    bench.add_count(options, "--sample", 1, 10**6, 300, "answers to compare in the end")
    options.add_argument(
        "--server-arguments", type=shlex.split, default=["--model", "embedded"], metavar="WORDS"
    )
    given = options.parse_args(arguments)
    if not Path("/proc/self/status").exists():
        options.error("this needs /proc, which Linux has")
    with NamedTemporaryFile(prefix="soak-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    print(f"the server's log, kept if there are faults: {log}", file=sys.stderr)
    try:
        found = soak(given, log)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found["faults"] = find_faults(found)
    bench.report(__spec__.name, arguments, given, found)
    if found["faults"]:
        print("faults: " + "; ".join(found["faults"]), file=sys.stderr)
        return 1
    log.unlink()
    return 0


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM):  # the server must not outlive this process
        signal.signal(name, signal.default_int_handler)
    sys.exit(main())
