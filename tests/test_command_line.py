"""The command line as a user meets it.

Most of it in this process, on the engine that the other tests have: what the process itself does
(its signals, pipes and sockets) at the end, and in test_operations.py.
"""

import copy
import io
import itertools
import json
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys

import pytest
import speculative_decoding as core
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from server import SCRIPT, naming_a_model, serving
from transformers import AutoModelForCausalLM

import demo as terminal
from models import loading

load_engine = core.load_engine
SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01")


_documents = []


@pytest.fixture
def demo(main):
    if not _documents:
        status, out, err = main("--demo", "--json", "--max-tokens", "16")
        assert status == 0 and "demo prompts" in err  # progress
        _documents.append(out)
    return json.loads(_documents[0])


def test_the_demo_s_document_has_every_prompt_and_drafter(demo):
    assert list(demo) == [
        "prompts", "interrupted", "worked_cycle", "totals", "device", "versions",
    ]  # fmt: skip
    assert demo["interrupted"] is False
    cycle = demo["worked_cycle"]["event"]
    assert demo["worked_cycle"]["name"] in terminal.read_prompts()
    assert cycle["accepted_count"] and cycle["rejected"] and cycle["cached"][1] < cycle["cached"][0]
    assert [p["name"] for p in demo["prompts"]] == list(terminal.read_prompts())
    for prompt in demo["prompts"]:
        standard = prompt["standard"]
        assert list(standard) == [
            "target_passes", "tokens_per_pass", "ms", "ms_of_runs", "token_ids", "text",
        ]  # fmt: skip
        assert statistics.median(standard["ms_of_runs"]) == standard["ms"]
        assert standard["target_passes"] == len(standard["token_ids"]) - 1
        assert set(prompt["speculative"]) == {"ngram", "suffix", "draft_model", "mtp", "auto"}
        for run in prompt["speculative"].values():
            assert set(run) == set(standard) | {
                "draft_acceptance_rate", "mean_acceptance_length", "num_draft_tokens",
                "num_accepted_draft_tokens", "identical", "controller", "warnings",
                "disturbed", "spread",
            }  # fmt: skip
            assert len(run["ms_of_runs"]) == 3 and type(run["disturbed"]) is bool
            assert run["identical"] is True
            assert run["token_ids"] == standard["token_ids"] and run["text"] == standard["text"]
            assert run["ms"] > 0
    assert set(demo["totals"]) == {"standard", "ngram", "suffix", "draft_model", "mtp", "auto"}


