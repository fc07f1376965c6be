"""The pair that people start with: is our server faster than llama-server on the same two files?

Both servers read the same GGUF files, a target and a draft of its family, and get the same chats in
turn over HTTP, as streams, from one client. llama-server runs once for each of its configurations:
plain, with the draft model, with n-grams; a drafter is a field of a request to ours. `of_plain` is
a speed in that of llama-server's plain decoding, and `of_best` in that of its fastest configuration
for that kind of prompts, as medians of runs. Speeds are those of decoding: tokens after the first
one, over the time after the first one. `prompt_tokens_per_s` is how fast a long prompt is read.
`equal` says whether all texts are those of our plain decoding.

    python -m benchmarks.pair --llama PATH/llama-server --target T.gguf --draft D.gguf
        [--each 2] [--tokens 96] [--k 4] [--runs 3] [--kinds code chat edit] [--clients 1] [--json]

The memory's speed is measured before and after: on two cores it decides much. Memory is the most
that a process had at once, with what it maps of the files.
"""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import benchmarks as bench
from benchmarks.chat import PROMPTS
from benchmarks.served import FORGETFUL
from serving.options import ROOT, between

HOST, ROUTE = "127.0.0.1", "/v1/chat/completions"
READY_S, PAUSE_S = 300, 0.1  # after a pause the other server's threads are asleep
OURS = "none", "draft_model", "ngram", bench.AUTO
CODE = '''class Stack:
    """A pile of things."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def __len__(self):
        return len(self.items)
'''
EDITS = (
    f"Rename the method push to add, and write the whole file again:\n\n```python\n{CODE}```",
    f"Add type hints to every method, and write the whole file again:\n\n```python\n{CODE}```",
)
KINDS = {"code": PROMPTS["code"], "chat": PROMPTS["talk"], "edit": EDITS}
_LONG = "\n\n".join((*PROMPTS["summary"], CODE)) * 2 + "\n\nWhat is all this about?"


class Written(NamedTuple):
    """An answer, and when it came."""

    text: str
    num_read: int  # tokens of the prompt
    num_tokens: int
    first_ms: float
    ms: float

    @property
    def decoding_ms(self) -> float:
        return self.ms - self.first_ms


