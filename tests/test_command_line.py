"""One command continues a prompt, runs the demo or serves; a mistake is one line and exit 2.

Only a fault of the program has a traceback. Most of it is run in this process, on the engine that
other tests have, too. What the process itself does (its signals, pipes and sockets) is tested at
the end, and in test_operations.py.
"""

import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from conftest import ROOT, ScriptedDrafter
from started import SCRIPT, heeding_interrupts, naming_a_model, serving, until
from transformers import AutoModelForCausalLM

import server.demo as terminal
from runtime.models import loading, startup
from runtime.values import RequestError
from server import core
from server.http import check_head, url_of
from server.options import KEY_VARIABLE, Options, parse_arguments

load_engine = core.load_engine
SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01")
TOO_LITTLE_MEMORY = "error: too little memory, or too few threads: "
SHORT_DEMO = ("--demo", "--max-tokens", "4")


def test_a_prompt_is_continued_with_the_origin_of_its_tokens_up_to_its_end(main, monkeypatch):
    """Which is the limit, a stop string, or the token that ends a turn."""
    prompt = ("--prompt", "red, green, blue, red, green,")
    status, out, _ = main(*prompt, "--max-tokens", "20", "--drafter", "ngram")
    assert status == 0 and "red, green, blue, red, green,{ blue}[, red" in out
    figures = r"20 tokens \(the limit is reached\) · \d+ passes after the prompt's · \d\.\d\d tok"
    assert re.search(figures, out)
    _, out, _ = main("--prompt", "1, 2, 3, 4, 5,", "--stop", "9", "--stop", "zz")
    text, _, figures = out.rpartition("\n\n")
    assert "(the text has ended)" in figures and "8" in text and "9" not in text
    monkeypatch.setattr(core, "choose", lambda *_, **__: 0)
    status, out, _ = main("--prompt", "1, 2, 3,", "--max-tokens", "9")
    assert status == 0 and "1, 2, 3,<|endoftext|>\n\n1 tokens (the text has ended)" in out


def test_a_terminal_of_few_characters_shows_the_text_all_the_same(monkeypatch, main):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        status = core.main(naming_a_model(["--prompt", "1, 2, 3,", "--max-tokens", "4"]))
        out = narrow.buffer.getvalue().decode("ascii")
    assert status == 0 and "1, 2, 3," in out and "?" in out


def test_the_demo_s_document_has_every_prompt_and_drafter(main):
    status, out, err = main("--demo", "--json", "--max-tokens", "16", "--repeats", "3")
    assert status == 0 and "demo prompts" in err  # progress
    demo, drafters = json.loads(out), {"ngram", "suffix", "draft_model", "mtp", "auto"}
    assert demo["device"] and demo["versions"].keys() == {"python", "torch", "transformers"}
    assert [p["name"] for p in demo["prompts"]] == list(terminal.read_prompts())
    for prompt in demo["prompts"]:
        standard, speculative = prompt["standard"], prompt["speculative"]
        assert statistics.median(standard["ms_of_runs"]) == standard["ms"]
        assert standard["target_passes"] == len(standard["token_ids"]) - 1
        assert set(speculative) == drafters
        for run in speculative.values():
            assert run["identical"] is True and run["ms"] > 0 and len(run["ms_of_runs"]) == 3
            assert run["token_ids"] == standard["token_ids"] and run["text"] == standard["text"]
    assert set(demo["totals"]) == {"standard"} | drafters
    for name, total in demo["totals"].items():
        assert total["tokens"] == 3 * 16 and total["identical"] is True and total["ms"] > 0
        assert (total["tokens_per_pass"] > 1) is (name != "standard")
    out = main(*SHORT_DEMO, "--json", "--prompts", "hard_prose", "repetitive")[1]  # name and kind
    assert [p["name"] for p in json.loads(out)["prompts"]] == ["repetitive_colours", "hard_prose"]


