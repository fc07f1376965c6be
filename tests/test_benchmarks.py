"""Each benchmark runs in small with its command, and its last line is one JSON document.

It must find what it is there to find: equal texts, a drafter that lies. What it makes of times is
tested with times that are made up.
"""

import importlib
import json
import random
import signal
import sys
from argparse import Namespace
from functools import partial
from itertools import pairwise, permutations
from unittest.mock import Mock

import gguf
import pytest
import torch
from gguf_files import TINY, write
from started import serving
from tqdm import tqdm

import tools as bench
from runtime.values import RequestError
from server.curve import Curve
from tools import audition, lossless, never_loses, pair, servers
from tools.passes import retype

PROMPTS = {"easy_a": "1, 2, 1, 2,", "hard_b": "def main():"}


def forked(command):
    """In the place of servers.started: forked servers need not import torch."""
    return serving(*command[len(servers.OURS) :])


@pytest.fixture
def measure(capsys, monkeypatch):
    """The document of a benchmark's main, run in this process, which has torch already."""

    def run(command):
        name, *arguments = command.split()
        module = importlib.import_module(f"tools.{name}")
        monkeypatch.setattr(bench, "tqdm", partial(tqdm, disable=True))
        for reader in (bench, module):
            monkeypatch.setattr(reader, "read_prompts", lambda is_chat=False: PROMPTS, False)
        monkeypatch.setattr(module, "started", forked, raising=False)
        module.main(arguments)
        *table, line = capsys.readouterr().out.splitlines()
        document = json.loads(line)
        assert len(table) > 3
        assert document["command"].startswith(f"python -m tools.{name} ")
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
class Bigram(Drafter):
    name = "bigram"
    def open(self, prompt, sampling, noise):
        return list(prompt)
    def propose(self, state, max_tokens):
        return Draft(state[-max_tokens:])
    def observe(self, state, verdict):
        state += verdict.tokens
class Never(Bigram):
    name = "never"
    def propose(self, state, max_tokens):
        return Draft()
class Liar(Bigram):
    name = "liar"
    def propose(self, state, max_tokens):
        tokens = state[:max_tokens]
        return Draft(tokens, torch.full((len(tokens), 4096), 1 / 4096))  # not what it drew from
