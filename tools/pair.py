"""The pair that people start with: is our server faster than llama-server on the same two files?

Both servers read the same GGUF files, a target and a draft of its family, and get the same chats in
turn over HTTP, as streams, `--clients` at once. llama-server runs once for each configuration:
plain, with the draft model, with n-grams; a drafter is a field of a request to ours. `of_plain` is
a speed in that of llama-server's plain decoding, and `of_best` in that of its fastest configuration
for that kind of prompts, as medians of runs. Speeds are those of decoding: tokens after the first
one, over the time after the first one. `worst_of_none` is the lowest speed for one prompt, in that
of our plain decoding. `prompt_tokens_per_s` is how fast a long prompt is read. `equal` says whether
all texts are those of our plain decoding.

    python -m tools.pair --llama PATH/llama-server --target T.gguf [--draft D.gguf]
        [--each 2] [--tokens 96] [--k 4] [--runs 3] [--clients 1] [--json]

The memory's speed is measured before and after: on two cores it decides much. `memory_mb` is the
most that a process had at once, with what it maps of files. The last table has our server's without
that. `of_files` divides it by the size of the files, without what Python with torch has.
"""

import os
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any, NamedTuple

import torch

import tools as bench
from tools.servers import HOST, Server, at_once, memory_gb_per_s, our_command, started

ROUTE = "/v1/chat/completions"
DRAFTERS = "none", "draft_model", "ngram", bench.AUTO
PLAIN = "llama-server, plain"
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
EDITS = [f"{edit}\n\n```python\n{DATA['code']}```" for edit in DATA["edits"]]
_CODE, _TALK, _SUMMARY = ([*bench.CHATS[kind].values()] for kind in ("code", "talk", "summary"))
KINDS = {"code": _CODE, "chat": _TALK, "edit": EDITS}
_LONG = "\n\n".join((*_SUMMARY, DATA["code"])) * 2 + "\n\nWhat is all this about?"


class Written(NamedTuple):
    """An answer, and when it came."""

    text: str
    num_read: int  # tokens of the prompt
    num_tokens: int
    first_ms: float
    ms: float


def write(server: Server, fields: dict[str, Any], prompts: list[str], count: int) -> list[Written]:
    """Up to `count` greedy tokens of chats that come in the same moment, as streams."""
    common = {"max_tokens": count, "temperature": 0, "stream": True} | fields
    common |= {"stream_options": {"include_usage": True}}
    chats = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    found = []
    for told in at_once(server.port, ROUTE, [chat | common for chat in chats])[1]:
        parts = [
            (at_ms, text)
            for at_ms, event in zip(*told, strict=True)
            for choice in event["choices"]
            for name in ("reasoning_content", "content")
            if (text := choice["delta"].get(name))
        ]
        if not parts:
            raise SystemExit("error: an answer has no text, so nothing can be timed")
        usage = next(e["usage"] for e in reversed(told.events) if e.get("usage"))
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        text = "".join(part for _, part in parts)
        found.append(Written(text, *counts, parts[0][0], told.at_ms[-1]))
    return found


def commands(flags: Any) -> dict[str, list[str]]:
    """How each server is started."""
    size = max(4096, 2048 * flags.clients)  # llama-server's clients share it
    options = f"--host {HOST} --ctx-size {size} --parallel {flags.clients} --cache-ram 0"
    options += f" --threads {torch.get_num_threads()}"
    llama = [flags.llama, "--model", flags.target, *options.split()]
    n_gram = "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5"
    found = {PLAIN: llama, "llama-server, n-gram": llama + n_gram.split()}
    options = {"max_model_len": 4096, "max_running": max(4, flags.clients)}
    if flags.draft:
        drafting = ["--spec-type", "draft-simple", "--spec-draft-model", flags.draft]
        drafting += ["--spec-draft-n-max", str(flags.k)]
        found["llama-server, draft model"] = llama + drafting
    return found | {"ours": our_command(model=flags.target, draft_model=flags.draft, **options)}


