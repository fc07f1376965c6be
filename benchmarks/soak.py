"""Does the server stay right, whole and quick while everything happens at once? A soak test.

The real server as a process of its own, and clients in threads here, each doing one thing after
another, chosen by chance: requests of every kind, read at once, as a stream or very slowly; clients
that leave; bad input; bursts that overfill the queue (429: they come again). All of it counts:

    wrong   an answer that contradicts itself (pieces and text, tokens and usage, stop strings), or
            differs from what the same request, seed included, gets once nothing runs beside it;
            of the answers a random sample is sent again
    lost    no proper answer: reset, truncated, another status, or none within --timeout
    leaked  what an idle server has in the end and had not after warming up: threads, open files,
            requests, tokens in the KV cache

GET /health is asked every 0.1 s; its times include what the clients' threads keep this process
from noticing. Memory is sampled every 5 s; its slope is that of a line through the samples after
the first quarter, so in a few minutes it shows how caches fill, and no leak. In the end SIGTERM
must end the server with 0, and its log must hold no traceback. Exit status 1 for any fault, a p99
of /health above 100 ms included; the slope is no fault.

    python -m benchmarks.soak --minutes 20 [--warm-up 15] [--clients 24] [--seed 0] [--sample 300]
        [--timeout 120] [--json] [--record [FILE]] [--server-arguments="--max-running 4"]

Linux only (/proc). The seed fixes what each client does, not how the clients meet. Not covered:
chats, an API key, shutting down under load, several servers, connections from elsewhere.
"""

import argparse
import http.client
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import astuple, dataclass
from operator import gt
from pathlib import Path
from statistics import linear_regression, quantiles
from tempfile import NamedTemporaryFile
from typing import Any

from tqdm import tqdm

from benchmarks import describe, places, print_table
from benchmarks.soak_clients import COUNTS, HOST, Ask, Client, Lost, Tally, Text, require_status
from serving.options import ROOT, between, seconds

MAX_QUEUED = 16
START_S = 300.0
REST_S = 60.0  # the server closes forgotten connections after 30 s
STOP_S = 60.0
HEALTH_EVERY_S, SAMPLE_EVERY_S = 0.1, 5.0
MAX_HEALTH_P99_MS = 100.0
TABLES = ("requests", "throughput", "latency", "memory", "at_rest", "rerun", "server")
RESULT = ROOT / "benchmarks" / "results" / "soak.json"

# -------------------------------------------------------------------------------------- server


@dataclass(frozen=True)
class Sample:
    """The server at one moment."""

    at_s: float
    rss_mib: float
    threads: int
    open_files: int
    requests_running: int
    requests_waiting: int
    kv_cache_usage: float

    @property
    def in_use(self) -> tuple[float, ...]:
        """All but time and memory."""
        return astuple(self)[2:]

    def exceeds(self, before: "Sample") -> bool:
        """Whether more is in use than before."""
        return any(map(gt, self.in_use, before.in_use))