def test_results_are_printed_when_done_so_an_interrupted_demo_has_them(main, monkeypatch, capsys):
    race, told = terminal.race, []

    def interrupted(*given):
        told.append(capsys.readouterr().out)  # since the time before
        if len(told) > 2:
            raise KeyboardInterrupt
        return race(*given)

    monkeypatch.setattr(terminal, "race", interrupted)
    assert main(*SHORT_DEMO)[0] == 130
    assert [said.count("wrote it:") for said in told] == [0, 1, 1]


def test_a_chat_model_is_sent_messages_unless_raw(chat_folder, monkeypatch, capsys):
    engine = load_engine(Options(model=str(chat_folder("llama")), fixed_k=True))
    monkeypatch.setattr(core, "load_engine", lambda options: engine)

    def said(*arguments, status=0):
        assert core.main(naming_a_model([*arguments, "--max-tokens", "2"])) == status
        return capsys.readouterr().out

    assert "user: Hi\nassistant:" in said("--prompt", "Hi")
    assert "user:" not in said("--prompt", "Hi", "--raw")
    few = ("--demo", "--json")
    names = [p["name"] for p in json.loads(said(*few))["prompts"]]
    assert names and all(name.startswith("chat_") for name in names)
    said(*few, "--raw", "--prompts", "hard_prose")
    said(*few, "--raw", "--prompts", "chat", status=2)


def test_the_demo_says_which_texts_are_identical_and_why_k_was_chosen(main, monkeypatch):
    """Which K it is depends on the machine, and on what else it does."""
    tables = len(terminal.read_prompts()) + 1  # and one in all
    status, out, _ = main(*SHORT_DEMO, *SAMPLED, "--verification", "rejection")
    verdict = "identical: not compared (verified by rejection)"
    assert status == 0 and out.count(verdict) == 5 * tables
    monkeypatch.setattr(core, "load_engine", load_engine)  # with a controller
    status, out, _ = main(*SHORT_DEMO, "--drafter", "ngram")
    assert status == 0 and out.count("identical: yes") == 5 * tables
    assert re.search(r"the last choice of ngram: (ngram, K=[1-9]|K=0 )", out)


def test_explain_shows_the_first_cycles_step_by_step(main, monkeypatch):
    prompt = ["--prompt", "red, green, blue, red,", "--max-tokens", "16", "--drafter", "mtp"]
    sampled = ["--temperature", "0.8", "--seed", "1091336943", "--fixed-k", "--explain", "3"]
    _, out, _ = main(*prompt, *sampled, "--verification", "rejection")
    assert re.findall(r"^cycle (\d+)", out, re.MULTILINE) == ["0", "1", "2"]
    found = re.findall(r"u (\S+) (<|>=) p / q = (\S+) / (\S+): (\w+)", out)
    assert found
    for u, sign, p, q, kind in found:
        u, p, q = float(u), float(p), float(q)
        assert (sign == "<") == (kind == "accepted")
        assert abs(u * q - p) < 2e-3 or (u * q < p) == (kind == "accepted")
    assert len(re.findall(r"the pending token and 5 drafted: cache \d+ -> \d+", out)) == 2
    _, out, _ = main(*prompt, *sampled)
    sums = re.findall(r"log p (\S+) \+ noise (\S+) = (\S+):", out)
    assert sums and all(abs(float(p) + float(g) - float(total)) < 0.011 for p, g, total in sums)
    monkeypatch.setattr(core, "load_engine", load_engine)  # with a controller, which decides
    _, out, _ = main(*prompt, "--explain", "3")
    assert len(re.findall(r"^cycle \d+\n  decide", out, re.MULTILINE)) == 2
    # Of a text that is shown step by step, nothing is drafted in the run whose figures are told.
    plainly = ["--prompt", "def f(x):", "--max-tokens", "12", "--drafter", "suffix", "--fixed-k"]
    said = [main(*plainly, *more)[1] for more in ((), ("--explain", "100"))]
    assert len({re.search(r"^12 tokens .* · ms", out, re.MULTILINE)[0] for out in said}) == 1


