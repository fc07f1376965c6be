"""Each benchmark runs with the command of its docstring, and its last line is one JSON document.

Here each one runs in small, and must find what it is there to find: equal texts, a drafter that
lies, an answer that a server lost. What it makes of times is tested with times that are made up.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from unittest.mock import Mock

import gguf
import pytest
import torch
from conftest import ROOT
from gguf_files import TINY, write
from server import serving
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import benchmarks as bench
from benchmarks import audition, fixed_clock, lossless, never_loses, pair, served, servers, soak
from benchmarks.mixture import folder_of, mixture_of
from benchmarks.passes import retype
from messages import Request


def forked(command):
    """In the place of servers.started: forked servers need not import torch."""
    return serving(*command[len(servers.OURS) :])


@pytest.fixture
def measure(capsys, monkeypatch):
    """The document of a benchmark's main, run in this process, which has torch already."""

    def run(command):
        name, *arguments = command.split()
        monkeypatch.setattr(bench, "tqdm", partial(tqdm, disable=True))
        prompts = {"easy_a": "1, 2, 1, 2,", "hard_b": "def main():"}
        module = importlib.import_module(f"benchmarks.{name}")
        for reader in (bench, module):
            read = lambda is_chat=False: prompts  # noqa: E731
            monkeypatch.setattr(reader, "read_prompts", read, raising=False)
        monkeypatch.setattr(module, "started", forked, raising=False)
        module.main(arguments)
        *table, line = capsys.readouterr().out.splitlines()
        document = json.loads(line)
        assert len(table) > 3
        assert document["command"].startswith(f"python -m benchmarks.{name} ")
        assert document["versions"]["torch"] == torch.__version__
        assert document["hardware"]["threads"] == torch.get_num_threads()
        return document

    return run


def test_the_benchmark_against_generate_finds_equal_outputs(measure):
    document = measure("peers --tokens 8 --k 3 --runs 1")
    rows = [row for row in document["results"] if row["prompts"] == "all"]
    assert [row["method"] for row in rows] == ["greedy", "ngram", "draft_model", "mtp"]
    for row in rows:
        assert row["equal_tokens"] == row["num_tokens"] == 2 * 8
        assert row["equal_outputs"] == row["num_outputs"] == 2
        # A pass a request is saved there by drafting before the prompt was read.
        assert row["ours_passes"] <= row["generate_passes"] + 2
    assert rows[0]["ours_passes"] == rows[0]["generate_passes"] == 16


OWN = """
import torch
from drafters import Draft, Drafter
class Liar(Drafter):
    name = "liar"
    def open(self, prompt, sampling, noise):
        return list(prompt), noise
    def propose(self, state, max_tokens):
        prompt, noise = state
        tokens = [prompt[int(noise.uniform(i, 99) * len(prompt))] for i in range(max_tokens)]
        return Draft(tokens, torch.full((max_tokens, 4096), 1 / 4096))  # not what it drew from
    def observe(self, state, verdict):
        pass
"""


