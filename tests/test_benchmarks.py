"""Benchmarks run as README says, and their last line is one JSON document."""

import importlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from conftest import ROOT
from tqdm import tqdm

import benchmarks
from benchmarks import llama_peer, plots, soak, soak_clients
from benchmarks.batch import of_best
from benchmarks.forwards import weight_bytes

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


def call(name, *arguments):
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    *table, line = result.stdout.splitlines()
    return table, json.loads(line)


def test_the_benchmark_of_losslessness_shows_a_drafter_that_lies_about_its_q(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    drafter = f"{tmp_path}/own.py:Liar"
    few = "--max-tokens", "6", "--seeds", "1"
    table, document = call("lossless", "--samples", "160", *few, "--drafter", drafter)
    rows = document["rows"]
    assert len(table) == 2 + len(rows) + 2 + len(document["kept"]) == 2 + 7 * 4 + 2 + 4 * 3
    for row in document["kept"]:
        assert row["coupled"]["tokens_per_pass"] > 0.5 * row["rejection"]["tokens_per_pass"] > 0.5
    assert all(row["coupled_differing"] == 0 for row in rows)  # whoever lies
    views = ("2nd token", "3rd token", "all three")
    for row in rows:
        smallest = min(row[view]["p_value"] for view in views)
        if row["drafter"] != "liar":
            assert smallest > 1e-6
        elif row["sampling"] == "temperature 1.3":
            assert smallest < 1e-6


SAMPLING_METHODS = "coupled", "rejection", "transformers"


def test_the_benchmark_of_sampling_times_every_case():
    table, document = call("sampling", "--vocab", "6400", "--runs", "1")
    assert len(table) == 1 + len(document["rows"]) == 17
    assert all(min(row[f"{name}_ms"] for name in SAMPLING_METHODS) > 0 for row in document["rows"])


def test_the_best_of_several_is_chosen_by_the_other_runs():
    assert of_best([10.0, 10.0], [[9.0, 11.0], [12.0, 12.0]]) == 1.0
    lucky = [[1.0, 20.0, 20.0], [20.0, 1.0, 20.0], [20.0, 20.0, 1.0], [10.0, 10.0, 10.0]]
    assert of_best([10.0] * 3, lucky) == 1.0  # none of the lucky runs counts
    assert of_best([10.0], [[5.0], [8.0]]) == 0.5


def test_the_benchmark_of_batches_compares_outputs_and_measures_gaps():
    table, document = call("batch", "--tokens", "3", "--runs", "1")
    assert len(document["batches"]) == 5 * 8 and len(document["gaps"]) == 5
    assert len(table) == 1 + 40 + 2 + 5
    assert all(row["identical"] and row["ratio"] > 0 for row in document["batches"])
    assert all(row["longest_gap_ms"] > 0 for row in document["gaps"])


@pytest.mark.parametrize("name", ["lossless", "sampling", "batch"])
def test_a_benchmark_refuses_what_measures_nothing(name):
    option = {"lossless": "--samples", "sampling": "--runs", "batch": "--runs"}[name]
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", option, "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "must be from" in result.stderr
    assert "Traceback" not in result.stderr


# In this process, which has torch and the models' code already: a second or two for each.


@pytest.fixture
def measure(capsys, monkeypatch):
    """The table's lines and the document of a benchmark's main."""

    def run(name, *arguments):
        monkeypatch.setattr(benchmarks, "tqdm", partial(tqdm, disable=True))
        importlib.import_module(f"benchmarks.{name}").main([*map(str, arguments), "--runs", "1"])
        *table, line = capsys.readouterr().out.splitlines()
        document = json.loads(line)
        assert document["command"].startswith(f"python -m benchmarks.{name} ")
        assert document["versions"]["torch"] == torch.__version__
        assert document["hardware"]["threads"] == torch.get_num_threads()
        return table, document

    return run


def test_the_benchmark_of_latency_measures_models_verify_and_what_follows(measure):
    table, document = measure("latency", "--context", 17, "--tokens", 6)
    assert [row["model"] for row in document["models"]] == ["target", "draft"]
    assert all(0 < row["floor_ms"] < row["p90_ms"] for row in document["models"])
    assert [row["rows"] for row in document["verify"]] == list(range(1, 18))
    assert document["verify"][0]["t_verify"] == 1
    assert {row["drafter"] for row in document["drafters"]} == {"draft_model", "mtp"}
    assert all(row["c"] > 0 for row in document["drafters"])
    assert len(document["speculation"]) == 3 * 9
    assert len(table) > 2 + 17 + 2 + 27


def test_a_step_reads_each_weight_once_but_few_rows_of_an_embedding():
    config = transformers.AutoConfig.for_model("qwen3", **benchmarks.SHAPES["tiny"])
    tied = weight_bytes(config, torch.bfloat16)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert tied == 2 * model.num_parameters()
    config.tie_word_embeddings = False
    assert weight_bytes(config, torch.bfloat16) == tied


def test_the_benchmark_of_k_compares_outputs_and_names_the_best(measure):
    _, document = measure("sweep", "--k", 3, "--tokens", 6, "--temperature", 0, 1.5)
    rows = document["results"]
    assert len(rows) == 2 * 2 * 3 * 2 and {row["k"] for row in rows} == {0, 3}
    for row in rows:
        assert row["identical"] is True  # sampled as well
        assert (row["acceptance_rate"] is None) or row["k"]
    for best in document["best"]:
        of = {r["k"]: r["tokens_per_s"] for r in rows if r.items() >= key_of(best).items()}
        assert of[best["best_k"]] == max(of.values()) == best["tokens_per_s"]


def key_of(row):
    return {key: row[key] for key in ("temperature", "kind", "drafter")}


def test_the_audition_judges_every_drafter_and_draft_models_of_ones_own(measure):
    folder = ROOT / "demo_models" / "draft"
    _, document = measure(
        "audition", "--draft-model", folder, "--kinds", "easy", "--tokens", 12, "--k", 3
    )
    rows = {row["drafter"]: row for row in document["results"]}
    assert list(rows) == ["none", "ngram", "draft_model", "mtp", "draft_model draft"]
    assert rows["draft_model"]["alpha"] == rows["draft_model draft"]["alpha"] > 0
    assert rows["none"]["verdict"] == "the baseline"
    for row in rows.values():
        assert row["identical"]
        if row["drafter"] != "none":
            assert (row["verdict"] == "earns its keep") == (row["speedup"] > 1) or (
                row["speedup"] == 1
            )


def test_the_benchmark_against_generate_finds_equal_outputs(measure):
    _, document = measure("peers", "--kinds", "easy", "--tokens", 8, "--k", 3)
    assert [r["method"] for r in document["results"]] == ["greedy", "ngram", "draft_model", "mtp"]
    for row in document["results"]:
        assert row["equal_tokens"] == row["num_tokens"] == 3 * 8
        assert row["equal_outputs"] == row["num_outputs"] == 3
        # A pass a request is saved there by drafting before the prompt was read.
        assert row["ours_passes"] <= row["generate_passes"] + 3
    assert document["results"][0]["ours_passes"] == document["results"][0]["generate_passes"] == 24


def test_the_benchmark_against_generate_takes_models_of_random_weights(measure):
    _, document = measure("peers", "--shape", "tiny", "--context", 40, "--tokens", 8)
    assert all(
        row["decode_ratio"] is None or row["decode_ratio"] > 0 for row in document["results"]
    )
    assert document["prompts"] == {"random": {"pattern": 40}}
    assert [row["equal_tokens"] for row in document["results"]] == [8, 8]


def test_the_benchmark_against_generate_counts_prompts_and_leaves_them_out(measure):
    _, document = measure("peers", "--shape", "tiny", "--context", 1500, "--tokens", 4)
    assert all(row["decode_ratio"] > 0 for row in document["results"])
    assert document["results"][0]["decode_ratio"] != document["results"][0]["ratio"]


def test_without_llama_cpp_the_rest_is_measured(measure, capsys, monkeypatch):
    monkeypatch.setattr(llama_peer.importlib.util, "find_spec", lambda name: None)
    assert llama_peer.missing() == "llama.cpp is left out: pip install llama-cpp-python gguf"
    _, document = measure("peers", "--shape", "tiny", "--context", 40, "--tokens", 4)
    assert document["results"] and document["llama_cpp"] == []


FAKE_LLAMA = """
import numpy
__version__ = "0"

class Llama:
    def __init__(self, model_path, n_ctx, **options):
        assert options["flash_attn"] is False and options["type_k"] == options["type_v"] == 0
        self.n_tokens, self.scores = 0, numpy.zeros((n_ctx, 50))

    def eval(self, tokens):
        for token in tokens:  # its argmax is the token itself
            self.scores[self.n_tokens] = numpy.arange(50) == token
            self.n_tokens += 1
"""


def test_llama_cpp_works_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = llama_peer.Worker("model.gguf", "float32", 16)
    try:
        assert worker.version == "0"
        assert worker.feed([1, 2, 3], 0)["argmax"] == [1, 2, 3]
        assert worker.feed([7, 8], 2)["argmax"] == [7, 8]
        answer = worker.feed([9], 4)
        assert answer["argmax"] == [9] and answer["ms"] > 0
    finally:
        worker.close()


def test_every_weight_has_a_name_in_llama_cpp():
    config = transformers.AutoConfig.for_model("qwen3", **benchmarks.SHAPES["tiny"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = [llama_peer.name_of(name) for name, _ in model.named_parameters()]
    assert len(set(names)) == len(names) == 2 * 11 + 2
    assert {"token_embd.weight", "blk.1.attn_q_norm.weight", "output_norm.weight"} < set(names)


def test_llama_cpp_agrees_with_us(measure):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    _, document = measure("peers", "--kinds", "easy", "--tokens", 4)
    assert [row["rows"] for row in document["llama_cpp"]] == [1, 6]
    assert all(row["equal_argmax"] for row in document["llama_cpp"])


def test_the_benchmark_of_the_controller_compares_it_with_every_k(measure):
    _, document = measure("controller", "--kinds", "easy", "--tokens", 6, "--k", 1, 3)
    rows, summary = document["results"], document["summary"]
    assert len(rows) == 2 * 3 * 5 and len(summary) == 2 * 5
    for row in rows:
        if row["drafter"] == "none":
            assert row["best"] is None
            continue
        assert row["of_best"] == pytest.approx(row["speedup"] / row["best_speedup"], abs=2e-3)
        assert row["best_speedup"] >= 1 and (row["best"] == "plain" or "K=" in row["best"])
        assert row["drafter"] == "auto" or row["best"].startswith((row["drafter"], "plain"))
    for row in summary:
        of = [r["speedup"] for r in rows if r.items() >= {k: row[k] for k in KEYS}.items()]
        assert row["worst"] == min(of) and row["below_0.97"] == sum(x < 0.97 for x in of)


KEYS = "temperature", "drafter"


def test_the_benchmark_of_caches_works_on_equal_keys(measure):
    _, document = measure("cache", "--context", 8, 600, "--layers", 2)
    assert [row["context"] for row in document["results"]] == [8, 600]
    assert all(row["equal_keys"] and row["ours_us"] > 0 for row in document["results"])


def test_the_benchmark_of_ngrams_compares_searches_that_find_the_same(measure):
    _, document = measure("ngram", "--context", 64, 300)
    assert [row["proposed"] for row in document["results"]] == [5, 5, 0, 0]
    assert all(row["equal_drafts"] for row in document["results"])


def test_a_plot_needs_matplotlib_and_the_table_does_not(measure, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    options = "--context", 64, "--plot", tmp_path / "plot.png"
    table, _ = measure("ngram", *options)
    assert table and not (tmp_path / "plot.png").exists()


def test_a_missing_matplotlib_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plots.save(str(tmp_path / "plot.png"), {"a": {"b": [(1, 2)]}}, "x", "y")
    assert capsys.readouterr().err == (
        "matplotlib is not installed, so there is the table but no plot\n"
    )


def test_a_table_aligns_and_marks_what_is_missing(capsys):
    rows = [{"name": "a", "x_ms": 1.5, "is_same": True}, {"name": "bc", "x_ms": 2, "is_same": None}]
    benchmarks.print_table(rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["name", "x", "ms", "is", "same"], ["a", "1.5", "yes"], ["bc", "2", "–"]]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sweep", ["--kinds", "nonsense"], "no nonsense prompts"),
        ("sweep", ["--temperature", "-1"], "temperature"),
        ("peers", ["--context", "9"], "--context goes with"),
        ("controller", ["--temperature", "x"], "--temperature"),
        ("cache", ["--runs", "0"], "must be from"),
        ("ngram", ["--context", "1"], "must be from"),
        ("latency", ["--tokens", "1"], "must be from"),
        ("audition", ["--k", "17"], "must be from"),
    ],
)
def test_these_benchmarks_refuse_what_measures_nothing(name, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the soak


@pytest.mark.slow
def test_a_short_soak_loses_nothing_and_leaks_nothing(tmp_path):
    """Of all kinds of clients. How fast /health was is the benchmark's affair, not a test's."""
    arguments = ["--minutes", "0.1", "--warm-up", "5", "--clients", "8", "--sample", "6"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *arguments, "--record", tmp_path / "soak.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    document = json.loads(result.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "soak.json").read_text()) == document
    assert [fault for fault in document["faults"] if "p99" not in fault] == [], result.stderr
    in_all = document["requests"][-1]
    assert in_all["answered"] > 20 and in_all["refused"] > 0 and in_all["left_early"] > 0
    assert (in_all["lost"], in_all["wrong"]) == (0, 0)
    assert document["rerun"] == [{"kept": 6, "sent_again": 6, "differ": 0}]
    assert document["server"] == [{"exit_code": 0, "tracebacks": 0}]


SOUND = {
    "requests": [{"lost": 0, "wrong": 0}],
    "at_rest": [{"at_rest": "threads", "leaked": 0}],
    "latency": [{"answered": "GET /health", "p99_ms": 5.0}],
    "rerun": [{"kept": 9, "sent_again": 9, "differ": 0}],
    "server": [{"exit_code": 0, "tracebacks": 0}],
}


@pytest.mark.parametrize(
    ("part", "changes", "fault"),
    [
        ("requests", {"lost": 2}, "2 lost"),
        ("requests", {"wrong": 1}, "1 wrong"),
        ("at_rest", {"leaked": 3}, "3 threads leaked"),
        ("at_rest", {"leaked": None}, "no /health after the load"),
        ("latency", {"p99_ms": 100.1}, "p99 of /health missed: 100.1 > 100 ms"),
        ("rerun", {"sent_again": 8}, "not all of the sample could be sent again"),
        ("server", {"exit_code": -9}, "exit code -9 after SIGTERM"),
        ("server", {"tracebacks": 1}, "a traceback in the log"),
    ],
)
def test_the_soak_calls_a_fault_what_is_one(part, changes, fault):
    assert soak.find_faults(SOUND) == []
    assert soak.find_faults(SOUND | {part: [SOUND[part][0] | changes]}) == [fault]


ASKED = soak_clients.Ask("/generate", {"prompt": "a", "max_tokens": 2, "seed": 7, "stop": ["z"]})
ANSWER = {
    "text": "bc",
    "token_ids": [5, 6],
    "finish_reason": "length",
    "seed": 7,
    "warnings": [],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    "timings": {"predicted_n": 2},
}
CYCLES = [
    {"step": 0, "text": "b", "tokens": [{"id": 5}]},
    {"step": 1, "text": "c", "tokens": [{"id": 6}]},
    ANSWER,
]


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": [5]}, {"seed": 8}, {"warnings": ["?"]}, {"text": "bz"}, {"text": "bd"},
     {"finish_reason": "error"}, {"timings": {"predicted_n": 1}},
     {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 4}}],
    ids=str,
)  # fmt: skip
def test_the_soak_s_clients_see_that_an_answer_is_wrong(changes):
    assert soak_clients.read_stream(ASKED, CYCLES).token_ids == [5, 6]
    with pytest.raises(soak_clients.Wrong):
        soak_clients.read_stream(ASKED, [*CYCLES[:2], ANSWER | changes])
    with pytest.raises(soak_clients.Wrong):
        soak_clients.read_stream(ASKED, [CYCLES[0], ANSWER])
    with pytest.raises(soak_clients.Lost):
        soak_clients.read_stream(ASKED, [*CYCLES[:2], {"error": {"message": "no"}}])


def test_the_soak_sees_that_an_answer_differs_from_the_one_alone(capsys):
    text = soak_clients.read_answer(ASKED, ANSWER)
    client = soak_clients.Client(0, 1.0, soak_clients.Tally(3, 0), random.Random(0), [])
    for now, differs in ((text, 0), (replace(text, token_ids=[5, 9]), 1)):
        client.get = lambda ask, now=now: now
        found = soak.send_again(client, [(ASKED, text)])
        assert found == {"kept": 1, "sent_again": 1, "differ": differs}
    assert client.tally.total("wrong") == 1 and "WRONG" in capsys.readouterr().err
