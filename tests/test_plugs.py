"""What may be deleted: without a plug the rest writes the same texts, and says what is missing.

    copy of the tree, less a plug ── --demo, POST /generate, GET /health ── the whole tree's texts

A plug is fetched at one place, by `plug` of runtime/__init__.py or by drafters/__init__.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from started import GOOD, LIMIT_S, SCRIPT, Client, free_port, heeding_interrupts, until

from server import formats, masks, parsing, trace

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("runtime", "drafters", "server", "demo_prompts")
_ACTS = """import json, os, sys
from runtime.models import startup
from server import core, options
from server.service import Service
from server.worker import Worker
import threading
_, chosen = options.parse_arguments(["--port", "1", "--model", "embedded", "--drafter", "auto"])
engine = core.load_engine(chosen)
worker = Worker(engine, chosen)
threading.Thread(target=worker.run, daemon=True).start()
client = core.create_app(Service(engine, chosen, worker)).test_client()
answers = {}
for drafter in ("none", "ngram", "mtp", "auto"):
    body = {"prompt": "tick, tock, tick, tock, tick,", "max_tokens": 24, "drafter": drafter}
    whole = client.post("/generate", json=body).get_json()
    events = client.post("/generate", json=body | {"stream": True}).get_data(as_text=True)
    answers[drafter] = whole["text"], json.loads(events.split("data: ")[-2])["text"]
asked = {
    "trace": True, "logprobs": 1, "prompt_logprobs": 1, "min_tokens": 1, "bad_words": ["a"],
    "compare": True, "json_schema": True,
}
refused = {}
for name, value in asked.items():
    answer = client.post("/generate", json={"prompt": "a b", "max_tokens": 2, name: value})
    if answer.status_code != 200:
        refused[name] = answer.status_code, answer.get_json()["error"]["message"]
routes = sorted(rule.rule for rule in client.application.url_map.iter_rules())
status = client.get("/health").get_json()["status"]
told = {"answers": answers, "routes": routes, "status": status, "refused": refused}
print(json.dumps(told), flush=True)
os._exit(0)  # as the server does: torch's threads do not end in order
"""


class Plug(NamedTuple):
    """Files that are deleted together, and the route and fields of requests that go with them."""

    paths: tuple[str, ...]
    route: str = ""
    fields: str = ""


PLUGS = {
    "auto": Plug(("drafters/auto",)),
    "retry": Plug(("server/retry.py",)),
    "page": Plug(("server/page",), "/page/"),
    "dialects": Plug(("server/dialects",), "/v1/chat/completions"),
    "metrics": Plug(("server/metrics.py",), "/metrics"),
    "curve": Plug(("server/curve.py", "server/measurement.py"), "/curve"),
    "comparison": Plug(("server/comparison.py",), fields="compare"),
    "connection": Plug(("server/serving.py", "server/connection.py", "server/log.py")),
    "grammars": Plug(
        ("server/formats.py", "runtime/grammars"), "/v1/chat/completions", "json_schema"
    ),
    "masks": Plug(("server/masks.py",), fields="min_tokens bad_words"),
    "trace": Plug(("server/trace.py",), fields="trace logprobs prompt_logprobs compare"),
    "generation": Plug(("server/generation.py",)),
    "relay": Plug(("server/relay.py",)),
    "prefix cache": Plug(("runtime/cache/prefix.py",)),
    "anthropic": Plug(("server/dialects/anthropic.py",), "/v1/messages"),
    "responses": Plug(("server/dialects/responses.py",), "/v1/responses"),
    "completions": Plug(("server/dialects/completions.py",), "/v1/completions"),
    **{
        name: Plug((f"drafters/{name}.py",))
        for name in ("suffix", "grammar", "eagle3", "dflash", "self_int8", "prediction")
    },
}
ALL = Plug(tuple(path for plug in PLUGS.values() for path in plug.paths))
ORDINARY = "auto", "dialects", "page"  # the others are in the slow run


def run(folder, *arguments):
    """A process of the tree in a folder."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def copy_without(tmp_path_factory):
    def copy(plug):
        folder = tmp_path_factory.mktemp("tree")
        shutil.copy(ROOT / "08_speculative_decoding.py", folder)
        for room in ROOMS:
            unread = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / room, folder / room, ignore=unread)
        (folder / "demo_models").symlink_to(ROOT / "demo_models")
        for path in plug.paths:
            gone = folder / path
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
        (folder / "acts.py").write_text(_ACTS)
        return folder

    return copy


@pytest.fixture(scope="module")
def whole(copy_without):
    """What the whole tree answers."""
    return json.loads(run(copy_without(Plug(())), "acts.py"))


def assert_the_rest_works(folder, whole, *plugs):
    routes = [plug.route for plug in plugs if plug.route]
    answered = json.loads(run(folder, "acts.py"))
    assert answered["refused"].keys() == {field for plug in plugs for field in plug.fields.split()}
    for name, (code, message) in answered["refused"].items():
        assert code == 400 and message.startswith(f"{name} needs server/")
    assert answered["answers"] == whole["answers"] and answered["status"] == "ok"
    assert not {*routes} & {*answered["routes"]} and {*routes} <= {*whole["routes"]}
    few = ("--demo", "--model", "embedded", "--max-tokens", "8", "--prompts", "easy", "--json")
    demo = json.loads(run(folder, "08_speculative_decoding.py", *few))
    assert all(figures["identical"] for figures in demo["totals"].values())


@pytest.mark.parametrize(
    "name", [n if n in ORDINARY else pytest.param(n, marks=pytest.mark.slow) for n in PLUGS]
)
def test_without_a_plug_the_rest_writes_the_same(copy_without, whole, name):
    assert_the_rest_works(copy_without(PLUGS[name]), whole, PLUGS[name])


def test_without_all_plugs_the_rest_writes_the_same(copy_without, whole):
    folder = copy_without(ALL)
    assert_the_rest_works(folder, whole, *PLUGS.values())
    assert_it_serves(folder)


def assert_it_serves(folder):
    """A request, a refusal and a stream on a socket, until Ctrl-C."""
    server = Client(free_port())
    command = [sys.executable, SCRIPT, "--port", str(server.port), "--model", "embedded"]
    with subprocess.Popen(command, cwd=folder, preexec_fn=heeding_interrupts) as process:
        try:
            until(lambda: server.is_ready() or process.poll() is not None)
            status, body = server.generate(**GOOD)
            assert status == 200 and body["usage"]["completion_tokens"] == GOOD["max_tokens"]
            assert server.stream(**GOOD)[-1]["text"] == body["text"]
            assert server.generate(**GOOD, unheard_of=1)[0] == 400
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


def test_fields_of_a_plug_are_known_where_it_is_missing():
    known = {file: {*names} for file, (_, names) in parsing._PLUGGED.items()}
    assert known["server/masks.py"] == {*masks.CHECKS}
    assert known["server/trace.py"] == {*trace.CHECKS}
    assert known["server/formats.py or runtime/grammars/"] == {*formats.FIELDS}