def test_sampling_options_are_followed_and_the_seed_is_told(main):
    fields = ["--prompt", "def f(", "--max-tokens", "12", *SAMPLED]

    def said(*more):
        return re.sub(r"· ms: .*", "", main(*fields, *more)[1])

    chosen, other = said(), said()
    seeds = [re.search(r"^seed (\d+)$", text, re.MULTILINE).group(1) for text in (chosen, other)]
    assert seeds[0] != seeds[1] and said("--seed", seeds[0]) == chosen


def test_the_embedded_target_is_recognised_however_it_is_spelt(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("embedded", "demo_models/target"):
        draft = Options(model=name).model_of("draft_model")
        assert draft == str(ROOT / "demo_models" / "draft")
    assert Options(model="hybrid").model_of("draft_model") is None


MISTAKES = {  # what is said -> after which command line
    "must be from 1 to 65535": "--port 80000",
    "say what to do: --demo (start here)": "",
    "unrecognized arguments: --no-bitwise": "--demo --no-bitwise",
    "--json goes with --demo": "--prompt x --json",
    "no demo prompt 'poem'": "--demo --prompts poem",
    "must be from 1 to 16, not 0": "--prompt x --num-speculative-tokens 0",
    "model folder no/such/folder not found": "--prompt x --model no/such/folder",
    "unknown drafter 'zzz': choose ngram": "--model tests --prompt x --drafter zzz",  # told first
    "--prompt-lookup-min (9) must be at most": "--model tests --prompt x --prompt-lookup-min 9",
    "--stop goes with --prompt": "--demo --stop x",
    "--dtype int8 computes in C": "--prompt x --dtype int8 --no-kernels",
    "top_p must be a number from 0 to 1": "--prompt x --top-p 2",
    "--max-model-len must be from 2 to 2048": "--prompt x --model embedded --max-model-len 99999",
    "--drafter none does not go with it": "--demo --drafter none",
    "--explain goes with --prompt": "--demo --explain",
    "temperature must be a number from 0": "--demo --temperature nan",
    "seed must be an integer from -9223372036854775808": f"--demo --seed {1 << 64}",
    "--repeats goes with --demo": "--prompt x --repeats 2",
    "cannot use the API key: it is empty": "--port 5000 --api-key ''",
    "must be from 1 to 4096": "--port 5000 --max-queued 4097",
    "it must be UTF-8": "--port 5000 --api-key a\udcff",
    "--host is empty: give 127.0.0.1": "--port 5000 --host ' '",
    "leave no room in a context of 2048": f"--model embedded --prompt '{'x ' * 2100}'",
    "example.org is no origin such as": "--port 5000 --allow-origin example.org",
    "https://例.org is no origin such as": "--port 5000 --allow-origin https://例.org",
    "README.md is a file, and no .gguf": "--prompt x --model README.md",
    "the name of a model is empty": "--prompt x --model ''",
    "name of a model is empty": "--prompt x --model embedded --draft-model ''",
    "lone surrogate": "--model embedded --prompt \udcff",
    "stop must be a non-empty string": "--model embedded --prompt x --stop ''",
    "'vllm' is no address such as": "--port 1 --engine vllm --top-k 3",
    "'' is no address such as": "--port 1 --engine ''",
    "--engine: 'http://[::1' is no address": "--port 1 --engine http://[::1",
    "--engine: 'http://h:99999' is no address": "--port 1 --engine http://h:99999",
    "--device meta computes": "--prompt x --model embedded --device meta",
    "the MTP head : there is no such folder": "--prompt x --model embedded --mtp ''",
    "it has no config.json": "--prompt x --model embedded --eagle3 tests",
    r"'a\nb' is no": "--port 1 --engine 'a\nb'",
}
TOGETHER = [  # what does not go
    "--demo --prompt x", "--port 1 --json", "--demo --engine http://x:1", "--port 1 -- x",
    "--port 1 --engine http://x:0", "--port 1 --engine http://x:1 --dtype int8",
    "--port 1 --engine http://x:1 --mtp H",
]  # fmt: skip
EACH_MISTAKE = [(line, message) for message, line in MISTAKES.items()]
EACH_MISTAKE += [(line, "") for line in TOGETHER]


def test_a_key_may_come_from_where_ps_does_not_show_it(monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "schlüssel")
    _, options = parse_arguments(["--port", "1"])
    given = "Bearer schlüssel".encode().decode("latin-1")  # as WSGI has it
    head = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_AUTHORIZATION": given}
    check_head(options, head)
    with pytest.raises(RequestError, match="give the API key"):
        check_head(options, head | {"HTTP_AUTHORIZATION": "Bearer schluessel"})
    with pytest.raises(SystemExit):
        parse_arguments(["--port", "1", "--api-key", "a"])
    assert "give it once" in capsys.readouterr().err


def assert_one_line(message, status, out, err):
    assert status == 2 and out == "" and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(("line", "message"), EACH_MISTAKE, ids=lambda words: words[:60])
def test_what_cannot_be_done_is_one_line_and_exit_2(line, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        status = core.main(shlex.split(line))
    except SystemExit as stop:
        status = stop.code
    assert_one_line(message, status, *capsys.readouterr())


def test_a_deleted_file_that_a_command_needs_is_told_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "server.generation", None)
    monkeypatch.setattr(core, "load_engine", Mock(side_effect=AssertionError))
    status = core.main(naming_a_model(["--prompt", "x"]))
    assert_one_line("--prompt needs server/generation.py", status, *capsys.readouterr())


def test_a_drafter_s_fault_with_strict_is_one_line(main, demo_engine, monkeypatch):
    drafters = {"scripted": ScriptedDrafter(lambda *_: 1 / 0)}
    engine = core.Engine(demo_engine.target, drafters, "scripted", is_strict=True)
    monkeypatch.setattr(core, "load_engine", lambda _: engine)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's: a terminal has none
    status, _, err = main("--prompt", "x")
    assert (status, err) == (2, "error: drafter scripted failed (division by zero)\n")


CONFIG, SHARD = "config.json", "model-00002-of-00003.safetensors"


def configured(folder, **changes):
    """Edit config.json; ... removes a field."""
    file = folder / CONFIG
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: v for name, v in config.items() if v is not ...}))


