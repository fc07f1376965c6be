"""What may be deleted: without a plug the rest writes the same texts, and says what is missing.

    copy of the tree, less a plug ── --demo, POST /generate, GET /health ── the whole tree's texts

A plug is fetched at one place, by `plug` of runtime/__init__.py or by drafters/__init__.py. Without
all plugs the files of minimal.txt are left. They get along without a compiler, and with torch,
transformers, flask and numpy alone.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from started import LIMIT_S, ROOT, SCRIPT, Client, free_port, heeding_interrupts, until

from server import formats, masks, parsing, trace

PROMPT = "tick, tock, tick, tock, tick,"
_ACTS = """import io, json, os, sys, threading
from contextlib import redirect_stdout
from runtime.models import startup
from server import core, demo, options
from server.service import Service
from server.worker import Worker
few = "--demo --model embedded --drafter auto --max-tokens 8 --prompts easy --json".split()
flags, chosen = options.parse_arguments(few)
engine = core.load_engine(chosen)
with redirect_stdout(io.StringIO()):
    differs = demo.show_demo(engine, chosen, flags)
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
    "compare": True, "json_schema": True, "prediction": "a",
}
refused = {}
for name, value in asked.items():
    answer = client.post("/generate", json={"prompt": "a b", "max_tokens": 2, name: value})
    if answer.status_code != 200:
        refused[name] = answer.status_code, answer.get_json()["error"]["message"]
routes = sorted(rule.rule for rule in client.application.url_map.iter_rules())
status = client.get("/health").get_json()["status"]
told = {"answers": answers, "routes": routes, "status": status, "refused": refused}
told["differs"] = differs
print(json.dumps(told), flush=True)
os._exit(0)  # as the server does: torch's threads do not end in order
"""


class Plug(NamedTuple):
    """Files that are deleted together; routes (how they begin) and fields that go with them."""

    paths: tuple[str, ...]
    routes: str = ""
    fields: str = ""


def in_room(room, *patterns):
    """The files of a room with such names."""
    found = [path for each in patterns for path in (ROOT / room).glob(each)]
    return tuple(str(path.relative_to(ROOT)) for path in found)


CHATS = "/v1/chat/ /v1/messages /v1/responses"
PLUGS = {
    "auto": Plug(("drafters/auto",)),
    "trees": Plug(("drafters/tree.py",)),
    "checks of drafts": Plug(("drafters/checks.py",)),
    "other tokenizers": Plug(("drafters/translated.py", "server/trial.py")),
    "drafters from files": Plug(in_room("drafters", "from_file.py", "timed.py", "small_model.py")),
    **{
        name: Plug((f"drafters/{name}.py",))
        for name in ("suffix", "corpus", "grammar", "eagle3", "dflash", "self_int8")
    },
    "prediction": Plug(("drafters/prediction.py", "server/prediction.py"), fields="prediction"),
    "kernels": Plug(("runtime/kernels", "runtime/folders.py"), "/curve"),
    "grammars": Plug(
        ("server/formats.py", "runtime/grammars", "runtime/models/child.py"),
        CHATS, "json_schema prediction",
    ),
    "trace": Plug(
        ("server/trace.py", "runtime/scoring.py"), fields="trace logprobs prompt_logprobs compare"
    ),
    "prefix cache": Plug(("runtime/cache/prefix.py",)),
    "recurrent layers": Plug(("runtime/cache/states.py",)),
    "GGUF": Plug(in_room("runtime/models", "gguf_*.py", "fim.py", "ahead.py", "pair.py")),
    "chats": Plug(
        in_room("runtime/models", "chat.py", "calls.py", "tools.py", "template.py"),
        CHATS + " /v1/completions", "prediction",
    ),
    "folder checks": Plug(in_room("runtime/models", "folder_checks.py", "tokenizer_bounds.py")),
    **{
        name: Plug((f"runtime/models/{name}.py",))
        for name in (
            "ahead", "pair", "fetch", "quick_import", "reference", "rope", "gpt_neo", "mimo",
        )
    },
    "page": Plug(("server/page",), "/page/ /prompts"),
    "dialects": Plug(
        ("server/dialects", "runtime/models/token_bytes.py"), "/v1/"
    ),
    "anthropic": Plug(("server/dialects/anthropic.py",), "/v1/messages"),
    "responses": Plug(("server/dialects/responses.py",), "/v1/responses"),
    "completions": Plug(("server/dialects/completions.py",), "/v1/completions"),
    "connection": Plug(in_room("server", "serving.py", "sockets.py", "connection.py", "log.py")),
    "comparison": Plug(("server/comparison.py",), fields="compare"),
    "curve": Plug(("server/curve.py", "server/measurement.py"), "/curve"),
    "generation": Plug(("server/generation.py",)),
    "masks": Plug(("server/masks.py",), fields="min_tokens bad_words"),
    "metrics": Plug(("server/metrics.py",), "/metrics"),
    "relay": Plug(("server/relay.py",)),
    "retry": Plug(("server/retry.py",)),
    "warming": Plug(("server/warming.py",)),
}  # fmt: skip
PROGRAM = {
    str(path.relative_to(ROOT))
    for room in ("runtime", "drafters", "server")
    for path in (ROOT / room).rglob("*.py")
}
ORDINARY = "auto", "dialects"  # the others are in the slow run
MINIMAL = (ROOT / "tests" / "minimal.txt").read_text().split()
# What the program uses beside the four packages, and beside what those need themselves.
_BLOCKED = """import sys