def test_a_speed_up_that_only_a_busy_machine_explains_is_called_unreliable(demo, capsys):
    document = copy.deepcopy(demo) | {"worked_cycle": None, "interrupted": False}
    for run in (run for prompt in document["prompts"] for run in prompt["speculative"].values()):
        run |= {"disturbed": False, "pieces": []}
    for total in document["totals"].values():
        total["disturbed"] = False
    first = document["prompts"][0]["speculative"]
    first["ngram"] |= {"disturbed": True, "spread": [0.6, 1.4]}
    document["totals"]["mtp"] |= {"disturbed": True, "spread": [0.9, 3.1]}
    for result in document["prompts"]:
        terminal.print_prompt(result, "ngram", colour=False)
    terminal.print_summary(document, "ngram", 3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not reliable" in line]
    assert len(lines) == 2
    said = "× not reliable, the machine was busy"
    assert lines[0].startswith("ngram ") and lines[0].endswith(f"{said} (0.60 to 1.40×)")
    assert lines[1].startswith("mtp ") and f"{said} (0.90 to 3.10×)" in lines[1]


def test_times_that_contradict_the_passes_make_the_demo_s_figures_disturbed(demo):
    """Half the passes and a fifth of the time: something else slowed plain decoding down."""
    results = copy.deepcopy(demo["prompts"])
    for result in results:
        result["standard"]["ms_of_runs"] = [1000.0] * 3
        for run in result["speculative"].values():
            run["ms_of_runs"] = [1000.0 / run["tokens_per_pass"]] * 3
        result["speculative"]["mtp"]["ms_of_runs"] = [50.0] * 3
    totals = terminal.demo_totals(results, is_coupled=True)
    assert [name for name, total in totals.items() if total["disturbed"]] == ["mtp"]
    assert totals["mtp"]["spread"] == [20.0, 20.0] and totals["standard"]["spread"] == [1.0, 1.0]


def test_the_demo_runs_the_prompts_that_are_named_by_name_or_kind(main):
    status, out, _ = main(
        "--demo", "--json", "--max-tokens", "4", "--repeats", "1",
        "--prompts", "hard_prose", "repetitive",
    )  # fmt: skip
    prompts = json.loads(out)["prompts"]
    assert status == 0 and [p["name"] for p in prompts] == ["repetitive_colours", "hard_prose"]
    assert all(len(p["standard"]["ms_of_runs"]) == 1 for p in prompts)
    with pytest.raises(SystemExit):
        main("--demo", "--prompts", "poem")


def test_an_interrupted_demo_keeps_what_is_done(main, monkeypatch):
    compare, calls = terminal.compare, itertools.count()

    def interrupted(*given):
        if next(calls) == 3:  # the warm-up, and two prompts
            raise KeyboardInterrupt
        return compare(*given)

    monkeypatch.setattr(terminal, "compare", interrupted)
    given = ("--demo", "--max-tokens", "4", "--repeats", "1")
    status, out, _ = main(*given)
    assert status == 130 and "interrupted after 2 of 3 prompts" in out
    assert out.count("identical output: yes") == 2 and "━━ in all" in out
    calls = itertools.count(1)
    status, out, _ = main(*given, "--json")
    assert status == 130 and json.loads(out)["interrupted"] is True
    calls = itertools.count(2)
    status, out, err = main(*given, "--json")
    assert (status, out) == (130, "") and err.endswith("interrupted\n")  # nothing to keep


def test_each_prompt_s_result_is_printed_as_it_is_done(main, monkeypatch, capsys):
    shown, compare = [], terminal.compare

    def watched(*given):
        shown.append(capsys.readouterr().out.count("identical output"))
        return compare(*given)

    monkeypatch.setattr(terminal, "compare", watched)
    main("--demo", "--max-tokens", "4", "--repeats", "1")
    assert shown == [0, 0, 1, 1]  # since the time before


def test_a_chat_model_is_sent_messages_unless_raw(chat_folder, monkeypatch, capsys):
    engine = load_engine(core.Options(model=str(chat_folder("llama")), fixed_k=True))
    monkeypatch.setattr(core, "load_engine", lambda options: engine)
    chat = naming_a_model(["--max-tokens", "3"])
    assert core.main([*chat, "--prompt", "Hi"]) == 0
    assert "user: Hi\nassistant:" in capsys.readouterr().out
    assert core.main([*chat, "--prompt", "Hi", "--raw"]) == 0
    assert "user:" not in capsys.readouterr().out
    few = naming_a_model(["--demo", "--max-tokens", "2", "--repeats", "1", "--json"])
    assert core.main([*few]) == 0
    names = [p["name"] for p in json.loads(capsys.readouterr().out)["prompts"]]
    assert names and all(name.startswith("chat_") for name in names)
    assert core.main([*few, "--raw", "--prompts", "hard_prose"]) == 0
    assert core.main([*few, "--raw", "--prompts", "chat"]) == 2


def test_the_token_that_ends_a_turn_is_shown(demo_engine, monkeypatch, capsys):
    monkeypatch.setattr(core, "load_engine", lambda options: demo_engine)
    monkeypatch.setattr(core, "own_choices", lambda *_: itertools.repeat(0))
    assert core.main(naming_a_model(["--prompt", "1, 2, 3,", "--max-tokens", "9"])) == 0
    assert "1, 2, 3,<|endoftext|>\n\n1 tokens (stop)" in capsys.readouterr().out


def test_the_demo_prints_tables_and_marks_where_tokens_came_from(main, monkeypatch, capsys):
    status, out, _ = main("--demo", "--max-tokens", "12", "--drafter", "ngram")
    assert status == 0 and out.count("identical output: yes") == len(terminal.read_prompts())
    columns = ("passes", "tok/pass", "accepted", "rate", "fewer passes", "speed-up")
    for word in (*columns, "plain decoding"):
        assert word in out
    monkeypatch.setattr(core, "load_engine", load_engine)
    # This one has a controller, which says why it chose its K.
    given = ["--demo", "--max-tokens", "4", "--drafter", "ngram"]
    assert core.main(naming_a_model(given)) == 0
    out = capsys.readouterr().out
    assert out.count("identical output: yes") == len(terminal.read_prompts())
    assert "last: " in out and "α ." in out


def test_explain_shows_the_first_cycles_step_by_step(main):
    prompt = ["--prompt", "red, green, blue, red,", "--max-tokens", "16", "--drafter", "mtp"]
    sampled = ["--temperature", "0.8", "--seed", "1091336943", "--fixed-k"]
    _, out, _ = main(*prompt, *sampled, "--explain", "3", "--verification", "rejection")
    assert re.findall(r"^cycle (\d+)", out, re.MULTILINE) == ["0", "1", "2"]
    assert "cycle 0: prefill, 8 tokens of the prompt are cached now" in out
    lengths = [tuple(map(int, pair)) for pair in re.findall(r"cache (\d+) -> (\d+)", out)]
    assert lengths[0][0] == 8 and all(before != after for before, after in lengths)
    found = re.findall(r"u (\S+) (<|>=) p / q = (\S+) / (\S+): (\w+)", out)
    assert found
    for sign, p, q, u, kind in (
        (sign, float(p), float(q), float(u), kind) for u, sign, p, q, kind in found
    ):
        assert (sign == "<") == (kind == "accepted")
        assert abs(u * q - p) < 2e-3 or (u * q < p) == (kind == "accepted")
    drafted = re.findall(r"pending and (\d) drafted in one pass: cache (\d+) -> (\d+)", out)
    assert [int(after) - int(before) - 1 for _, before, after in drafted] == [5, 5]
    assert "            d3, d4, d5: dropped behind the rejected token" in out
    assert "from norm(max(0, p - q)): recovered" in out and "; pending '" in out
    assert "tokens per pass" in out  # the text and its figures follow
    _, out, _ = main(*prompt, *sampled, "--explain", "3")
    sums = re.findall(r"log p (\S+) \+ noise (\S+) = (\S+):", out)
    assert sums and all(abs(float(p) + float(g) - float(total)) < 0.011 for p, g, total in sums)
    assert main(*prompt, "--explain")[1].count("\n  truncate") == 4  # cycles


def test_a_difference_in_output_makes_the_demo_fail(main, monkeypatch):

    def credulous(draft, choices):
        tokens = [core.Judgement(token, "accepted") for token in draft.tokens]
        return [*tokens, core.Judgement(5, "bonus")]

    monkeypatch.setattr(core, "verify", credulous)
    status, out, _ = main("--demo", "--max-tokens", "12")
    assert status == 1 and "identical output: NO" in out


@pytest.mark.parametrize(
    ("rule", "verdict"), [("coupled", "yes"), ("rejection", "not compared (verified by rejection)")]
)
def test_a_sampled_demo_compares_outputs_unless_they_are_verified_by_rejection(main, rule, verdict):
    status, out, _ = main("--demo", "--max-tokens", "4", *SAMPLED, "--verification", rule)
    assert status == 0
    assert out.count(f"identical output: {verdict}") == len(terminal.read_prompts())


def test_a_prompt_is_continued_with_the_origin_of_its_tokens(main):
    prompt = ("--prompt", "red, green, blue, red, green,")
    status, out, _ = main(*prompt, "--max-tokens", "20", "--drafter", "ngram")
    assert status == 0 and "red, green, blue, red, green,{ blue}[, red" in out
    assert re.search(
        r"20 tokens \(length\) · \d+ passes after prefill · \d\.\d\d tokens per pass", out
    )


def test_a_prompt_may_be_stopped(main):
    status, out, _ = main("--prompt", "1, 2, 3, 4, 5,", "--stop", "9", "--stop", "zz")
    text, _, figures = out.rpartition("\n\n")
    assert status == 0 and "(stop)" in figures and "8" in text and "9" not in text


def test_sampling_options_are_followed_and_the_seed_is_told(main):
    fields = ["--prompt", "def f(", "--max-tokens", "12", *SAMPLED, "--repetition-penalty", "1.1"]
    chosen, other = (re.sub(r"· ms: .*", "", main(*fields)[1]) for _ in range(2))
    seeds = [re.search(r"^seed (\d+)$", text, re.MULTILINE).group(1) for text in (chosen, other)]
    assert seeds[0] != seeds[1]
    assert re.sub(r"· ms: .*", "", main(*fields, "--seed", seeds[0])[1]) == chosen


def test_a_terminal_of_few_characters_gets_the_text_all_the_same(main, monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        status = core.main(naming_a_model(["--prompt", "1, 2, 3,", "--max-tokens", "4"]))
        out = narrow.buffer.getvalue().decode("ascii")
    assert status == 0 and "1, 2, 3," in out and "?" in out


def test_the_embedded_target_is_recognised_however_it_is_spelt(monkeypatch):
    monkeypatch.chdir(ROOT)
    drafts = {core.Options(model=name).draft_folder for name in ("embedded", "demo_models/target")}
    assert drafts == {str(ROOT / "demo_models" / "draft")}
    assert core.Options(model="hybrid").draft_folder is None


def test_the_drafter_none_is_plain_decoding_where_a_request_does_not_say(tiny_folder):
    options = core.Options(model=str(tiny_folder("llama")), drafter="none")
    engine = core.load_engine(options)
    for fields, drafter in (({}, None), ({"drafter": "ngram"}, "ngram")):
        request = core.parse_request({"prompt": "x"} | fields, engine, options.for_requests)[0]
        assert request.drafter == drafter


MISTAKES = [
    (["--port", "80000"], "must be from 1 to 65535"),
    (["--port", "0"], "must be from 1 to 65535"),
    (["--port", "zero"], "invalid integer value"),
    ([], "say what to do: --demo (start here)"),
    (["--demo", "--bogus"], "unrecognized arguments: --bogus"),
    (["--prompt", "x", "--json"], "--json goes with --demo"),
    (["--prompt", "x", "--num-speculative-tokens", "0"], "must be from 1 to 16"),
    (["--prompt", "x", "--num-speculative-tokens", "99"], "must be from 1 to 16"),
    (["--prompt", "x", "--model", "no/such/folder"], "model folder no/such/folder not found"),
    (["--prompt", "x", "--model", "tests"], "cannot load tests"),
    (
        ["--model", "embedded", "--prompt", "x", "--drafter", "zzz"],
        "unknown drafter 'zzz': choose ngram",
    ),
    (
        ["--model", "embedded", "--prompt", "x", "--drafter", "zzz.py:A"],
        "drafter file 'zzz.py' not found",
    ),
    (
        ["--prompt", "x", "--model", "embedded", "--max-model-len", "99999"],
        "--max-model-len must be from 2 to 2048",
    ),
    (["--demo", "--stop", "x"], "--stop goes with --prompt"),
    (["--demo", "--drafter", "none"], "--drafter none does not go with it"),
    (["--demo", "--explain"], "--explain goes with --prompt"),
    (["--demo", "--temperature", "nan"], "temperature must be a number from 0"),
    (["--prompt", "x", "--seed", "99999999999999999999"], "seed must be an integer from"),
    (["--port", "5000", "--top-p", "7"], "top_p must be a number from"),
    (["--port", "5000", "--stall-limit", "-1"], "must be more than 0"),
    (["--port", "5000", "--api-key", ""], "cannot use the API key: it is empty"),
    (["--port", "5000", "--max-queued", "1000"], "--max-queued ask for 1040 connections"),
    (["--port", "5000", "--api-key", "a\udcff"], "it must be UTF-8"),
    (["--port", "5000", "--api-key", "a", "--api-key-file", "b"], "give it once"),
    (["--port", "5000", "--api-key-file", "no/such/file"], "No such file"),
    (
        ["--model", "embedded", "--prompt", "x", "--prompt-lookup-min", "9"],
        "prompt_lookup_min (9) must be",
    ),
]
NOT_TOGETHER = [
    "--plan --drafter none", "--plan --quantize int8", "--plan --demo",
    "--plan --prompts nowhere.txt", "--plan --engine vllm --model T", "--port 1 --json",
    "--plan --model no/such/folder --no-kernels", "--demo --engine vllm", "--port 1 --engine vllm",
    "--port 1 --engine ollama", "--port 1 --engine http://", "--port 1 --engine http://x:1 --mmap",
    "--port 1 --engine http://x:1 -- --seed 1", "--port 1 --engine vllm --model T --quantize int8",
    "--port 1 --engine vllm --model T --device cuda", "--port 1 --engine vllm --model T --mtp H",
    "--port 1 -- x",
]  # fmt: skip
MISTAKES += [(words.split(), "") for words in NOT_TOGETHER]
BAD_PROMPTS = [
    (["x " * 2100], "leave no room in a context of 2048"),
    ([""], "prompt must be a non-empty string"),
    (["\udcff"], "lone surrogate"),
    (["x", "--stop", ""], "stop must be a non-empty string"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=str)
def test_what_cannot_be_done_is_one_line_and_exit_2(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        status = core.main(arguments)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:30])
def test_a_prompt_that_cannot_be_is_one_line_and_exit_2(main, arguments, message):
    status, out, err = main("--prompt", *arguments)
    assert status == 2 and out == "" and message in err
    assert err.startswith("error: ") and err.count("\n") == 1


def configured(**changes):
    """An edit of config.json; ... removes a field."""

    def edit(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder):
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])