# The file; what is written into it, becomes of its fields, or is cut off; and what is said.
DAMAGED = [
    (SHARD, b"\xff" * 999, f"cannot load .*: {SHARD}: "),
    (SHARD, -100, f"cannot load .*: {SHARD}: "),
    (SHARD, None, f"index.json names {SHARD}, which is no file$"),
    (CONFIG, b"{", "cannot load .*: config.json: Expecting property name"),
    (CONFIG, b"[1]", "cannot load .*: config.json: it must hold an object$"),
    (CONFIG, None, "model folder .* has no config.json"),
    ("tokenizer.json", None, "cannot load .*: its tokenizer: "),
    ("tokenizer.json", bytes(range(256)), "cannot load .*: tokenizer.json: "),
    ("model.safetensors.index.json", b"{", "needs a weight_map and metadata"),
    (CONFIG, {"intermediate_size": 80}, r"down_proj.weight: \[32, 64\] instead of "),
    (CONFIG, {"max_position_embeddings": 1}, "max_position_embeddings must be 2 or more, not 1"),
    (CONFIG, {"max_position_embeddings": "256"}, "expected int, got str .value: '256'"),
]


@pytest.fixture
def sharded(tiny_folder, tmp_path):
    """A model in three files."""
    source, path = tiny_folder("llama"), tmp_path / "model"
    shutil.copytree(source, path, ignore=lambda *_: ["model.safetensors"])
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(path, max_shard_size="300KB")
    return path


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_model_is_one_line(sharded, capsys, name, content, message):
    if isinstance(content, dict):
        configured(sharded, **content)
    elif content is None:
        (sharded / name).unlink()
    elif isinstance(content, int):
        (sharded / name).write_bytes((sharded / name).read_bytes()[:content])
    else:
        (sharded / name).write_bytes(content)
    capsys.readouterr()  # of what made the model
    status = core.main(["--prompt", "x", "--model", str(sharded)])
    out, err = capsys.readouterr()
    assert_one_line(str(sharded), status, out, err)
    assert re.search(message, err[:-1])