sys.modules |= dict.fromkeys(("llguidance", "prometheus_client", "gguf", "ziglang"))
"""


def run(folder, **environ):
    """What acts.py of a folder says on stdout, and on stderr, in a process of its own."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1"} | environ
    command = [sys.executable, "acts.py"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def copy_without(tmp_path_factory):
    """What copies the tree without a plug, or of all files only some."""

    def copy(paths=(), only=()):
        folder = tmp_path_factory.mktemp("tree")
        for path in only:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
        if not only:
            unread = shutil.ignore_patterns("__pycache__")
            for room in ("runtime", "drafters", "server"):
                shutil.copytree(ROOT / room, folder / room, ignore=unread)
            shutil.copy(ROOT / SCRIPT, folder)
        for kept in ("demo_models", "demo_prompts"):
            (folder / kept).symlink_to(ROOT / kept)
        for path in paths:
            gone = folder / path
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
        (folder / "acts.py").write_text(_ACTS)
        return folder

    return copy


@pytest.fixture(scope="module")
def whole(copy_without):
    """What the whole tree answers."""
    answered, said = run(copy_without())
    assert "going on without" not in said
    return answered


def assert_the_rest_works(folder, whole, *plugs, **environ):
    answered, _ = run(folder, **environ)
    assert answered["refused"].keys() == {field for plug in plugs for field in plug.fields.split()}
    for name, (code, message) in answered["refused"].items():
        assert code == 400
        needed = re.fullmatch(rf"{name} needs (\S+), which is not here", message)[1]
        assert (ROOT / needed).exists() and not (folder / needed).exists()
    assert answered["answers"] == whole["answers"] and answered["status"] == "ok"
    gone = tuple(route for plug in plugs for route in plug.routes.split())
    rest = {route for route in whole["routes"] if not route.startswith(gone)}
    assert {*answered["routes"], "/"} == rest | {"/"}  # the page has that, too
    assert answered["differs"] == 0, "a text of the demo"


@pytest.mark.parametrize(
    "name", [n if n in ORDINARY else pytest.param(n, marks=pytest.mark.slow) for n in PLUGS]
)
def test_without_a_plug_the_rest_writes_the_same(copy_without, whole, name):
    assert_the_rest_works(copy_without(PLUGS[name].paths), whole, PLUGS[name])


@pytest.fixture(scope="module")
def minimal(copy_without, tmp_path_factory):
    """The minimal server's folder, and an environment without compilers and further packages."""
    blocking = tmp_path_factory.mktemp("packages")
    (blocking / "sitecustomize.py").write_text(_BLOCKED)
    return copy_without(only=MINIMAL), {"PYTHONPATH": str(blocking), "PATH": "", "CC": ""}


def test_the_minimal_server_writes_the_same(minimal, whole):
    folder, environ = minimal
    assert_the_rest_works(folder, whole, *PLUGS.values(), **environ)


def test_the_minimal_server_answers_over_http(minimal, whole):
    """Flask's own server has it, until Ctrl-C."""
    folder, environ = minimal
    client = Client(free_port())
    command = [sys.executable, SCRIPT, "--port", str(client.port), "--model", "embedded"]
    options = {"cwd": folder, "env": os.environ | environ, "preexec_fn": heeding_interrupts}
    with subprocess.Popen(command, **options) as process:
        try:
            until(lambda: client.is_ready() or process.poll() is not None)
            for drafter in ("none", "ngram", "mtp"):
                fields = {"prompt": PROMPT, "max_tokens": 24, "drafter": drafter}
                texts = client.generate(**fields)[1]["text"], client.stream(**fields)[-1]["text"]
                assert texts == (whole["answers"][drafter][0],) * 2
            assert client.generate(prompt=PROMPT, unheard_of=1)[0] == 400
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


def test_fields_of_a_plug_are_known_where_it_is_missing():
    known = {module: {*names} for module, names in parsing._PLUGGED.items()}
    assert known["server.masks"] == {*masks.CHECKS}
    assert known["server.trace"] == {*trace.CHECKS, "compare"}
    assert known["server.formats"] == {*formats.FIELDS}


def test_what_lacks_a_plug_says_which():
    """`plug` takes ModuleNotFoundError for it. `from package import module` raises another one."""
    for path in PROGRAM:
        folder, asked = (ROOT / path).parent, set()
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                package = (folder / ("../" * (node.level - 1))).resolve() if node.level else ROOT
                package = package.joinpath(*(node.module or "").split("."))
                asked |= {str((package / each.name).relative_to(ROOT)) for each in node.names}
        for plug in PLUGS.values():
            if not path.startswith(plug.paths):
                gone = {each.removesuffix(".py") for each in plug.paths}
                assert not asked & gone - {"runtime/kernels"}, path  # runtime/__init__.py has that


def test_each_file_is_of_the_minimal_server_or_of_a_plug_and_the_docs_count_it():
    plugged = [path for plug in PLUGS.values() for path in plug.paths]
    rest = {path for path in PROGRAM if not path.startswith(tuple(plugged))}
    assert rest == {*MINIMAL} - {SCRIPT}
    told = {}
    table = (ROOT / "docs" / "inside.md").read_text("utf-8").split("```")[1]
    for count, room, names in re.findall(r"^ *([\d,]+)  (\S+/) ((?:\S+ )+) ", table, re.M):
        paths = [Path(os.path.normpath(ROOT / room / name)) for name in names.split()]
        found = (p.rglob("*.*") if p.is_dir() else p.parent.glob(f"{p.name}.py") for p in paths)
        files = [file for each in found for file in each]
        told |= dict.fromkeys(str(f.relative_to(ROOT)) for f in files)
        code = [f for f in files if f.suffix in (".py", ".c", ".h", ".js", ".css", ".html")]
        lines = sum(f.read_text("utf-8").count("\n") for f in code)
        assert abs(lines - int(count.replace(",", ""))) <= max(20, lines / 10), (room, names, lines)
    assert not PROGRAM - {*told} - {*MINIMAL}