class Server:
    """The server as a process, its output in a file; killed on the way out if it still runs."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "08_speculative_decoding.py", "--host", HOST]
        command += ["--port", str(self.port), "--max-queued", str(MAX_QUEUED), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive:
            self._process.kill()
            self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> dict[str, Any]:
        """The first /health with a 200. Raises RuntimeError if there is none."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.is_alive:
            try:
                return self.health(10.0)
            except (OSError, http.client.HTTPException, Lost):
                time.sleep(0.2)
        raise RuntimeError("the server did not start")

    def health(self, timeout_s: float) -> dict[str, Any]:
        """GET /health on a connection of its own. Raises Lost unless it is a 200."""
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)) as connection:
            connection.request("GET", "/health", headers={"Connection": "close"})
            with connection.getresponse() as response:
                require_status(response, 200)
                return json.load(response)

    def sample(self, health: dict[str, Any]) -> Sample:
        """What Linux and /health say."""
        proc = Path("/proc") / str(self._process.pid)
        lines = (proc / "status").read_text().splitlines()
        status = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        return Sample(
            time.monotonic(),
            round(int(status["VmRSS"][0]) / 1024, 2),
            int(status["Threads"][0]),
            len(list((proc / "fd").iterdir())),
            health["num_requests_running"],
            health["num_requests_waiting"],
            health["kv_cache_usage_perc"],
        )

    def rest(self, timeout_s: float, before: Sample | None = None) -> Sample | None:
        """A sample once nobody asks: one that equals the last and has no more in use than `before`.

        If that takes too long the last one; None if /health had no 200 at all.
        """
        until, last = time.monotonic() + REST_S, None
        while time.monotonic() < until and self.is_alive:
            try:
                health = self.health(timeout_s)
            except (OSError, http.client.HTTPException, Lost):
                health = None
            time.sleep(1.0)  # this request's own connection is closed by then
            if health is None:
                continue
            sample = self.sample(health)
            is_idle = not (sample.requests_running or sample.requests_waiting)
            is_steady = last is not None and sample.in_use == last.in_use
            last = sample
            if is_idle and is_steady and not (before and sample.exceeds(before)):
                break
        return last

    def stop(self) -> int | None:
        """SIGTERM, if it has not ended already, and the exit code; None if it does not end."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return None


# ----------------------------------------------------------------------------------- the soak


def watch(
    server: Server, tally: Tally, samples: list[Sample], timeout_s: float, stop: threading.Event
) -> None:
    """Ask for /health ten times a second until `stop`, and take samples."""
    name, next_at, sample_at = "GET /health", 0.0, 0.0
    while not stop.wait(max(0.0, next_at - time.monotonic())):
        began = time.monotonic()
        next_at = began + HEALTH_EVERY_S
        with tally.sent(name, "poll"):
            health = server.health(timeout_s)
            tally.time(name, began)
            tally.add(name, "answered")
            if began >= sample_at:
                sample_at = began + SAMPLE_EVERY_S
                samples.append(server.sample(health))


@dataclass(frozen=True)
class Load:
    """What was measured while all clients were at work."""

    duration_s: float
    num_tokens: int  # of answers that came whole
    samples: list[Sample]


def load(
    server: Server, clients: list[Client], tally: Tally, duration_s: float, title: str
) -> Load:
    """All clients at once for so long; then each finishes what it does."""
    stop, samples, before, began = threading.Event(), [], tally.num_tokens, time.monotonic()
    with ThreadPoolExecutor(len(clients) + 1) as pool:
        threads = [pool.submit(client.run, stop) for client in clients]
        threads.append(pool.submit(watch, server, tally, samples, clients[0].timeout_s, stop))
        try:
            show_progress(server, tally, duration_s, title)
            passed_s = round(time.monotonic() - began, 1)
            result = Load(passed_s, tally.num_tokens - before, samples)
        finally:
            stop.set()
    for thread in threads:
        thread.result()  # a fault of this file's own is raised here
    return result


def show_progress(server: Server, tally: Tally, duration_s: float, title: str) -> None:
    """Until the time is over, or the server has gone."""
    began = time.monotonic()
    bar_format = "{desc} {percentage:3.0f}% |{bar:20}| {n:.0f}/{total:.0f} s{postfix}"
    with tqdm(total=duration_s, desc=title, bar_format=bar_format) as progress:
        while (passed := time.monotonic() - began) < duration_s and server.is_alive:
            progress.update(passed - progress.n)
            counts = {name: tally.total(name) for name in COUNTS if name != "refused"}
            progress.set_postfix(counts | {"tokens": tally.num_tokens})
            time.sleep(0.5)


def send_again(client: Client, sample: list[tuple[Ask, Text]]) -> dict[str, Any]:
    """Each of the sample alone: how many were sent again, and how many differ.

    Stops at the first without a proper answer: a server that hangs would take hours.
    """
    client.behaviour, num_same, num_different = "again, alone", 0, 0
    for ask, before in tqdm(sample, desc="again, alone"):
        now = client.get(ask.alone())
        if now is None:
            break
        if now == before:
            num_same += 1
            continue
        num_different += 1
        client.tally.add(client.behaviour, "wrong")
        tqdm.write(f"WRONG: {ask}\n  under load {before}\n  alone      {now}", file=sys.stderr)
    return {"kept": len(sample), "sent_again": num_same + num_different, "differ": num_different}


# -------------------------------------------------------------------------------------- report


def latency_rows(times_ms: dict[str, list[float]]) -> list[dict[str, Any]]:
    """In milliseconds, by path."""
    rows = []
    for path, times in sorted(times_ms.items()):
        cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
        row = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(times)}
        rows.append({"answered": path, "count": len(times)} | {k: places(row[k], 1) for k in row})
    return rows


def slope_per_hour(samples: list[Sample]) -> float | None:
    """Of a line through the resident memory, MiB; None for fewer than three samples."""
    if len(samples) < 3:
        return None
    hours = [sample.at_s / 3600 for sample in samples]
    return linear_regression(hours, [sample.rss_mib for sample in samples]).slope


def memory_row(
    start: Sample, warm: Sample, end: Sample | None, samples: list[Sample]
) -> dict[str, Any]:
    """Resident memory; the slope is that of all but the first quarter of the samples."""
    later = samples[len(samples) // 4 :]
    return {
        "rss_mib_at_start": start.rss_mib,
        "after_warm_up": warm.rss_mib,
        "highest": max([sample.rss_mib for sample in samples], default=None),
        "at_rest": end and end.rss_mib,
        "slope_mib_per_hour": places(slope_per_hour(later), 1),
        "samples": len(later),
    }


def rest_rows(warm: Sample, end: Sample | None) -> list[dict[str, Any]]:
    """What the idle server has in use, and how much of that is left over; None = not known."""
    rows = []
    for name in ("threads", "open_files", "requests_running", "requests_waiting", "kv_cache_usage"):
        before, after = getattr(warm, name), end and getattr(end, name)
        allowed = before if name in ("threads", "open_files") else 0
        leaked = None if after is None else max(after - allowed, 0)
        row = {"after_warm_up": before, "at_the_end": after, "leaked": leaked}
        rows.append({"at_rest": name.replace("_", " ")} | row)
    return rows


def find_faults(document: dict[str, Any]) -> list[str]:
    """All that should not have been, in words."""
    in_all = document["requests"][-1]
    faults = [f"{in_all[kind]} {kind}" for kind in ("lost", "wrong") if in_all[kind]]
    leaks = {row["at_rest"]: row["leaked"] for row in document["at_rest"]}
    faults += [f"{leaked} {name} leaked" for name, leaked in leaks.items() if leaked]
    faults += ["no /health after the load"] if None in leaks.values() else []
    for row in document["latency"]:
        if row["answered"] == "GET /health" and row["p99_ms"] > MAX_HEALTH_P99_MS:
            faults.append(f"p99 of /health missed: {row['p99_ms']} > {MAX_HEALTH_P99_MS:g} ms")
    server = document["server"][0]
    if document["rerun"][0]["sent_again"] < document["rerun"][0]["kept"]:
        faults.append("not all of the sample could be sent again")
    if server["exit_code"] != 0:
        faults.append(f"exit code {server['exit_code']} after SIGTERM")
    return faults + (["a traceback in the log"] if server["tracebacks"] else [])


def soak(given: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Start, warm up, load, rest, send the sample again, stop; what there is to report."""
    tally = Tally(given.sample, given.seed)
    with Server(given.server_arguments, log) as server:
        health = server.wait_until_ready()
        if not health["bitwise_lossless"]:
            raise RuntimeError("this server's texts may differ by rounding, so none is wrong")
        start = server.sample(health)
        clients = [
            Client(
                server.port, given.timeout, tally, random.Random(f"{given.seed} {i}"),
                health["drafters"],
            )
            for i in range(given.clients)
        ]  # fmt: skip
        load(server, clients, tally, given.warm_up, "warm-up")
        if (warm := server.rest(given.timeout)) is None:
            raise RuntimeError("no /health after the warm-up")
        loaded = load(server, clients, tally, given.minutes * 60, "load")
        times_ms = {path: list(times) for path, times in tally.times_ms.items()}
        end = server.rest(given.timeout, warm)
        rerun = send_again(clients[0], list(tally.sample))
        exit_code = server.stop()
    speed = {"load_s": loaded.duration_s, "tokens": loaded.num_tokens}
    speed["tokens_per_s"] = places(loaded.num_tokens / loaded.duration_s, 1)
    return {
        "requests": tally.rows(),
        "throughput": [speed],
        "latency": latency_rows(times_ms),
        "memory": [memory_row(start, warm, end, loaded.samples)],
        "at_rest": rest_rows(warm, end),
        "rerun": [rerun],
        "server": [{"exit_code": exit_code, "tracebacks": log.read_bytes().count(b"Traceback")}],
        "rss_mib": [round(sample.rss_mib) for sample in loaded.samples],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=20.0, help="(default: %(default)s)")
    options.add_argument(
        "--warm-up", type=seconds, default=15.0, help="seconds before that (default: %(default)s)"
    )
    options.add_argument(
        "--clients", type=between(1, 500), default=24, help="(default: %(default)s)"
    )
    options.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options.add_argument(
        "--sample",
        type=between(1, 10**6),
        default=300,
        help="answers to compare in the end (default: %(default)s)",
    )
    options.add_argument(
        "--timeout",
        type=seconds,
        default=120.0,
        help="seconds after which an answer is lost (default: %(default)s)",
    )
    options.add_argument("--json", action="store_true", help="only the JSON line")
    options.add_argument(
        "--record", type=Path, nargs="?", const=RESULT, metavar="FILE",
        help="keep the JSON line (default: benchmarks/results/soak.json)",
    )  # fmt: skip
    options.add_argument(
        "--server-arguments", type=shlex.split, default=[], metavar="'--name value …'",
        help="more of the server's own command line",
    )  # fmt: skip
    given = options.parse_args(arguments)
    if not Path("/proc/self/status").exists():
        options.error("this needs /proc, which Linux has")
    if not 0 < given.minutes <= 7 * 24 * 60:
        options.error("--minutes must be more than 0 and at most a week's")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run the command line: tables, the faults, then one JSON line. Returns 1 for any fault."""
    given = parse(arguments)
    with NamedTemporaryFile(prefix="soak-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    tqdm.write(f"the server's log, kept if there are faults: {log}", file=sys.stderr)
    try:
        found = soak(given, log)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    document = describe(__spec__.name, arguments)
    document |= {"minutes": given.minutes, "clients": given.clients, "seed": given.seed} | found
    document["faults"] = find_faults(document)
    if not given.json:
        for key in TABLES:
            print_table(document[key])
            print()
        print("faults: " + ("; ".join(document["faults"]) or "none"))
    line = json.dumps(document)
    print(line)
    if given.record:
        given.record.write_text(line + "\n", "utf-8")
    if not document["faults"]:
        log.unlink()
    return int(bool(document["faults"]))


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM):  # the server must not outlive this process
        signal.signal(name, signal.default_int_handler)
    sys.exit(main())