def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def resized(weight):
    """An edit that makes a weight one row shorter."""

    def edit(folder):
        (file,) = (f for f in folder.glob("*.safetensors") if weight in safe_open(f, "pt").keys())
        weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
        weights[weight] = weights[weight][:-1].clone()
        save_file(weights, file, {"format": "pt"})

    return edit


SHARD = "model-00002-of-00003.safetensors"
POSITIONS = "max_position_embeddings must be 2 or more, not "
DAMAGED = [  # what happens to a model's folder, and what is said
    (cut, f"cannot read {SHARD} of "),
    (written(SHARD, b""), f"cannot read {SHARD} of "),
    (written(SHARD, b"\xff" * 999), f"cannot read {SHARD} of "),
    (lambda folder: (folder / SHARD).unlink(), f"No such file or directory: .*{SHARD}$"),
    (resized("model.norm.weight"), r"model.norm.weight: \[31\] instead of \[32\]"),
    (configured(intermediate_size=80), r"down_proj.weight: \[32, 64\] instead of "),
    (configured(hidden_size=1 << 46), "can't allocate memory"),
    (configured(max_position_embeddings=1), POSITIONS + "1"),
    (configured(max_position_embeddings=0), POSITIONS + "0"),
    (configured(max_position_embeddings=-5), POSITIONS + "-5"),
    (configured(max_position_embeddings="256"), "expected int, got str .value: '256'"),
    (written("config.json", b"{"), "config.json' is not a valid JSON"),
    (written("config.json", b""), "config.json' is not a valid JSON"),
    (written("config.json", bytes(range(256))), "config.json' is not a valid JSON"),
    (written("config.json", b"[1]"), "model_type. key in its config.json"),
    (written("config.json", b"null"), "cannot load "),
    (lambda folder: (folder / "config.json").unlink(), "in its config.json"),
    (without_tokenizer, "cannot load .*: its tokenizer: "),
    (written("tokenizer.json", b"{"), "cannot load .*: its tokenizer: "),
    (written("tokenizer.json", bytes(range(256))), "cannot load .*: its tokenizer: "),
    (written("model.safetensors.index.json", b"{"), "needs a weight_map and metadata"),
]


