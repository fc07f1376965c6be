"""--export DIR: the page as files that any file server can show, with recorded answers.

    python 08_speculative_decoding.py --export site && python -m http.server -d site

    load ──→ the application, asked as clients ask it ──→ recordings/NAME.json ─┐
    index.html, scripts, styles ────────────────────────────────────────────────┴──→ DIR

A recording holds /health, /curve, three prompts, and a run of each by each drafter, beside plain
decoding. `auto` writes each text twice, and the second run is kept, as a server that has run for a
while knows its texts. DIR changes only once all is recorded. An earlier export keeps its other
recordings.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flask import Flask
from flask.testing import FlaskClient
from tqdm import tqdm

from runtime.models.catalogue import FALLBACK, with_model
from server.curve import cpu_name
from server.options import Options
from server.parsing import model_id

from . import FOLDER, INDEX, files, index

Json = dict[str, Any]

# By role: `first` begins with what is easy to guess, `copy` repeats what it was given, and `new`
# surprises. For chat templates, and the demo prompts for other models.
CHAT = {
    "first": "What is the best way to make a friend?",
    "copy": "Copy this text exactly, word for word:\n\n"
    "The first railways carried coal from mines to rivers, and horses pulled the wagons. When "
    "steam engines became light enough to stand on wheels they took the place of the horses, and "
    "soon lines were built between cities.",
    "new": "Write a story about a robot that learns to paint.",
}
TEXT = {"first": "easy_facts", "copy": "repetitive_colours", "new": "hard_story"}
_GREEDY = {
    "num_speculative_tokens": 5, "temperature": 0, "verification": "coupled", "seed": 7,
    "max_tokens": 48,
}  # fmt: skip
_SAMPLED = [_GREEDY | {"temperature": 0.8, "verification": v} for v in ("coupled", "rejection")]
_AUTO, _LEAST_MS = "auto", 1.0  # of a pass: in shorter ones the clock tells the controller little
_NO_GUESSERS = {_AUTO, "tree", "prediction", "grammar"}  # they choose, or need more of a request
_LOOK_UP = {"ngram", "suffix"}  # without chances of their own
_MARK = "data-exported"  # in index.html: what this command wrote, it may write again
_MOST = 8  # entries of a distribution
_CURVE_S, _DRAIN_S = 120.0, 10.0  # at most: to measure a curve, and to end what runs


def write(folder: str, load: Callable[[Options], Flask], options: Options) -> int:
    """Record the application that `load` makes of the options, and write it into a folder.

    Returns the exit status. Raises OSError for a folder that cannot be had, before anything is
    loaded, and ValueError where nothing could be recorded.
    """
    with _room_in(Path(folder)) as room:
        options = replace(with_model(options), api_key=None)  # nobody else can ask
        name = FALLBACK if options.is_embedded else model_id(options.title)
        app, count = load(options), torch.get_num_threads()
        machine = f"{cpu_name()}, {count} thread{'s' * (count > 1)}"
        day = datetime.now(UTC).date().isoformat()
        recording = {"model": name, "recorded_at": day, "machine": machine}
        try:
            recording |= _record(app)
        finally:
            app.extensions["worker"].drain(_DRAIN_S)
        text = json.dumps(recording, ensure_ascii=False, separators=(",", ":")) + "\n"
        path = f"recordings/{re.sub('[^a-z0-9_.-]+', '-', name.lower())}.json"
        names = (n for n in files() if n != INDEX and not n.startswith("recordings/"))
        contents = {n: (FOLDER / n).read_bytes() for n in names} | {path: text.encode()}
        contents[INDEX] = index(_MARK, path).encode()
        for part, data in contents.items():
            (room / part).parent.mkdir(parents=True, exist_ok=True)
            (room / part).write_bytes(data)
        for part in contents:  # all of it is on the disk
            (room.parent / part).parent.mkdir(parents=True, exist_ok=True)
            (room / part).replace(room.parent / part)
    count = len(recording["runs"])
    print(f"{count} runs of {name}; next: python -m http.server -d {shlex.quote(folder)}")
    return 0


@contextmanager
def _room_in(folder: Path) -> Iterator[Path]:
    """A folder for what is not complete, inside one that is new, empty or an export, or OSError."""
    is_new, page = not folder.exists(), folder / INDEX
    with ExitStack() as at_end:
        try:
            if is_new:
                folder.mkdir()
                at_end.callback(lambda: any(folder.iterdir()) or folder.rmdir())
            is_known = page.is_file() and _MARK in page.read_text("utf-8", "replace")
            if not is_known and any(folder.iterdir()):
                raise OSError(0, "it is neither empty nor an earlier export")
            room = at_end.enter_context(TemporaryDirectory(dir=folder, prefix=".part-"))
        except OSError as error:
            raise OSError(f"cannot export into {folder}: {error.strerror}") from error
        yield Path(room)


def _record(app: Flask) -> Json:
    """What the application's routes answer: health, curve, prompts and runs."""
    client, runs, end = app.test_client(), list[Json](), time.monotonic() + _CURVE_S
    while not app.extensions["worker"].measurement.is_done and time.monotonic() < end:
        time.sleep(0.1)  # the curve is measured while nobody asks for anything
    curve, health = client.get("/curve").json, client.get("/health").json
    demo, texts, more = client.get("/prompts").json["prompts"], CHAT, {"chat": True}
    if not health["chat_template"]:
        texts, more = {role: demo[name] for role, name in TEXT.items()}, {}
    names = [name for name in health["drafters"] if name not in _NO_GUESSERS] or ["none"]
    plan = [(role, {"drafter": name} | _GREEDY) for role in texts for name in names]
    is_slow = curve["pass_ms"].get("1", 0.0) >= _LEAST_MS
    if health["controller"] and is_slow and len(names) > 1:
        plan += [(role, {"drafter": _AUTO} | _GREEDY) for role in (*texts, *texts)]
    plan += [("new", how) for how in _SAMPLED]
    for role, how in tqdm(plan, desc="recording"):
        request = {"drafter": _best_guesser(runs)} | how | more
        try:
            events = _run(client, {"prompt": texts[role]} | request)
            runs = [run for run in runs if (run["prompt"], run["request"]) != (role, request)]
            runs.append({"prompt": role, "request": request, "events": events})
        except ValueError as error:
            tqdm.write(f"not recorded: {request['drafter']} on {role}: {error}", sys.stderr)
    if not runs:
        raise ValueError("no run could be recorded, so nothing is exported")
    health = client.get("/health").json  # by now it knows what each drafter costs
    return {"health": health, "curve": curve, "prompts": texts, "runs": runs}