"""


@pytest.fixture
def mine(tmp_path):
    (file := tmp_path / "mine.py").write_text(OWN)
    return file


@pytest.mark.slow
def test_losslessness_shows_a_drafter_that_lies_about_its_q(measure, monkeypatch, mine):
    name = "temperature 1.3"
    monkeypatch.setattr(lossless, "SAMPLINGS", {name: lossless.SAMPLINGS[name]})
    document = measure(f"lossless --samples 160 --drafter {mine}:Liar")
    for row in document["rows"]:
        assert row["coupled_differing"] == 0  # whoever lies
        smallest = min(row[view]["p_value"] for view in lossless.VIEWS)
        assert (smallest < 1e-6) == (row["drafter"] == "liar")


@pytest.mark.slow
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


def test_in_the_order_of_pairs_each_kind_comes_behind_each_other_kind():
    order = never_loses.in_order(4, "pairs", None)
    assert {*permutations(range(4), 2)} <= {*pairwise(order)}
    assert never_loses.in_order(1, "pairs", random.Random(0)) == [0]


def test_each_prompt_is_asked_once_in_every_way_and_the_ways_change_places(monkeypatch):
    """Ctrl-C amid a round leaves the whole ones."""
    asked, most = list[tuple[str, str]](), [10**6]

    def at_once(port, route, bodies):
        if len(asked) >= most[0]:
            raise KeyboardInterrupt
        asked.extend((body["drafter"], body["prompt"]) for body in bodies)
        answers = ({"choices": [{"text": body["prompt"]}]} for body in bodies)
        return 1.0, [servers.Told((1.0,), (answer,)) for answer in answers]

    monkeypatch.setattr(never_loses, "at_once", at_once)
    monkeypatch.setattr(bench, "tqdm", partial(tqdm, disable=True))
    server = Namespace(port=0, health=lambda: {"chat_template": False})
    cells = [never_loses.Cell(kind, 0.0, 2) for kind in never_loses.KINDS]
    flags = Namespace(runs=6, clients=[2], tokens=3, order="chance", fixed=[])
    found = never_loses.measure(server, cells, flags)
    texts = [text for drafter, text in asked[2:] if drafter == "auto"]  # behind the warm-up
    assert len({*texts}) == len(texts) == len(cells) * 2 * 6
    assert sorted(text for drafter, text in asked[2:] if drafter == "none") == sorted(texts * 2)
    for told in found.values():  # six rounds have all orders
        assert sorted(map(tuple, told)) == sorted(permutations(("auto", "plain", "control")))
    most[0] = len(asked) + 2 + 4 * 6 - 2  # the warm-up, three whole rounds, most of a fourth
    assert [*map(len, never_loses.measure(server, cells, flags).values())] == [1, 1, 1]


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


# ---------------------------------------------------------------------------------- auditions


@pytest.fixture
def audition_of(capsys, monkeypatch, demo_engine, tmp_path):
    """Audition the engine that is loaded, on two prompts: (exit status, stdout, stderr)."""
    monkeypatch.setattr(bench.core, "load_engine", lambda options: demo_engine)
    monkeypatch.setattr(audition, "Measurement", lambda *_: Mock(is_done=True, curve=Curve()))
    (prompts := tmp_path / "own.txt").write_text("1, 2, 1, 2,\n\ndef main():\n")

    def run(command):
        status, few = 0, f"--model embedded --prompts {prompts} --tokens 8"
        try:
            audition.main([*few.split(), *command.split()])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


def test_an_audition_has_every_drafter_draft_and_its_document_is_all_of_stdout(audition_of):
    """The announcement comes on stderr then. Each text of a turn is that of plain decoding."""
    status, out, err = audition_of("--minutes 0.0001 --json")
    document = json.loads(out)
    rows = {row["drafter"]: row for row in document["results"]}
    fixed = [f"{each}, K=3" for each in ("ngram", "suffix", "draft_model", "mtp")]
    assert status == 0 and {*rows} == {"none", "none again", *fixed, "auto"}
    assert err.startswith("A race of plain decoding") and "0.0001 minutes" in err
    assert all(row["differing"] == 0 for row in rows.values())
    speeds = [row["of_plain"] for row in document["results"]]
    assert speeds == sorted(speeds, reverse=True) and rows["none"]["of_plain"] == 1
    assert rows["none"]["tok_pass"] == rows["none again"]["tok_pass"] == 1
    assert rows["none"]["note"] == "" and rows["none"]["needed"] is None
    assert all(rows[each]["needed"] is not None for each in fixed[2:])
    shares = {row["drafter"]: row["accepted_at"] for row in document["accepted"]}
    assert 1 <= len(shares["mtp, K=3"]) <= 3 and "none" not in shares


def test_an_audition_races_drafters_from_files_and_says_who_never_drafted(
    audition_of, mine, failing_drafter
):
    """A fault of theirs is one line, with its place, and so is a name that is taken."""
    few = "--minutes 0.0001 --k 2 --drafters"
    status, out, _ = audition_of(f"{few} {mine}:Bigram {mine}:Never auto none")
    notes = {line.split(",")[0]: line for line in out.splitlines() if ", K=2" in line}
    assert status == 0 and notes["never"].endswith("never drafted")
    assert not notes["bigram"].endswith("never drafted")
    status, _, err = audition_of(f"{few} {failing_drafter[1]}")
    assert status == 2 and "error: a request was not done as asked: drafter fails failed" in err
    assert "own.py, line" in err and "Traceback" not in err
    mine.write_text(OWN.replace('"bigram"', '"ngram"'))
    assert audition_of(f"{few} {mine}:Bigram")[::2] == (
        2, "error: the name 'ngram' is taken: give your drafter another\n"
    )  # fmt: skip


def test_an_audition_takes_the_server_s_options_for_models(monkeypatch):
    loaded = Mock(side_effect=ValueError("no more"))
    monkeypatch.setattr(bench.core, "load_engine", loaded)
    with pytest.raises(SystemExit):
        audition.main("--model embedded --dtype packed --mtp head".split())
    options = loaded.call_args.args[0]
    assert (options.model, options.dtype, options.mtp) == ("embedded", "packed", "head")
    assert (options.drafter, options.suffix_cache, options.prefix_cache_mb) == ("auto", 0, 0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: [seconds]."""
    now = [0.0]
    monkeypatch.setattr(audition, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "tqdm", partial(tqdm, disable=True))
    return now