@pytest.fixture
def sharded(tiny_folder, tmp_path, capsys):
    """A model in three files, in a folder of its own."""
    source, path = tiny_folder("llama"), tmp_path / "model"
    shutil.copytree(source, path, ignore=lambda *_: ["model.safetensors"])
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(path, max_shard_size="300KB")
    capsys.readouterr()  # what saving said
    return path


@pytest.mark.parametrize(("edit", "message"), DAMAGED)
def test_a_damaged_model_is_one_line(sharded, capsys, edit, message):
    edit(sharded)
    assert core.main(["--prompt", "x", "--model", str(sharded)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said[:-1]) and str(sharded) in said
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(("positions", "length"), [(..., 2048), (10**30, loading.LONGEST_DEFAULT)])
def test_a_context_may_be_left_out_or_be_huge(sharded, positions, length):
    configured(max_position_embeddings=positions)(sharded)
    assert loading.load_pretrained(str(sharded), core.Options()).length == length


SHORTAGES = [
    MemoryError(),
    RuntimeError("can't start new thread"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_too_little_memory_is_one_line_and_a_fault_is_not(monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(core.http, "serve", fail)
    assert core.main(["--port", "5000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: too little memory, or too few threads: ")
    assert said.count("\n") == 1
    error = RuntimeError("a fault of the program")
    with pytest.raises(RuntimeError, match="a fault"):
        core.main(["--port", "5000"])


def test_colours_are_used_where_wanted():
    pieces = [("a b", "accepted"), (" c", "recovered"), (" d", "bonus")]
    assert terminal.mark(pieces, colour=False) == "[a b]< c>{ d}"
    coloured = terminal.mark(pieces, colour=True)
    assert re.sub(r"\033\[\d+m", "", coloured) == "a b c d" and coloured.count("\033[0m") == 3


# -------------------------------------------------------------------------------- the process


def started(*arguments, **options):
    given = naming_a_model(["--drafter", "ngram", *arguments])
    command = [sys.executable, SCRIPT, *given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


def test_ctrl_c_is_no_traceback():
    usual = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # not in a job
    with started("--prompt", "1, 2, 3,", "--max-tokens", "1900", **usual) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == "interrupted\n"


def test_too_little_memory_for_torch_is_one_line_and_exit_2():
    size = 300 << 20
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))}
    with started("--prompt", "x", **limit) as process:
        out, said = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and said.count("\n") == 1
    assert said.startswith("error: too little memory, or too few threads: ")


def test_a_reader_that_leaves_is_no_error():
    with started("--prompt", "1, 2, 3,", "--max-tokens", "60") as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0


def test_what_only_a_server_finds_out_is_one_line_and_exit_2():
    """An address that it cannot have, and a model, though its socket is open by then."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, error in (
            (("--port", str(port)), f"cannot listen on 127.0.0.1:{port}"),
            (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid:"),
            (("--model", "/nowhere/model"), "model folder /nowhere/model not found"),
        ):
            with serving(*arguments, wait=False) as server:
                assert server.exit_code() == 2
                *before, said = server.log().splitlines()
            assert said.startswith(f"error: {error}") and "Traceback" not in "".join(before)
            assert not before or "--model" in arguments