def measure(flags: Any) -> dict[str, Any]:
    """Rows of speeds by kind of prompts, and of starts."""
    speeds, starts, peers, before = [], [], {}, memory_gb_per_s()
    with ExitStack() as stack:
        for name, command in commands(flags).items():
            with started(command):  # so that all find their files in the page cache
                pass
            peers[name] = stack.enter_context(started(command))
        ours = peers["ours"]
        methods = {n: (own, {"cache_prompt": False}) for n, own in peers.items() if own != ours}
        for drafter in DRAFTERS:
            if flags.draft or drafter != "draft_model":
                limit = {"num_speculative_tokens": flags.k} if drafter == "draft_model" else {}
                methods[f"ours, {drafter}"] = ours, {"drafter": drafter} | limit
        for kind, prompts in KINDS.items():
            size = flags.clients
            texts = [*islice(cycle(prompts), max(min(flags.each, len(prompts)), size))]
            calls = {
                (method, begin): partial(write, *asked, texts[begin:][:size], flags.tokens)
                for begin in range(0, len(texts), size)
                for method, asked in methods.items()
            }
            speeds += rows_of(kind, bench.interleave(calls, flags.runs, kind))
        asked = {PLAIN: methods[PLAIN], "ours": methods["ours, none"]}
        calls = {name: partial(write, *each, [_LONG], 1) for name, each in asked.items()}
        timed = bench.interleave(calls, flags.runs, "a long prompt")
        read = {
            name: round(median(one.num_read / one.ms * 1e3 for (one,) in calls.results), 1)
            for name, calls in timed.items()
        }
        for name, own in peers.items():
            row = {"who": name, "ready_s": round(own.ready_s, 2)}
            row["memory_mb"] = int(own.status()["VmHWM"][0]) * 1024 // 10**6  # the most at once
            starts.append(row | {"prompt_tokens_per_s": read.get(name)})
        found = {"speeds": speeds, "starts": starts, "memory": [own_memory(ours, flags)]}
    return {"memory_gb_per_s": [before, memory_gb_per_s()]} | found


def own_memory(ours: Server, flags: Any) -> dict[str, float]:
    """What our idle server has in memory: in MiB, and without Python's share in the files' size."""
    code = "import torch, transformers, time; print(flush=True); time.sleep(60)"
    with (python := Server([sys.executable, "-c", code], subprocess.PIPE)).process as process:
        process.stdout.readline()  # it has imported them
        base = python.own_mib()
        python.stop()
    size = sum(os.path.getsize(file) for file in (flags.target, flags.draft) if file) / 2**20
    now, most = ours.own_mib(), ours.own_mib("VmHWM")
    row = {"files_mib": size, "python_mib": base, "own_mib": now, "most_own_mib": most}
    row |= {"of_files": (now - base) / size, "most_of_files": (most - base) / size}
    return {name: round(each, 2) for name, each in row.items()}


def rows_of(kind: str, timed: dict[Any, bench.Calls]) -> list[dict[str, Any]]:
    """The figures of each method over all prompts of a kind."""
    found = {method: [sum(run, []) for run in bench.by_run(timed, method)] for method, *_ in timed}
    taken = {  # [runs, prompts, milliseconds and tokens after the first one]
        method: torch.tensor([[(o.ms - o.first_ms, o.num_tokens - 1) for o in run] for run in runs])
        for method, runs in found.items()
    }
    times = {method: torch.div(*each.sum(1).T).tolist() for method, each in taken.items()}
    theirs = {method: own for method, own in times.items() if method.startswith("llama")}
    best = min(theirs.values(), key=median)
    gains = {m: (taken["ours, none"] / own)[..., 0].quantile(0.5, 0) for m, own in taken.items()}
    texts = {m: [[one.text for one in run] for run in runs] for m, runs in found.items()}
    return [
        {
            "kind": kind, "who": method, "tokens_per_s": round(1e3 / median(own), 1),
            "of_plain": bench.speedup(times[PLAIN], own).median,
            "of_best": bench.speedup(best, own).median,
            "worst_of_none": None if method in theirs else round(gains[method].min().item(), 3),
            "first_ms": round(median(one.first_ms for run in found[method] for one in run)),
            "equal": None if method in theirs else texts[method] == texts["ours, none"],
        }
        for method, own in times.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, 3)
    options.add_argument("--llama", required=True, help="the program llama-server")
    options.add_argument("--target", required=True, help="a GGUF file of a chat model")
    options.add_argument("--draft", help="another, for draft_model on both sides")
    bench.add_count(options, "--clients", 1, 16, 1, "that ask in the same moment")
    bench.add_count(options, "--each", 1, 8, 2, "prompts of a kind")
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    bench.add_count(options, "--k", 1, 16, 4, "tokens that the draft model proposes")
    flags = options.parse_args(arguments)
    for path in filter(None, (which(flags.llama) or flags.llama, flags.target, flags.draft)):
        if not Path(path).is_file():
            options.error(f"there is no file {path}")
    if not Path("/proc").exists():
        options.error("memory is read from /proc, which Linux has alone")
    bench.report(__spec__.name, arguments, flags, measure(flags))


if __name__ == "__main__":
    main()