def test_losslessness_shows_a_drafter_that_lies_about_its_q(measure, monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    name = "temperature 1.3"
    monkeypatch.setattr(lossless, "SAMPLINGS", {name: lossless.SAMPLINGS[name]})
    monkeypatch.setattr(lossless, "KEPT", {"temperature 1": lossless.KEPT["temperature 1"]})
    bars = []
    monkeypatch.setattr(lossless, "tqdm", lambda **words: bars.append(Mock(**words)) or bars[-1])
    few = "--samples 160 --max-tokens 6 --seeds 1"
    document = measure(f"lossless {few} --drafter {tmp_path}/own.py:Liar")
    for row in document["rows"]:
        assert row["coupled_differing"] == 0  # whoever lies
        smallest = min(row[view]["p_value"] for view in lossless.VIEWS)
        assert (smallest < 1e-6) == (row["drafter"] == "liar")
    assert [row["drafter"] for row in document["kept"]] == ["ngram", "suffix", "draft_model", "mtp"]
    assert all(row["rejection"]["tokens_per_pass"] > 1 for row in document["kept"])
    # It takes minutes: each text that is done is a step of the progress shown.
    assert [bar.update.call_count for bar in bars] == [bar.total for bar in bars] == [1760, 16]


def test_speedups_are_medians_of_runs():
    assert bench.speedup([10, 30, 20], [5, 10, 20]) == bench.Spread(2.0, [1.5, 2.5])
    assert bench.speedup([3], [2]) == bench.Spread(1.5, [1.5, 1.5])  # of one run


def test_auto_and_plain_write_the_same_texts_and_the_worst_cell_is_first(measure, monkeypatch):
    monkeypatch.setattr(never_loses, "memory_gb_per_s", lambda: 9.9)
    few = "--kinds edit JSON --temperatures 1.2 --clients 1 3 --fixed ngram:2"
    document = measure(f"never_loses --tokens 3 --runs 1 {few}")
    rows = document["results"]
    cells = {(row["kind"], row["temperature"], row["clients"]) for row in rows}
    assert len(cells) == len(rows) == 2 * 2
    assert all(row["differing"] == row["control_differing"] == 0 for row in rows)
    assert all(row["best_way"] in ("plain", "ngram:2") and row["of_best"] > 0 for row in rows)
    speeds = [row["auto_of_plain"] for row in rows]
    assert speeds == sorted(speeds) and speeds[0] > 0
    whole, alone, _ = document["summary"]
    assert whole["worst"] == speeds[0] <= whole["mean"] <= speeds[-1]
    assert (whole["cells"], alone["clients"], alone["cells"]) == (4, "1", 2)


@pytest.mark.parametrize("is_chat", [False, True])
def test_each_prompt_is_asked_once_in_every_way_and_the_ways_change_places(monkeypatch, is_chat):
    """Ctrl-C amid a round leaves the whole ones."""
    asked, rounds, most = list[tuple[str, str]](), 6, [10**6]

    def at_once(port, route, bodies):
        told = [body["messages"][0]["content"] if is_chat else body["prompt"] for body in bodies]
        if len(asked) >= most[0]:
            raise KeyboardInterrupt
        asked.extend((body["drafter"], text) for body, text in zip(bodies, told, strict=True))
        choices = [{"message": {"content": text}, "text": text} for text in told]
        return 1.0, [servers.Told((1.0,), ({"choices": [choice]},)) for choice in choices]

    monkeypatch.setattr(never_loses, "at_once", at_once)
    monkeypatch.setattr(bench, "tqdm", partial(tqdm, disable=True))
    server = Namespace(port=0, health=lambda: {"chat_template": is_chat})
    cells = [never_loses.Cell(kind, 0.0, 2) for kind in never_loses.KINDS]
    given = {"clients": [2], "tokens": 3, "order": "chance", "fixed": []}
    found = never_loses.measure(server, cells, Namespace(runs=rounds, **given))
    texts = [text for drafter, text in asked[2:] if drafter == "auto"]  # behind the warm-up
    assert len({*texts}) == len(texts) == len(cells) * 2 * rounds
    assert sorted(text for drafter, text in asked[2:] if drafter == "none") == sorted(texts * 2)
    for told in found.values():  # six rounds have all orders
        assert sorted(map(tuple, told)) == sorted(permutations(("auto", "plain", "control")))
    most[0] = len(asked) + 2 + 4 * 6 - 2  # the warm-up, three whole rounds, most of a fourth
    found = never_loses.measure(server, cells, Namespace(runs=rounds, **given))
    assert [len(told) for told in found.values()] == [1, 1, 1]


def test_each_kind_may_come_behind_each_other_kind():
    order = never_loses.in_order(4, "pairs", random.Random(0))
    assert {*zip(order, order[1:], strict=False)} >= {*permutations(range(4), 2)}


def test_the_best_fixed_way_stands_beside_auto():
    ways = {"auto": 8.0, "plain": 10.0, "control": 10.0, "ngram:2": 11.0, "mtp:3": 5.0}
    told = {way: never_loses.Answers(ms, [], ms) for way, ms in ways.items()}
    row = never_loses.row_of(never_loses.Cell("a", 0.0, 1), [told])
    assert (row["best_way"], row["of_best"]) == ("mtp:3", 0.625)


def test_prompts_of_a_kind_are_all_different():
    for kind in never_loses.KINDS:
        prompts = {never_loses.prompt(kind, number) for number in range(1334)}
        assert len(prompts) == 1334 and not any("{" in text for text in prompts), kind


def test_cells_have_medians_of_rounds_and_count_texts_that_differ():
    def told(**ways):
        return {way: never_loses.Answers(ms, [*texts], 2 * ms) for way, (ms, texts) in ways.items()}

    slow = told(auto=(20.0, "ab"), plain=(10.0, "ab"), control=(10.0, "ax"))
    fast = told(auto=(5.0, "ab"), plain=(10.0, "ab"), control=(20.0, "ab"))
    bad = never_loses.row_of(never_loses.Cell("a", 0.0, 2), [slow])
    good = never_loses.row_of(never_loses.Cell("b", 0.0, 16), [fast, fast, slow])
    assert (bad["auto_of_plain"], bad["control"], good["auto_of_plain"]) == (0.5, 1.0, 2.0)
    assert (bad["differing"], bad["control_differing"], good["control_differing"]) == (0, 1, 1)
    whole, two, _ = never_loses.summary([bad, good])
    assert (whole["worst"], whole["mean"], whole["below_1"]) == (0.5, 1.0, 0.5)
    assert (two["clients"], two["worst"], whole["control_differing"]) == ("2", 0.5, 2)
    assert (whole["control_worst"], whole["control_below_1"]) == (0.5, 0.5)


def test_a_mixture_has_the_dense_model_s_logits_and_its_tokens_choose_all_experts(tiny_folder):
    dense = AutoModelForCausalLM.from_pretrained(tiny_folder("llama")).eval()
    dense.model.embed_tokens.weight.data += 1  # what tokens have in common outweighs the rest
    ids = torch.randint(4096, (1, 100), generator=torch.Generator().manual_seed(0))
    copied = mixture_of(dense, ids.tolist())
    chosen = list[torch.Tensor]()
    for layer in copied.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *told: chosen.append(told[-1][-1]))
    with torch.no_grad():
        torch.testing.assert_close(copied(ids).logits, dense(ids).logits, atol=1e-5, rtol=1e-5)
    assert len(chosen) == len(dense.model.layers)
    for experts in chosen:  # two of a token
        counts = experts.flatten().bincount(minlength=8)
        assert counts.sum() == 2 * 100 and 0 < counts.min() and counts.max() < 70, counts


