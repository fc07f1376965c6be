"""Servers as processes, and the one way to talk to them, for `pair`, `served` and others."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

import tools as bench
from server.options import ROOT

HOST = "127.0.0.1"
START_S, CURVE_S, STOP_S, ANSWER_S = 300.0, 30.0, 60.0, 600.0
PAUSE_S = 0.1  # after which the idle threads of another server are asleep
OURS = [sys.executable, "08_speculative_decoding.py", "--host", HOST]


class Lost(RuntimeError):
    """No proper answer came."""


def our_command(**options: Any) -> list[str]:
    """The command that starts our server with these options. It forgets what it was asked."""
    return [*OURS, *bench.as_words(bench.FORGETFUL | options)]


@contextmanager
def answering(
    port: int, method: str, path: str, body: str | None = None, timeout_s: float = ANSWER_S
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request as it begins, on a connection of its own.

    Raises Lost for any other status than 200, and OSError.
    """
    with closing(http.client.HTTPConnection(HOST, port, timeout=timeout_s)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise Lost(f"status {response.status}, not 200: {response.read(500)!r}")
            yield response


class Told(NamedTuple):
    """What came of one request: the events of a stream, or the one answer; and when each came."""

    at_ms: tuple[float, ...]
    events: tuple[dict[str, Any], ...]


def ask(port: int, path: str, fields: dict[str, Any]) -> Told:
    """One request to its end.

    Raises what `answering` does, and Lost for an error, or if the stream does not end with [DONE].
    """
    began, last, told = time.perf_counter(), b"", list[tuple[float, dict[str, Any]]]()
    with answering(port, "POST", path, json.dumps(fields)) as response:
        for line in response:
            ms, last = (time.perf_counter() - began) * 1e3, line.strip() or last
            if ms > ANSWER_S * 1e3:
                raise TimeoutError("the answer did not end in time")
            if line.startswith((b"{", b"data: {")):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise Lost(f"a request was not done as asked: {event}")
                told.append((ms, event))
    if fields.get("stream") and last != b"data: [DONE]":
        raise Lost("the stream ended without [DONE]")
    return Told(*zip(*told, strict=True))


def at_once(port: int, path: str, bodies: list[dict[str, Any]]) -> tuple[float, list[Told]]:
    """All requests in the same moment: milliseconds until all are done, and what came of each."""
    time.sleep(PAUSE_S)
    with ThreadPoolExecutor(len(bodies)) as pool:
        began = time.perf_counter()
        told = list(pool.map(partial(ask, port, path), bodies))
        return (time.perf_counter() - began) * 1e3, told


class Server:
    """A server as a process, ours or another one that has GET /health."""

    ready_s: float  # how long its start took, where it was `started`

    def __init__(self, command: list[str], log: IO[bytes] | int = subprocess.DEVNULL) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip

    def health(self) -> dict[str, Any]:
        """GET /health. Raises what `answering` does."""
        with answering(self.port, "GET", "/health", timeout_s=10.0) as response:
            return json.load(response)

    def wait_for_health(self) -> dict[str, Any]:
        """The first /health with a 200. Raises RuntimeError if there is none."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                return self.health()
            except (OSError, http.client.HTTPException, Lost):
                time.sleep(0.05)
        raise RuntimeError(f"the server does not answer: {self.process.args}")

    def wait_for_curve(self) -> None:
        """Let it measure its cost curve, if it does: later its idle time is another one's turn."""
        until = time.monotonic() + CURVE_S
        with suppress(Lost):
            while time.monotonic() < until:
                with answering(self.port, "GET", "/curve") as response:
                    if json.load(response)["status"] == "measured":
                        return
                time.sleep(0.1)

    def status(self) -> dict[str, list[str]]:
        """What Linux says of the process, words by name."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text("utf-8").splitlines()
        return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}

    def own_mib(self, name: str = "VmRSS") -> float:
        """Its memory that is no file's, in MiB: now, or (VmHWM) the most since its start.

        In the most are pages of files that have been dropped by now.
        """
        status = self.status()
        return (int(status[name][0]) - int(status["RssFile"][0])) / 1024

    def stop(self) -> int | None:
        """SIGTERM, if it has not ended already, and the exit code; None if it does not end."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        return self.process.poll()


@contextmanager
def started(command: list[str]) -> Iterator[Server]:
    """A server that is ready and has nothing to do, for a while."""
    began, server = time.monotonic(), Server(command)
    try:
        server.wait_for_health()
        server.ready_s = time.monotonic() - began
        server.wait_for_curve()
        yield server
    finally:
        server.stop()


def memory_gb_per_s() -> float:
    """How fast all threads read memory together, the best of five."""
    numbers = torch.ones(1 << 27)
    calls = bench.interleave({"sum": numbers.sum}, 5, "memory")["sum"]
    return round(numbers.nbytes / min(calls.ms) / 1e6, 1)