@pytest.mark.parametrize(("limit_s", "turns"), [(0.1, 1), (79, 3), (80, 4)])
def test_turns_take_all_ways_and_end_before_the_time_is_over(clock, limit_s, turns):
    """A turn of four runs takes 20 s here. One is had whatever it takes."""
    asked, ways = list[tuple[str, str]](), {name: {} for name in "abcd"}

    def run(way, prompt):
        asked.append((prompt, way))
        clock[0] += 5
        return bench.Finished([], Mock())

    counts = [len(each) for each in audition.race(run, ways, ["x", "y", "z"], limit_s)]
    assert counts == [*range(1, turns + 1)]
    orders = [tuple(way for _, way in asked[i : i + 4]) for i in range(0, len(asked), 4)]
    assert [prompt for prompt, _ in asked[::4]] == [*"xyzx"][:turns]
    assert {tuple(sorted(order)) for order in orders} == {(*"abcd",)}
    assert len({*orders}) == turns  # no way is always first


def statistics_of(drafted=30, accepted=15, **ms):
    """Ten passes of 10 ms, which gave 11 tokens of the target beside the accepted ones."""
    counts = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted, "prefills": 1}
    fields = {"num_recovered_tokens": 11, "target_passes": 10, "verify_ms": 100.0}
    return bench.Statistics(**counts | fields | ms)


@pytest.mark.parametrize(("runs", "turns"), [(2, []), (6, []), (9, [1]), (25, [1, 2, 4, 5])])
def test_ctrl_c_ends_an_audition_with_the_table_of_whole_turns(
    runs, turns, audition_of, monkeypatch
):
    """Four ways, so four runs warm up. Without a whole turn nothing is told, in one line."""
    done = [[bench.Finished([1], statistics_of())]] * runs
    monkeypatch.setattr(bench, "run_together", Mock(side_effect=[*done, KeyboardInterrupt]))
    status, out, err = audition_of("--drafters ngram auto")
    shown = [int(line.split()[0]) for line in out.splitlines() if " turns, different" in line]
    assert shown == turns and status == (0 if turns else 130), out
    assert ("--port 5000" in out) == bool(turns) and "Traceback" not in err
    assert turns or err.endswith("interrupted\n")


def turns_of(*, drafted=30, accepted=15, **ms):
    """Turns with so many ms of each way."""
    ms[audition.AGAIN] = ms.pop("again")
    turns = []
    for times in zip(*ms.values(), strict=True):
        turns.append({})
        for way, took in zip(ms, times, strict=True):
            is_plain = way in ("none", audition.AGAIN)
            told = statistics_of(0, 0) if is_plain else statistics_of(drafted, accepted)
            turns[-1][way] = audition.Run("p", took, bench.Finished([1], told))
    return turns


QUIET = {"none": [100.0] * 9, "again": [101.0, 99.0, 100.0] * 3}
NOISY = {"none": [100.0] * 9, "again": [150.0, 70.0, 100.0] * 3}


FAST, UNLIKED = QUIET | {"auto": [50.0] * 9}, "Nobody gains more than the noise"


@pytest.mark.parametrize(("ms", "winner", "says"), [
    (QUIET | {"ngram": [97.0] * 9}, "ngram", "Speculation pays here: ngram has 1.03 times"),
    (QUIET | {"ngram": [120.0] * 9}, None, "Speculation does not pay here: ngram has 0.83 times"),
    (NOISY | {"ngram": [80.0] * 9}, None, f"{UNLIKED} (0.41): ngram has 1.25 times"),
    (NOISY | {"ngram": [110.0] * 9}, None, f"{UNLIKED} (0.41): ngram has 0.91 times"),
    # Where one of two plain decodings is slower in all turns.
    ({"none": [109.0] * 99, "again": [100.0] * 99, "ngram": [104.0] * 99}, None,
     f"{UNLIKED} (0.09): ngram has 1.05 times"),
    (QUIET | {"ngram": [80.0] * 9, "auto": [80.5] * 9}, "auto", "Speculation pays here: auto"),
    (QUIET | {"ngram": [70.0] * 9, "auto": [80.0] * 9}, "ngram", "Speculation pays here: ngram"),
    # Of few turns nobody wins by a hair.
    ({"none": [100.0] * 9, "again": [100.0] * 9, "ngram": [95.0] * 9}, "ngram",
     "Speculation pays here: ngram"),
    ({"none": [100.0], "again": [100.0], "ngram": [95.0]}, None, f"{UNLIKED} (0.20): ngram has"),
    # Who never drafted, or had no more tokens a pass, was not faster by drafts.
    (FAST | {"drafted": 0, "accepted": 0}, None, "Nobody drafted enough to tell"),
    (FAST | {"accepted": 0}, None, f"{UNLIKED} (0.02): auto has 2.00 times"),
])  # fmt: skip
def test_who_wins_an_audition_gains_more_than_plain_decoding_differs_from_itself(ms, winner, says):
    best, told = audition.verdict(turns_of(**ms))
    assert best == winner and told[-1].startswith(says)
    assert any("machine is busy" in line for line in told) == (ms["again"] is NOISY["again"])


