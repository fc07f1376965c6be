"""A drafter proposes inside vLLM what it proposes here, and --plan writes the lines for that.

Each drafter is measured at the K that the plan recommends, and where nothing pays the lines are of
plain decoding.

The test of a real vLLM is marked `network`, as that has to be started first. It runs the embedded
target, under the name of the family that it computes like, in float32 and without graphs, with
README's drafter by the line that `--plan --drafter mine.py:Bigram` prints (docs/engines.md):

    VLLM_URL=http://127.0.0.1:8000 python -m pytest -n0 -m network tests/test_plan.py
"""

import json
import os
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from server import serving

import demo as terminal
from control.estimates import Costs
from drafters.vllm_proposer import VARIABLE, Proposer
from engines import advice
from messages import Request
from serving.options import Options, parse_arguments
from serving.statistics import Statistics

README = (ROOT / "README.md").read_text("utf-8")
OWN = README[README.index("from drafters import Draft, Drafter") :].split("```")[0]
BROKEN = """
class Broken(Drafter):
    def propose(self, state, max_tokens):
        if len(state) > 4:
            raise RuntimeError("on purpose")
        return Draft([9999])

class Curious(Broken):
    needs_hidden = True
"""

# --------------------------------------------------------------------------------- the proposer


@pytest.fixture
def proposer(monkeypatch, tmp_path):
    """Makes vLLM's proposer for a drafter's name, also of one in mine.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN + BROKEN)

    def make(name, length=50):
        monkeypatch.setenv(VARIABLE, name)
        model = SimpleNamespace(max_model_len=length, get_vocab_size=lambda: 100)
        speculative = SimpleNamespace(num_speculative_tokens=3)
        return Proposer(SimpleNamespace(model_config=model, speculative_config=speculative))

    return make


def propose(made, texts, sampled=None):
    """As vLLM calls it: texts in the rows of its buffer, behind them what is left of others."""
    ids = np.full((8, 9 + max(map(len, texts))), 77, dtype=np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    sampled = sampled or [text[-1:] for text in texts]
    return made.propose(sampled, np.array([len(text) for text in texts]), ids, slot_mappings=None)


def test_a_proposer_drafts_what_the_drafter_does_wherever_a_request_s_row_is(proposer):
    made = proposer("ngram")
    first, second = [1, 2, 3, 1, 2], [5, 6, 5]
    assert propose(made, [first, second]) == [[3, 1, 2], [6, 5, 6]]
    assert propose(made, [[*first, 3, 1, 9], [*second, 7]]) == [[], []]
    second += [7, 5, 6]
    assert propose(made, [second]) == [[5, 7, 5]]  # first has ended
    assert propose(made, [[8, 8], second]) == [[8, 8, 8], [5, 7, 5]]


def test_a_row_without_a_new_token_has_no_draft_and_is_not_lost(proposer):
    made, text = proposer("suffix"), [1, 2, 3, 1, 2]
    assert propose(made, [[4, 4, 4], text], sampled=[[], [2]])[0] == []
    assert propose(made, [text], sampled=[[]]) == [[]]


def test_drafts_end_where_the_context_does(proposer):
    made, text = proposer("ngram", length=10), [1, 2, 1, 2, 1, 2, 1]
    assert [len(d) for d in propose(made, [text, [*text, 2], [*text, 2, 1]])] == [2, 1, 0]


def test_verdicts_are_told_to_a_drafter_from_a_file(proposer):
    made = proposer("mine.py:Bigram")
    assert propose(made, [[1, 2, 3, 4, 1, 2]]) == [[3, 4, 1]]
    assert propose(made, [[1, 2, 3, 4, 1, 2, 3, 4, 5]]) == [[]]
    assert propose(made, [[1, 2, 3, 4, 1, 2, 3, 4, 5, 3, 4]]) == [[5, 3, 4]]


def test_a_drafter_that_fails_costs_the_drafts_and_nothing_else(proposer):
    made = proposer("mine.py:Broken")
    assert propose(made, [[1, 2, 3]]) == [[]]  # 9999 is no id
    assert propose(made, [[1, 2, 3, 4]]) == [[]]
    assert propose(made, [[1, 2, 3, 4, 5, 6], [1] * 6]) == [[], []]


@pytest.mark.parametrize("name", ["mtp", "self_int8", "auto", "mine.py:Curious"])
def test_a_drafter_that_needs_more_than_tokens_is_refused(proposer, name):
    with pytest.raises(ValueError, match="needs more than tokens"):
        proposer(name)


# ------------------------------------------------------------------------------------- the plan


def counted(passes, accepted, drafted):
    return Statistics(target_passes=passes, accepted_at=accepted, drafted_at=drafted)


def test_an_offer_is_tokens_by_time():
    costs = Costs(1000, {"model": 100, "free": 0, "block": 500}, {"block": 4})
    ten = counted(10, [6, 3], [10, 10, 10])
    two = advice.offer("model", ten, costs, 2)
    assert two.tokens_per_pass == pytest.approx(1.9) and two.c == pytest.approx(0.1)
    assert two.cost == pytest.approx(0.2 + 1.04)
    assert two.expected_speedup == pytest.approx(1.9 / (0.2 + 1.04))
    assert two.t_verify_break_even == pytest.approx(1.7)
    assert advice.offer("free", ten, costs, 3).cost == pytest.approx(1.06)
    assert advice.offer("block", ten, costs, 3).cost == pytest.approx(0.5 + 1.06)
    rare = counted(10, [2], [3])
    assert advice.offer("free", rare, costs, 1).cost == pytest.approx(1 + 0.02 * 0.3)


def offers_of(*names, speedup=2.0):
    return [advice.Offer(name, 4, 3.0, 0.1, 1.5, speedup - i / 10, 2.6)
            for i, name in enumerate(names)]  # fmt: skip


def lines_of(offers, **options):
    given = {"model": "T", "max_running": 64} | options
    return advice.command_lines(offers, Options(**given))


STEPS = "--speculative-num-steps 4 --speculative-eagle-topk 1"
MODEL = "--speculative-draft-model-path D"


@pytest.mark.parametrize(
    ("name", "options", "sglang"),
    [
        ("ngram", {}, "NGRAM --speculative-ngram-max-bfs-breadth 1"),
        ("draft_model", {"draft_model": "D"}, f"STANDALONE {MODEL} {STEPS}"),
        ("eagle3", {"eagle3": "D"}, f"EAGLE3 {MODEL} {STEPS}"),
        ("mtp", {}, f"NEXTN {STEPS}"),
        ("dflash", {"dflash": "D"}, f"DFLASH {MODEL}"),
    ],
)
def test_the_best_drafter_is_written_for_both_engines(name, options, sglang):
    lines = lines_of(offers_of(name, "suffix"), **options)
    words = shlex.split(lines["vLLM"])
    told = json.loads(words[words.index("--speculative-config") + 1])
    assert told["num_speculative_tokens"] == 4 and told["method"] == name
    assert told.get("model") == options.get(name)
    assert f"--speculative-algorithm {sglang} --speculative-num-draft-tokens 5" in lines["SGLang"]


def test_a_drafter_of_ours_is_handed_over(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ours = lines_of(offers_of("suffix", "mtp"))["vLLM, with the very drafter that was measured"]
    assert ours.startswith(f"{VARIABLE}=suffix PYTHONPATH={ROOT} vllm serve T ")
    assert '"model": "drafters.vllm_proposer.Proposer"' in ours
    file = tmp_path / "my own.py"
    file.write_text(OWN)
    lines = lines_of(offers_of("bigram", "ngram"), drafter=f"{file}:Bigram")
    assert lines["vLLM"].startswith(f"{VARIABLE}='{file}:Bigram' PYTHONPATH=")
    monkeypatch.chdir(tmp_path)  # vLLM may run in another folder
    assert advice.environment("mine.py:Mine")[VARIABLE] == f"{tmp_path / 'mine.py'}:Mine"
    assert "--speculative-algorithm NGRAM" in lines["SGLang"]  # the best that it has


def test_where_nothing_pays_lines_are_of_plain_decoding():
    lines = lines_of(offers_of("ngram", "mtp", speedup=1.04))
    assert list(lines) == ["vLLM", "SGLang", "this server in front of either"]
    assert not any("speculative-" in line for line in lines.values())


def test_this_server_goes_in_front_of_what_either_line_starts():
    *engines, own = map(shlex.split, lines_of(offers_of("ngram")).values())
    given, options = parse_arguments(own[2:])
    assert given.port and (options.max_running, options.num_speculative_tokens) == (64, 5)
    for words in (words for words in engines if "--port" in words):
        host, port = (words[words.index(flag) + 1] for flag in ("--host", "--port"))
        assert options.engine == f"http://{host}:{port}"


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({"drafter": "ngram"}, {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}),
        ({"drafter": "suffix", "suffix_cache": 0},
         {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
        ({"drafter": "none"}, None),
    ],
)  # fmt: skip
def test_a_drafter_is_written_as_vllm_has_it(given, config):
    written = advice.speculative_config(Options(model="T", num_speculative_tokens=5, **given))
    assert written == (config and {"num_speculative_tokens": 5} | config)


def test_what_is_given_of_sizes_goes_along():
    given = {"max_model_len": 99, "dtype": "bfloat16", "trust_remote_code": True}
    _, options = parse_arguments(["--plan"])
    assert options.fixed_k and options.max_running == 8
    lines = lines_of(offers_of("ngram"), **given)
    assert lines["SGLang"].endswith("--context-length 99 --dtype bfloat16 --trust-remote-code")
    assert lines["vLLM"].endswith("--dtype bfloat16 --trust-remote-code")
    assert " --max-num-seqs 64 " in lines["vLLM"] and "requests 64 " in lines["SGLang"]


def test_a_plan_measures_each_drafter_at_the_k_that_it_recommends(main, demo_engine):
    status, out, err = main("--plan", "--json", "--max-tokens", "24", "--max-running", "9")
    found = json.loads(out)
    assert status == 0 and "drafts of all drafters" in err and "at the best K" in err  # progress
    names = [one["drafter"] for one in found["drafters"]]
    assert {*names} == {*found["reasons"]} == {"ngram", "suffix", "draft_model", "mtp"}
    speeds = [one["expected_speedup"] for one in found["drafters"]]
    assert speeds == sorted(speeds, reverse=True) and found["best"] == names[0]
    texts, best, total = terminal.read_prompts().values(), found["drafters"][0], Statistics()
    for text in texts:
        ids = demo_engine.target.tokenizer(text)["input_ids"]
        request = Request(ids, 24, best["drafter"], best["k"], fixed_k=True, is_alone=True)
        *_, (sequence, _) = demo_engine.generate(request)
        total += sequence.statistics
    tokens = 1 + total.num_accepted_draft_tokens / total.target_passes
    assert best["tokens_per_pass"] == pytest.approx(tokens)
    assert found["left_out"] == ["self_int8", "tree"]
    assert " --max-num-seqs 9 " in found["command_lines"]["vLLM"]


def test_a_plan_for_prompts_of_a_file_is_read_in_a_terminal(main, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("1, 2, 1, 2, 1, 2,\n\nred, green, red, green,\n")
    status, out, _ = main("--plan", "--prompts", str(path), "--max-tokens", "16")
    assert status == 0 and out.startswith("embedded: 2 prompts, at most 16 tokens each\n")
    assert "\nbest: " in out and "\nvLLM:\n  " in out and "\nSGLang:\n  python -m sglang" in out
    assert "\nself_int8, tree and auto have no counterpart there; docs/engines.md" in out


@pytest.mark.parametrize("text", ["", "1, " * 9999])
def test_prompts_that_cannot_be_planned_for_are_one_line(main, tmp_path, text):
    path = tmp_path / "own.txt"
    path.write_text(text)
    status, out, err = main("--plan", "--prompts", str(path))
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


# ------------------------------------------------------------------------------- a real vLLM


@pytest.mark.network
def test_a_drafter_of_ours_drafts_in_a_real_vllm(plain, prompts):
    with serving("--engine", os.environ["VLLM_URL"]) as server:
        for name, prompt in prompts.items():
            status, body = server.generate(prompt=prompt, max_tokens=48)
            assert status == 200 and body["token_ids"] == plain(prompt, 48), name
        figures = server.health()["speculative_decoding"]
        assert figures["num_draft_tokens"] > figures["num_accepted_draft_tokens"] > 0
        print(server.health()["engine"], figures)