def test_a_mixture_is_made_once_and_has_the_dense_model_s_texts(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.mixture.cache_folder", lambda: tmp_path)
    place = str(tiny_folder("llama"))
    folder = folder_of(place)
    monkeypatch.setattr("benchmarks.mixture.load_pretrained", None)
    assert folder_of(place) == folder
    texts = []
    for model in (place, folder):
        engine = bench.load_engine(model=model, drafter="none", fixed_k=True)
        requests = [Request(prompt, 12) for prompt in ([5, 6, 7], [900])]
        texts.append([one.output for one in bench.run_together(engine, requests)])
    assert engine.target.has_experts and texts[0] == texts[1]


def test_an_audition_ranks_what_fits_and_ends_with_a_command_line(measure, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("1, 2, 1, 2,\n\ndef main():\n")
    document = measure(f"audition --model embedded --prompts {path} --tokens 8 --runs 2 --k 3")
    rows, (advice,) = document["results"], document["advice"]
    names = {row["drafter"] for row in rows}
    assert names == {row["drafter"] for row in document["accepted"]} | {"none"}
    columns = [list(row)[2:] for row in document["accepted"]]
    assert columns == [["tok_pass", "at_1", "at_2", "at_3"]] * (len(names) - 1)
    assert names - {"tree"} == {"none", "ngram", "suffix", "draft_model", "mtp", "auto"}
    assert all(row["equal"] for row in rows)
    speeds = [row["of_plain"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert next(row["tok_pass"] for row in rows if row["drafter"] == "none") == 1
    command, _, drafter = advice["command_line"].partition(" --drafter ")
    assert command == "python 08_speculative_decoding.py --port 5000 --model embedded"
    assert drafter.split()[0] in (rows[0]["drafter"], "none")


@pytest.mark.parametrize(("quartile", "ending"), [
    (1.01, "--draft-model 'a b' --drafter ngram --num-speculative-tokens 6"),
    (0.99, "--draft-model 'a b' --drafter none"),
])  # fmt: skip
def test_an_audition_recommends_only_what_pays(quartile, ending):
    options = Namespace(model=bench.Options.model, draft_model="a b", eagle3=None, dflash=None,
                      dtype="auto", quantize=None, k=6)  # fmt: skip
    row = {"drafter": "ngram", "of_plain": 1.2, "quartiles": [quartile, 1.4]}
    advised = audition.advice([row, {"drafter": "none"}], options)
    assert advised["command_line"] == f"python 08_speculative_decoding.py --port 5000 {ending}"
    assert ("does not pay" in advised["found"]) == (quartile < 1)


UNREADABLE = {
    "": "there are no prompts",
    '{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}': "a name stands twice",
    '{"prompt": "a"}\n["b"]': "prompt 2 is not an object with the field prompt",
    '{"prompt": ""}': "prompt 1 is not an object",
}


def test_prompts_have_a_name_or_a_number_and_what_cannot_be_read_is_one_line(tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a b"}\n\n{"name": "x", "prompt": "c"}\n')
    assert audition.prompts_of(path) == {"1": "a b", "x": "c"}
    for text, reason in UNREADABLE.items():
        path.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            audition.main(["--model", "embedded", "--prompts", str(path)])
        error = capsys.readouterr().err
        assert error.startswith("error: ") and reason in error and error.count("\n") == 1


def test_a_gguf_file_is_written_anew_with_other_weights(tmp_path):
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    write(old, TINY)
    retype(str(old), str(new), "q8_0")
    before, after = gguf.GGUFReader(old), gguf.GGUFReader(new)
    fields = {name: field.contents() for name, field in after.fields.items()}
    for name, field in before.fields.items():
        assert name.startswith("GGUF.") or fields[name] == field.contents()
    for ours, theirs in zip(before.tensors, after.tensors, strict=True):
        is_matrix = len(ours.shape) > 1
        assert theirs.tensor_type.name == ("Q8_0" if is_matrix else "F32")
        one, other = (gguf.quants.dequantize(t.data, t.tensor_type) for t in (ours, theirs))
        assert one.shape == other.shape and abs(one - other).max() <= abs(one).max() / 127


def test_what_a_server_says_of_a_chat_is_read_from_its_stream(chat_folder):
    with serving("--model", str(chat_folder("llama"))) as server:
        one, other = pair.write(server, {"drafter": "ngram"}, ["a", "c"], 3)
        for prompt, written in (("a", one), ("c", other)):
            answer = server.generate(prompt=prompt, chat=True, max_tokens=3)[1]
            numbers = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
            assert written[:3] == (answer["text"], *numbers) and 0 < written.first_ms <= written.ms
        with pytest.raises(servers.Lost, match="status 400, not 200: .*drafter"):
            pair.write(server, {"drafter": "nobody"}, ["b"], 3)


def test_the_slowest_prompt_of_a_way_counts_as_a_median_of_runs():
    def calls(*runs):
        return bench.Calls([], [[pair.Written("", 1, 11, 5.0, 5.0 + ms) for ms in r] for r in runs])

    runs = [(100, 60), (100, 60), (100, 60)], [(50, 80), (400, 50), (80, 75)]
    methods = dict(zip(("ours, none", "ours, auto"), runs, strict=True)) | {pair.PLAIN: runs[0]}
    timed = {(method, 0): calls(*times) for method, times in methods.items()}
    rows = {row["who"]: row for row in pair.rows_of("code", timed)}
    assert rows["ours, auto"]["worst_of_none"] == 0.8  # 2, .25, 1.25; and .75, 1.2, .8
    assert rows["ours, none"]["worst_of_none"] == 1 and rows[pair.PLAIN]["worst_of_none"] is None
    assert rows["ours, auto"]["of_plain"] == 1.032 and rows["ours, none"]["tokens_per_s"] == 125


def test_a_server_is_measured_and_ended(tmp_path):
    (file := tmp_path / "a").write_bytes(bytes(1 << 21))
    server = servers.Server([sys.executable, "-c", "import time; time.sleep(60)"])
    assert server.is_alive and 0 < server.own_mib() <= server.own_mib("VmHWM")
    row = pair.own_memory(server, Namespace(target=file, draft=None))
    assert row["python_mib"] > 50 and row["own_mib"] <= row["most_own_mib"]
    assert row["of_files"] == pytest.approx((row["own_mib"] - row["python_mib"]) / 2, abs=0.02)
    assert server.stop() == -signal.SIGTERM and not server.is_alive


def test_the_benchmark_of_the_server_finds_the_same_texts(measure):
    few = "--tokens 4 --runs 1 --prompts 2 --clients 1 2 --drafters none"
    document = measure(f"served --cases embedded {few}")
    assert [row["clients"] for row in document["results"]] == [1, 2]
    for row in document["results"]:
        assert row["identical"] and row["whole"] > 0 and row["streamed"] > 0


def test_served_speeds_are_in_those_of_the_engine_s_own_process():
    def calls(place, *ms):
        tokens = [[1] if place == "here" else [2]]
        return bench.Calls([], [(each, each / 2, tokens) for each in ms])

    times = {"here": (10.0, 30.0), "whole": (20.0, 60.0), "streamed": (40.0, 120.0)}
    timed = {(place, 8, 0): calls(place, *ms) for place, ms in times.items()}
    timed["here", 1, 0] = calls("here", 10.0, 30.0)
    row = served.row_of(timed, 8)
    assert row["whole"] == 0.5 and row["streamed_quartiles"] == [0.25, 0.25]
    assert row["first_ms"] == 10.0 and row["first_later_ms"] == 30.0  # 15 and 45
    assert not row["identical"]


def test_int8_is_near_float32_and_smaller(measure):
    document = measure("quality --model embedded --tokens 300")
    floats, halves, integers = document["quality"]
    assert floats["agree"] == 1 and floats["overlap"] == pytest.approx(1, abs=1e-3)
    assert 0.9 < integers["agree"] <= 1 and 0.9 < integers["overlap"] < 1
    assert integers["bytes_per_weight"] < halves["bytes_per_weight"] < floats["bytes_per_weight"]


@pytest.mark.slow
def test_auto_loses_to_no_drafter_by_more_than_five_percent_on_any_kind_of_prompt(capsys):
    fixed_clock.main(["--json"])
    rows = json.loads(capsys.readouterr().out)["results"]
    assert {row["prompts"] for row in rows} == {"all", "code", "easy", "hard", "repetitive"}
    assert {row["prompts"]: row["of_best"] for row in rows if row["of_best"] < 0.95} == {}


def test_under_a_fixed_clock_times_are_what_the_costs_say(measure):
    """Plain decoding has a pass of one row for each token behind the first."""
    few = "fixed_clock --tokens 24 --k 2 --other-ms 0 --pass-ms 4 --row-ms 0 --step-ms"
    cheap, dear = (measure(f"{few} {step}")["results"][-1] for step in (0.001, 4))
    assert cheap["prompts"] == dear["prompts"] == "all" and cheap["ngram"] == dear["ngram"]
    assert min(cheap[name] for name in ("draft_model", "mtp", "auto")) > 1.2
    assert 0.8 < dear["mtp"] <= 1


def test_on_a_machine_that_is_made_up_no_kind_of_text_loses_to_plain_decoding(measure):
    """Texts that end soon are read by no draft model where others last."""
    words = "--machines pair --clients 1 --temperatures 0 0.8 --rounds 10 --seeds 1"
    rows = measure(f"simulated {words}")["results"]
    assert rows == measure(f"simulated {words}")["results"]  # no clock decides
    greedy, sampled = rows
    assert min(greedy["speedup"], sampled["speedup"]) > 1.1, rows
    assert greedy["worst"] > 0.95 and sampled["worst"] > 0.9, rows


def test_a_table_aligns_and_marks_what_is_missing(capsys):
    rows = [{"name": "a", "x_ms": 1.5, "is_same": True}, {"name": "bc", "x_ms": 2, "is_same": None}]
    bench.print_table(rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["name", "x", "ms", "is", "same"], ["a", "1.5", "yes"], ["bc", "2", "–"]]


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("peers", "--k 17", "must be from"),
    ("soak", "--minutes 0", "must be more than 0"),
    ("audition", "--model embedded --raw", "error: --raw goes with --prompts\n"),
    ("pair", f"--llama /nope --target {__file__}", "there is no file /nope"),
    ("pair", f"--llama {sys.executable} --target /x.gguf", "there is no file /x.gguf"),
])  # fmt: skip
def test_benchmarks_refuse_what_measures_nothing(name, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the soak


@pytest.mark.slow
def test_a_short_soak_loses_nothing_and_leaks_nothing():
    """Of all kinds of clients. How fast /health was is the benchmark's affair, not a test's."""
    few = "--minutes 0.1 --warm-up 5 --clients 8 --sample 6 --json"
    command = [sys.executable, "-m", "benchmarks.soak", *few.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    document = json.loads(result.stdout)
    assert [fault for fault in document["faults"] if "p99" not in fault] == [], result.stderr
    in_all = document["requests"][-1]
    assert in_all["answered"] > 20 and in_all["refused"] > 0 and in_all["left_early"] > 0
    assert document["rerun"] == [{"kept": 6, "sent_again": 6, "differ": 0}]


SOUND = {
    "requests": [{"lost": 0, "wrong": 0}],
    "throughput": [{"requests": 20_000}],
    "memory": [{"quarter_1": 600.0, "quarter_2": 602.0, "quarter_3": 606.0, "quarter_4": 607.0}],
    "at_rest": [{"at_rest": "threads", "leaked": 0}],
    "latency": [{"answered": "GET /health", "p99_ms": 5.0}],
    "rerun": [{"kept": 9, "sent_again": 9, "differ": 0}],
    "server": [{"exit_code": 0, "tracebacks": 0}],
}


@pytest.mark.parametrize(("part", "changes", "fault"), [
    ("requests", {"lost": 2}, "2 lost"),
    ("at_rest", {"leaked": 3}, "3 threads leaked"),
    ("memory", {"quarter_4": 607.2}, "memory grew by 5.2 > 5 MiB in the second half"),
    ("latency", {"p99_ms": 100.1}, "p99 of /health missed: 100.1 > 100 ms"),
    ("rerun", {"sent_again": 8}, "not all of the sample could be sent again"),
    ("server", {"exit_code": -9}, "exit code -9 after SIGTERM"),
    ("server", {"tracebacks": 1}, "a traceback in the log"),
])  # fmt: skip
def test_the_soak_calls_a_fault_what_is_one(part, changes, fault):
    assert soak.find_faults(SOUND) == []
    assert soak.find_faults(SOUND | {part: [SOUND[part][0] | changes]}) == [fault]


ASKED = {"prompt": "a", "max_tokens": 2, "seed": 7, "stop": ["z"], "stream": True}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
ANSWER = {
    "text": "bc", "token_ids": [5, 6], "finish_reason": "length", "seed": 7, "warnings": [],
    "usage": USAGE, "timings": {"predicted_n": 2},
}  # fmt: skip
CYCLES = [{"step": i, "text": "bc"[i], "tokens": [{"id": 5 + i}]} for i in range(2)]


@pytest.mark.parametrize("changes", [
    {"token_ids": [5]}, {"seed": 8}, {"warnings": ["?"]}, {"text": "bz"}, {"text": "bd"},
    {"finish_reason": "error"}, {"timings": {"predicted_n": 1}},
    {"usage": USAGE | {"total_tokens": 4}},
], ids=str)  # fmt: skip
def test_the_soak_s_clients_see_that_an_answer_is_wrong(changes):
    assert soak.read_stream(ASKED, *CYCLES, ANSWER).token_ids == [5, 6]
    for events in ([*CYCLES, ANSWER | changes], [CYCLES[0], ANSWER]):
        with pytest.raises(soak.Wrong):
            soak.read_stream(ASKED, *events)


@pytest.mark.parametrize("send", [soak.send_other, lambda client: client.get(ASKED)])
def test_the_soak_s_clients_come_again_while_the_queue_is_full(send, monkeypatch):
    """Bad input, too: the server need not look at what it has no room for."""
    refusal = b'{"error": {"message": "full", "type": "", "param": null, "code": "queue_full"}}'
    full = soak.servers.Full(Mock(headers={"Retry-After": "0"}, read=lambda: refusal))
    told = soak.servers.Told((1.0,), (*CYCLES, ANSWER))
    answer = nullcontext(Mock(read=lambda: refusal))
    monkeypatch.setattr(soak.servers, "answering", Mock(side_effect=[full, answer]))
    monkeypatch.setattr(soak.servers, "ask", Mock(side_effect=[full, told]))
    client = soak.Client(0, soak.Tally(), random.Random(0), [], "some")
    send(client)
    (_, sent), (_, again), (_, outcome) = client.tally.seen
    assert (sent, again) == ("sent", "retried_429") and outcome in ("answered", "refused")


def test_the_soak_sees_that_an_answer_differs_from_the_one_alone(capsys):
    text, tally = soak.read_answer(ASKED, ANSWER), soak.Tally()
    client = soak.Client(0, tally, random.Random(0), [])
    for now, differs in ((text, 0), (text._replace(token_ids=[5, 9]), 1)):
        client.get = lambda ask, now=now: now
        outcome = soak.send_again(client, [(ASKED, text)])
        assert outcome == {"kept": 1, "sent_again": 1, "differ": differs}
    assert tally.seen.count(("again, alone", "wrong")) == 1 and "WRONG" in capsys.readouterr().err