def test_who_ends_a_text_early_is_not_faster_by_it():
    turns = turns_of(**QUIET, ngram=[50.0] * 9)
    for turn in turns:
        for way, count in (("none", 20), (audition.AGAIN, 20), ("ngram", 10)):
            turn[way] = turn[way]._replace(finished=turn[way].finished._replace(output=[1] * count))
    (row,) = [row for row in audition.table_of(turns) if row["drafter"] == "ngram"]
    assert row["of_plain"] == 1 and row["quartiles"] == [1, 1] and row["tokens_per_s"] == 200


def test_an_audition_gives_the_reason_and_says_whose_texts_differ():
    """30 tokens in 10 passes: .2 passes to draft one, 13 passes' time to verify: .1 each."""
    turns = turns_of(**QUIET, ngram=[50.0] * 9)
    told = statistics_of(draft_ms=60.0, verify_ms=130.0)
    for i, turn in enumerate(turns):
        finished = bench.Finished([2 if i == 3 else 1], told)
        turn["ngram"] = turn["ngram"]._replace(finished=finished)
    says, reason = audition.verdict(turns)[1]
    assert "Texts differ from plain decoding's with ngram" in says
    assert [row["differing"] for row in audition.table_of(turns)] == [1, 0, 0]
    assert reason.endswith(
        "A pass gave 2.50 tokens. To draft a token took 0.20 of a plain pass, and to verify it "
        "0.10, so 0.30 of the drafted tokens must be accepted: 0.50 were."
    )


def test_the_command_line_of_a_winner_names_its_file_and_what_is_not_the_default(
    audition_of, mine, clock, monkeypatch
):
    def together(engine, requests):
        drafts = requests[0].drafter == "bigram"
        clock[0] += 1 if drafts else 10
        return [bench.Finished([1], statistics_of(30 * drafts, 15 * drafts))]

    monkeypatch.setattr(bench, "run_together", together)
    _, out, _ = audition_of(f"--drafters {mine}:Bigram auto")
    begin = "python 08_speculative_decoding.py --port 5000"
    line = f"--drafter {mine}:Bigram --num-speculative-tokens 3 --fixed-k"
    assert "Speculation pays here: bigram, K=3 has 10.00 times" in out
    assert out.splitlines()[-1] == f"{begin} --model embedded {line}"
    fields = {"model": "a b", "dtype": "auto", "fixed_k": True, "num_speculative_tokens": 15}
    line = audition.command_line(fields | {"draft_model": None})
    assert line == f"{begin} --model 'a b' --fixed-k --num-speculative-tokens 15"


def test_k_is_chosen_by_the_cost_curve():
    cheap = {"call_ms": 0.0, "step_ms": 0.1, "read_ms": 0.0}
    passes = {1: 10.0, 2: 10.1, 3: 10.2, 4: 10.3, 6: 11.0, 8: 14.0}
    curve = Curve(passes, {"head": cheap, "model": cheap | {"step_ms": 5.0}})
    assert [audition.best_k(curve, name) for name in ("head", "model", "ngram")] == [5, 1, 5]
    assert audition.best_k(Curve(), "head") == 3


# ---------------------------------------------------------------------------------- servers


def test_a_gguf_file_is_written_anew_with_other_weights(tmp_path):
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    write(old, TINY)
    retype(str(old), str(new), "q8_0")
    before, after = gguf.GGUFReader(old), gguf.GGUFReader(new)
    for name, field in before.fields.items():
        assert name.startswith("GGUF.") or after.fields[name].contents() == field.contents()
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


def test_speeds_are_medians_of_runs_and_the_slowest_prompt_of_a_way_counts():
    assert bench.speedup([10, 30, 20], [5, 10, 20]) == bench.Spread(2.0, [1.5, 2.5])
    plain, auto = [(100, 60), (100, 60), (100, 60)], [(50, 80), (400, 50), (80, 75)]
    timed = {}
    for method, runs in {"ours, none": plain, "ours, auto": auto, pair.PLAIN: plain}.items():
        told = [[pair.Written("", 1, 11, 5.0, 5.0 + ms) for ms in each] for each in runs]
        timed[method, 0] = bench.Calls([], told)
    rows = {row["who"]: row for row in pair.rows_of("code", timed)}
    assert rows["ours, auto"]["worst_of_none"] == 0.8  # 2, .25, 1.25; and .75, 1.2, .8
    assert rows["ours, none"]["worst_of_none"] == 1 and rows[pair.PLAIN]["worst_of_none"] is None
    assert rows["ours, auto"]["of_plain"] == 1.032 and rows["ours, none"]["tokens_per_s"] == 125
    timed["ours, auto", 0].results[0][0] = pair.Written("other", 1, 11, 5.0, 55.0)
    rows = {row["who"]: row for row in pair.rows_of("code", timed)}  # the first run alone differs
    assert rows["ours, none"]["equal"] and not rows["ours, auto"]["equal"]