@pytest.mark.parametrize(("positions", "length"), [(..., 2048), (10**30, loading.LONGEST_DEFAULT)])
def test_a_context_may_be_left_out_or_be_huge(sharded, positions, length):
    configured(sharded, max_position_embeddings=positions)
    assert loading.load_pretrained(str(sharded), Options()).length == length


NO_MEMORY = [
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("can't start new thread"),
    MemoryError(),
]
ENDS = [*((error, 2, TOO_LITTLE_MEMORY) for error in NO_MEMORY)]
ENDS += [(KeyboardInterrupt(), 130, "interrupted\n"), (AttributeError("x"), None, "Traceback")]


@pytest.mark.parametrize(("error", "code", "words"), ENDS, ids=repr)
def test_ctrl_c_and_too_little_memory_are_one_line_and_a_fault_of_the_program_is_not_hidden(
    error, code, words, main, monkeypatch, capsys
):
    """They come from a server, or from an import before anything runs."""
    monkeypatch.setattr("server.serving.serve", Mock(side_effect=error))
    if code != 130:
        with pytest.raises(type(error)):
            main("--port", "5000")
    with pytest.raises(SystemExit) if code else nullcontext() as ended:
        startup._hook(type(error), error, None)
    said = capsys.readouterr().err
    assert said.startswith(words) and (said.count("\n") == 1) == bool(code)
    assert code is None or ended.value.code == code


# -------------------------------------------------------------------------------- the process


def writing(out, num_tokens, **options):
    """A process that writes so many tokens into a file."""
    given = ("--prompt", "1, 2, 3,", "--max-tokens", str(num_tokens), "--drafter", "ngram")
    return serving(*given, wait=False, stdout=out, **options)


def test_ctrl_c_is_no_traceback(tmp_path):
    out = tmp_path / "out"
    out.touch()
    with writing(out, 1900, ignored=()) as process:
        until(out.read_text)
        process.send(signal.SIGINT)
        assert process.exit_code() == 130 and process.log() == "interrupted\n"


# What happens while torch is imported, after which command; the exit status (-SIGINT is 130 in a
# shell), and what is said.
ENDS_EARLY = [
    (f"os.kill(os.getpid(), {signal.SIGTERM:d})", "--port 1", 0, ""),
    (f"os.kill(os.getpid(), {signal.SIGINT:d})", "--port 1", 0, ""),
    (f"os.kill(os.getpid(), {signal.SIGINT:d})", "--prompt x", -signal.SIGINT, ""),
    ("raise ImportError('libtorch_cpu.so: failed to map segment from shared object')",
     "--prompt x", 2, TOO_LITTLE_MEMORY),
]  # fmt: skip


@pytest.mark.parametrize(("event", "line", "code", "words"), ENDS_EARLY)
def test_no_end_while_torch_is_imported_is_a_traceback(tmp_path, event, line, code, words):
    """Which takes seconds; another module stands in for it."""
    (tmp_path / "torch.py").write_text(f"import os\n{event}\nos._exit(3)")
    command = [sys.executable, SCRIPT, *naming_a_model(line.split())]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        preexec_fn=heeding_interrupts,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "") and done.stderr.startswith(words)
    assert done.stderr.count("\n") == bool(words)


def test_a_reader_that_leaves_is_no_error(tmp_path):
    os.mkfifo(tmp_path / "out")
    with writing(tmp_path / "out", 60) as process:
        with open(tmp_path / "out") as reader:
            reader.read(1)
        assert process.exit_code() == 0 and process.log() == ""


def test_an_address_that_cannot_be_had_is_one_line_and_one_that_is_told_can_be_opened():
    for host in ("localhost", "::1", "fe80::1"):
        parts = urlsplit(url_of(host, 5000))
        assert (parts.scheme, parts.hostname, parts.port) == ("http", host, 5000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, place in (
            (("--port", str(port)), f"127.0.0.1:{port}"),
            (("--host", "no.such.host.invalid"), "no.such.host.invalid:"),
        ):
            with serving(*arguments, wait=False) as server:
                code = server.exit_code()
                assert_one_line(f"error: cannot listen on {place}", code, "", server.log())