def _best_guesser(runs: list[Json]) -> str:
    """Whose sampled runs are shown: draft_model's, or those of the model that saves most passes."""

    def worth(run: Json) -> tuple[bool, bool, float]:
        name, told = run["request"]["drafter"], run["events"][-1]["metrics"]["speculative_decoding"]
        is_model = name not in _LOOK_UP and bool(told["num_accepted_draft_tokens"])
        return is_model and name == "draft_model", is_model, told["tokens_per_pass"] or 0.0

    runs = [run for run in runs if run["request"]["drafter"] != _AUTO]
    return max(runs, key=worth)["request"]["drafter"] if runs else "none"


def _run(client: FlaskClient, request: Json) -> list[Json]:
    """What POST /generate streams of a run beside plain decoding. Raises ValueError if it fails."""
    more = {"stream": True, "trace": True, "compare": True, "fixed_k": request["drafter"] != _AUTO}
    with client.post("/generate", json=request | more) as answer:
        text = answer.get_data(as_text=True)
    parts = re.findall("^(?:data: )?({.*})$", text, re.MULTILINE)  # a refusal is no event
    events = [
        json.loads(part, parse_float=lambda number: float(f"{float(number):.4g}")) for part in parts
    ]
    if error := events[-1].get("error"):
        raise ValueError(error["message"])
    return list(map(_shown, events))


def _shown(event: Json) -> Json:
    """An event without what the page does not show."""
    if "plain" in event:
        plain = event["plain"]
        return {"plain": {name: plain[name] for name in ("step", "tokens", "text", "ms")}}
    if "step" not in event:  # the answer, whose trace are the events before it
        return {name: value for name, value in event.items() if name != "trace"}
    places = range(len(event["distributions"]))
    return event | {"distributions": [_likeliest(event, i) for i in places]}


def _likeliest(event: Json, i: int) -> list[Json]:
    """Of the distribution at place i: the chosen and the drafted token, and the likeliest."""
    place = event["distributions"][i]
    judged = {event["tokens"][i]["id"], *event["proposals"][i : i + 1]}
    order = {id(e): (e["id"] not in judged, -max(e["p"], e.get("q", 0))) for e in place}
    best = sorted(order, key=order.get)[:_MOST]
    return [entry for entry in place if id(entry) in best]