class Peer:
    """A server as a process, from its command to its end."""

    def __init__(self, command: list[str]) -> None:
        self.port = bench.free_port()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
        began = time.monotonic()
        self._process = subprocess.Popen([*command, "--port", str(self.port)], **quiet)
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > began + READY_S:
                self.close()
                raise RuntimeError(f"it does not start: {' '.join(command)}")
            time.sleep(0.05)
        self.ready_s = time.monotonic() - began

    def _is_ready(self) -> bool:
        try:
            with closing(http.client.HTTPConnection(HOST, self.port, timeout=10)) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    @property
    def most_memory_mb(self) -> int:
        """The most that it had at once."""
        status = Path(f"/proc/{self._process.pid}/status").read_text("utf-8")
        return next(int(x.split()[1]) for x in status.splitlines() if "VmHWM" in x) // 1000

    def write(self, prompt: str, count: int, fields: dict[str, Any]) -> Written:
        """Up to `count` greedy tokens. Raises RuntimeError for an error."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": count}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        with closing(http.client.HTTPConnection(HOST, self.port, timeout=600)) as connection:
            began, first, text, usage = time.perf_counter(), 0.0, "", {}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", ROUTE, json.dumps(body | fields), headers)
            for line in connection.getresponse():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"a request was not done as asked: {event['error']}")
                for choice in event.get("choices", ()):
                    if part := choice["delta"].get("content"):
                        first, text = first or time.perf_counter(), text + part
                usage = event.get("usage") or usage
            now = time.perf_counter()
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return Written(text, *counts, (first - began) * 1e3, (now - began) * 1e3)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def peer(command: list[str]) -> Iterator[Peer]:
    """A server for a while."""
    with closing(Peer(command)) as found:
        yield found


def memory_gb_per_s() -> float:
    """How fast all threads read memory together, the best of five."""
    numbers, best = torch.ones(1 << 27), 0.0
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began) / 1e9)
    return round(best, 1)


def commands(given: Any) -> dict[str, list[str]]:
    """How each server is started."""
    threads = str(torch.get_num_threads())
    llama = [given.llama, "--model", given.target, "--host", HOST, "--ctx-size", "4096"]
    llama += ["--threads", threads, "--parallel", str(given.clients), "--cache-ram", "0"]
    k = str(given.k)
    return {
        "llama-server, plain": llama,
        "llama-server, draft model": [
            *llama, "--spec-type", "draft-simple", "--spec-draft-model", given.draft,
            "--spec-draft-n-max", k,
        ],
        "llama-server, n-gram": [
            *llama, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3",
            "--spec-ngram-simple-size-m", "5",
        ],
        "ours": [
            sys.executable, "08_speculative_decoding.py", "--host", HOST, "--model", given.target,
            "--draft-model", given.draft, "--max-running", str(max(4, given.clients)),
            "--max-model-len", "4096", *FORGETFUL,
        ],
    }  # fmt: skip


def measure(given: Any) -> dict[str, Any]:
    """Rows of speeds by kind of prompts, and of starts."""
    speeds, starts, before = [], [], memory_gb_per_s()
    with ExitStack() as stack:
        peers = {}
        for name, command in commands(given).items():
            with peer(command):  # so that all find their files in the page cache
                pass
            peers[name] = stack.enter_context(peer(command))
        ways = {name: (own, {}) for name, own in peers.items() if name != "ours"}
        chosen = {"num_speculative_tokens": given.k}
        for drafter in OURS:
            fields = {"drafter": drafter} | (chosen if drafter == "draft_model" else {})
            ways[f"ours, {drafter}"] = peers["ours"], fields

        def write(way: str, texts: list[str], count: int = given.tokens) -> list[Written]:
            own, fields = ways[way]
            time.sleep(PAUSE_S)
            if way.startswith("llama"):
                fields = {"cache_prompt": False}
            with ThreadPoolExecutor(len(texts)) as pool:
                return list(pool.map(lambda text: own.write(text, count, fields), texts))

        for kind in given.kinds:
            texts = KINDS[kind][: max(given.each, given.clients)]
            begins = range(0, len(texts), given.clients)
            calls = {
                (way, begin): partial(write, way, texts[begin : begin + given.clients])
                for begin in begins
                for way in ways
            }
            speeds += rows_of(kind, bench.interleave(calls, given.runs, kind))
        names = "llama-server, plain", "ours, none"
        reads = {way: partial(write, way, [_LONG], 1) for way in names}
        read = {
            way: round(median(one.result[0].num_read / one.result[0].ms * 1e3 for one in timed), 1)
            for way, timed in bench.interleave(reads, given.runs, "a long prompt").items()
        }
        for name, own in peers.items():
            row = {"who": name, "ready_s": round(own.ready_s, 2), "memory_mb": own.most_memory_mb}
            way = "ours, none" if name == "ours" else name
            starts.append(row | {"prompt_tokens_per_s": read.get(way)})
    return {"memory_gb_per_s": [before, memory_gb_per_s()], "speeds": speeds, "starts": starts}


def rows_of(kind: str, timed: dict[Any, list[bench.Timed]]) -> list[dict[str, Any]]:
    """The figures of each way over all prompts of a kind."""
    found: dict[str, list[list[Written]]] = {}  # by way and run
    for (way, _), calls in timed.items():
        runs = found.setdefault(way, [[] for _ in calls])
        for run, call in zip(runs, calls, strict=True):
            run += call.result
    times = {}
    for way, runs in found.items():
        times[way] = [
            sum(one.decoding_ms for one in run) / sum(one.num_tokens - 1 for one in run)
            for run in runs
        ]
    theirs = {way: own for way, own in times.items() if way.startswith("llama")}
    best, plain = min(theirs.values(), key=median), times["llama-server, plain"]
    texts = {way: [one.text for one in runs[-1]] for way, runs in found.items()}
    return [
        {
            "kind": kind,
            "who": way,
            "tokens_per_s": round(1e3 / median(own), 1),
            "of_plain": bench.speedup(plain, own).median,
            "of_best": bench.speedup(best, own).median,
            "first_ms": round(median(one.first_ms for run in found[way] for one in run)),
            "equal": texts[way] == texts["ours, none"] if way not in theirs else None,
        }
        for way, own in times.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, 3)
    for name, text in {"llama": "the program", "target": "a GGUF file", "draft": "another"}.items():
        options.add_argument(f"--{name}", required=True, help=text)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--clients", type=between(1, 16), default=1)
    bench.add_count(options, "--each", 1, 8, 2, "prompts of a kind")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    bench.add_count(options, "--k", 1, 16, 4, "tokens that the draft model proposes")
    given = options.parse_args(arguments)
    bench.report(__spec__.name, arguments, given, measure(given), ["speeds", "starts"])


if __name__ == "__main__":
    main()