def test_a_prompt_is_a_line_whatever_else_it_holds(tmp_path):
    (file := tmp_path / "prompts.jsonl").write_text('{"prompt": "a\u2028b"}\n\n', "utf-8")
    assert bench.prompts_of(file) == {"1": "a\u2028b"}


def test_a_server_is_measured_and_ended(tmp_path):
    (file := tmp_path / "a").write_bytes(bytes(1 << 21))
    server = servers.Server([sys.executable, "-c", "import time; time.sleep(60)"])
    assert server.process.poll() is None and 0 < server.own_mib() <= server.own_mib("VmHWM")
    row = pair.own_memory(server, Namespace(target=file, draft=None))
    assert row["python_mib"] > 50 and row["own_mib"] <= row["most_own_mib"]
    assert row["of_files"] == pytest.approx((row["own_mib"] - row["python_mib"]) / 2, abs=0.02)
    assert server.stop() == -signal.SIGTERM


@pytest.mark.slow
def test_the_benchmark_of_the_server_finds_the_same_texts(measure):
    few = "--tokens 4 --runs 1 --prompts 2 --clients 1 2 --drafters none"
    document = measure(f"served --cases embedded {few}")
    assert [row["clients"] for row in document["results"]] == [1, 2]
    for row in document["results"]:
        assert row["identical"] and row["whole"] > 0 and row["streamed"] > 0


# ---------------------------------------------------------------------------------- mistakes

UNREADABLE = {  # by what is said
    "there are no prompts": "",
    "a name stands twice": '{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}',
    "prompt 2 is not an object with the field prompt": '{"prompt": "a"}\n["b"]',
}


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("peers", "--k 17", "must be from"),
    ("never_loses", "--fixed ngram", "must be a drafter and K, as ngram:5, not ngram"),
    ("never_loses", "--fixed nobody:3", "unknown drafter 'nobody'"),
    ("served", "--drafters nobody", "unknown drafter 'nobody'"),
    ("lossless", "--drafter {mine}:Nobody", "has no class 'Nobody'"),
    ("pair", f"--llama /nope --target {__file__}", "there is no file /nope"),
    ("pair", f"--llama {sys.executable} --target /x.gguf", "there is no file /x.gguf"),
    ("audition", "--drafters nobody", "unknown drafter 'nobody'"),
    ("audition", "--temperature nan", "temperature must be a number from 0 to 100"),
    ("audition", "--drafters ngram /nope.py:Mine", "drafter file '/nope.py' not found"),
    ("audition", "--drafters {mine}:Nobody", "has no class 'Nobody'"),
    ("audition", "--drafters eagle3", "embedded has no eagle3: add --eagle3"),
    ("audition", "--drafters prediction", "drafts only for requests that bring a prediction"),
    ("audition", "--prompts /nope.txt", "/nope.txt"),
    ("audition", "--raw", "--raw goes with --prompts"),
    ("audition", "--minutes 0", "must be more than 0"),
    *(("audition", "--prompts {own}", message) for message in UNREADABLE),
])  # fmt: skip
def test_what_measures_nothing_is_refused_before_anything_is_loaded(
    name, arguments, message, mine, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(bench.core, "load_engine", Mock(side_effect=AssertionError))
    (own := tmp_path / "own.jsonl").write_text(UNREADABLE.get(message, ""))
    model = ["--model", "embedded"] if name == "audition" else []
    with pytest.raises(SystemExit) as ended:
        words = arguments.format(mine=mine, own=own).split()
        importlib.import_module(f"tools.{name}").main([*model, *words])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "") and message in said.err
    assert message not in UNREADABLE or said.err.count("\n") == 1


@pytest.mark.parametrize("error", [RequestError("no"), servers.Lost("no"), OSError("no")], ids=repr)
def test_a_failed_request_ends_a_measurement_and_loses_nothing(error, capsys):
    with bench.kept_at_the_end(lambda: True):
        raise error
    assert capsys.readouterr().err == "ended early: no\n"
    with pytest.raises(type(error)), bench.kept_at_the_end(lambda: False):
        raise error
    with bench.kept_at_the_end(lambda: False):
        raise KeyboardInterrupt
