"""The course's last task: a right drafter passes, and each that is wrong gets its own sentence.

A wrong drafter runs without any error, and its texts are plain decoding's: what it proposes is
compared with fresh states, with texts alone, and with the frequencies of what it draws.

    python -m pytest -n0 tests/test_course_drafter.py
"""

import json
import re
import subprocess
import sys
from math import inf
from textwrap import dedent
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, credulous

import tools as bench
from course import __main__, drafter, lab
from drafters import base
from server.options import Options
from tools import audition, examine

SENTENCES, _ = lab.read_mistakes()
SOLUTION = lab.path_of(9, "solutions").read_text("utf-8")
DRAWS = dedent(base.__doc__[base.__doc__.index("    import torch\n") :])  # the model of base.py
README = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]
SKELETON = lab.path_of(9).read_text("utf-8")


@pytest.fixture
def graded(demo_engine, monkeypatch, capsys, tmp_path):
    """Grade a file with this text on five prompts, in this process: (exit status, document)."""
    chats = {kind: dict([*texts.items()][:1]) for kind, texts in bench.CHATS.items()}
    few = {"repetitive_counting": "1, 2, 3, 4, 5,", "code_class": "class Stack:\n    def"}
    monkeypatch.setattr(bench, "CHATS", chats)
    monkeypatch.setattr(examine, "read_prompts", lambda **_: dict(few))
    monkeypatch.setattr(bench.core, "load_engine", lambda options: demo_engine)
    monkeypatch.setattr(audition, "measurement", lambda *_: None)
    monkeypatch.setattr(examine, "DRAWS", 160)

    def alone(command, *_):
        return examine.examine(json.loads(command[1]), Mock(side_effect=lambda it, *_: it)), "", ""

    monkeypatch.setattr(drafter, "alone", alone)

    def run(source, name="Mine", *more):
        (path := tmp_path / "mine.py").write_text(source, "utf-8")
        asked = [f"{path}:{name}", "--model", "embedded", "--tokens", "16", "--json", *more]
        status = drafter.main(asked)
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return status, json.loads(said.out)

    return run


PROPOSED = "return Draft(draft[2:])"
TREE = SOLUTION.replace("max_tokens + 2", "max_tokens + 1").replace(
    PROPOSED, "return Draft([*draft[2:], 5], parents=[*range(-1, len(draft) - 3), -1])"
)


@pytest.mark.parametrize(
    "source, name", [(SOLUTION, "Mine"), (TREE, "Mine"), (README, "Bigram"), (DRAWS, "Dice")]
)
def test_a_right_drafter_passes_also_one_that_draws(graded, source, name):
    """The solution, README's, and the model of base.py, which draws by either rule.

    And a tree: the solution with one guess more at its beginning; where trees are verified, it is
    a branch.
    """
    status, document = graded(source, name)
    assert (status, document["passed"], document["says"]) == (0, True, [])
    assert {row["texts"]: row["equal"] for row in document["equal"]} == dict.fromkeys(
        ("greedy", "sampled", "eight at once"), 6
    )
    kinds = {row["text"] for row in document["results"]}
    own = document["results"][1]["drafter"]
    assert kinds == {"talk", "code", "copying"} and own == name.lower()
    assert {own, "ngram", "suffix", "draft_model", "auto", "none"} == {
        row["drafter"] for row in document["results"]
    }
    (fresh,) = document["fresh_states"]
    assert fresh["differing"] == 0 < fresh["cycles"] and fresh["kept"] == fresh["fresh"]
    assert ("q" in document) == (name == "Dice")
    assert sum(row["cycles"] for row in document["auto"]) > 10
    assert document["command"].endswith(f"mine.py:{name} --model embedded --dtype auto --tokens 16")


KEPT = '        draft = [*state["last"]]'
WRONG = {  # a mistake's name, and which: the change of a drafter that is right
    "rollback": (README, "        return Draft(draft[1:])", """
        self.learn(state, draft[1:])
        return Draft(draft[1:])"""),
    "shared": (README, '        state = {"last": prompt[0], "next": {}}', """
        state = self.state = {"last": prompt[0], "next": self.__dict__.setdefault("next", {})}"""),
    "q": (DRAWS, "torch.stack(probs) if probs", "torch.stack(probs).sqrt().softmax(-1) if probs"),
    "q of a later token": (DRAWS, "[q]", "[(2 * q).softmax(-1) if probs else q]"),
    "q by one noise": (DRAWS, "sample(weights.log(), text", "sample(weights.log(), state['text']"),
    "q where some are dropped": (DRAWS, "text.append(token)\n", """if probs and token % 2:
                break
            text.append(token)
"""),
    "shared by prompt": (README, "        return state", """
        states = self.__dict__.setdefault("states", {})
        return states.setdefault(tuple(prompt), state)"""),
    "shared length": (README, "draft[1:])", "draft[1 : 1 + getattr(self, 'most', 4)])"),
    "no drafts": (SOLUTION, PROPOSED, "return Draft([])"),
    "settings": (SOLUTION, KEPT, f"""
        import torch
        torch.set_default_dtype(torch.float64)
{KEPT}"""),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_drafter_that_is_silently_wrong_gets_the_sentence_of_its_mistake(graded, mistake):
    """Nothing else is said of it. The same drafter without this change passes above."""
    source, old, new = WRONG[mistake]
    assert source.count(old) == 1
    name = re.search(r"class (\w+)\(", source)[1]
    source = source.replace(old, new.lstrip("\n") if old in new else new)
    if "most" in new:
        learns = "self.learn(state, verdict.tokens)"
        source = source.replace(learns, f"self.most = 1 + verdict.accepted\n        {learns}")
    status, document = graded(source, name)
    key = mistake if mistake in SENTENCES else mistake.split()[0]
    begin, *_ = SENTENCES[key].partition("{")
    assert status == 1 and [each.startswith(begin) for each in document["says"]] == [True]
    assert torch.get_default_dtype() == torch.float32


def proposing(code):
    """The solution, which begins each draft with this code."""
    return SOLUTION.replace(KEPT, f"        {code}\n{KEPT}")


READS = "self.read(state, prompt)"
FAULTS = {  # what is told of which file
    r"KeyError: 7\) \(.+mine.py, line \d+\)": proposing("return {}[7]"),
    "more tokens proposed than the 4 asked for": proposing("return Draft([7] * 9)"),
    "proposed 1000000, which is no id below 4096": proposing("return Draft([10**6])"),
    "took longer than 1 s": proposing("while True:\n            pass"),
    "Nothing is written yet: read .+mine.py": SKELETON,
    # One of the exam's prompts has one token only.
    r"^It fails: drafter mine failed \(list index": SOLUTION.replace(
        READS, f"prompt[-2]\n        {READS}"
    ),
    "No module named 'nothing_there'": f"import nothing_there\n{SOLUTION}",
    "this took longer than 1 s": f"while True:\n    pass\n{SOLUTION}",
    "has no class 'Mine'": "import torch",
}


@pytest.mark.parametrize("told", FAULTS)
def test_a_fault_is_told_with_its_line_in_one_sentence(graded, monkeypatch, told):
    """The one that loops never ends, so any limit will do."""
    if "while" in FAULTS[told]:
        monkeypatch.setattr(Options, "drafter_timeout", 1.0)
    status, document = graded(FAULTS[told])
    assert status == 1 and not document["passed"]
    assert [bool(re.search(told, says)) for says in document["says"]] == [True]


def test_without_json_a_cycle_is_shown_and_heads_are_explained(monkeypatch, capsys):
    """Of a finding that has one; the picture is that of the course."""
    cycle = [["a\n", "b"], "c", ["d", "e"], ["d", "f", "g"]]
    told = {"cycles": 9, "differing": 2, "own": "de", "other": "df", "cycle": cycle}
    outcome = 1, "TABLES", {"passed": False, "found": [["shared", told]]}
    monkeypatch.setattr(drafter, "alone", lambda *_: (outcome, "", ""))
    assert drafter.main([f"{lab.path_of(9)}:Mine"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("TABLES\nof plain: ") and "at 2 of 9 cycles, first 'de' where" in said
    assert " a⏎b " in said and "c        d ✓      e ✗" in said


def test_texts_that_differ_are_told_with_the_first_token_that_does(graded, monkeypatch):
    """The engine's `verify` accepts everything here, as no drafter could make it do."""
    monkeypatch.setattr(bench.core, "verify", credulous)
    status, document = graded(SOLUTION)
    assert status == 1 and "differs at its token" in document["says"][0]
    assert document["equal"][0]["equal"] < 6


def test_who_draws_by_a_chance_of_its_own_is_right_and_its_drafts_are_not_compared(graded):
    """Greedy texts and coupled ones keep their tokens whatever is drafted."""
    chance = "import random\n        return Draft(random.choices(range(9), k=max_tokens))"
    status, document = graded(SOLUTION.replace(PROPOSED, chance))
    assert (status, document["says"]) == (0, []) and document["by_chance"]
    assert "two_at_once" not in document and "fresh_states" not in document


def test_what_a_file_prints_is_counted_and_json_is_all_of_stdout(tmp_path):
    """In a process of its own. It is stopped while it prints, and the exit status is 1."""
    (path := tmp_path / "mine.py").write_text("import sys\nwhile True: print('x' * 999)", "utf-8")
    command = [sys.executable, "-m", "course", "drafter", f"{path}:Mine", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert (done.returncode, document["says"]) == (1, [SENTENCES["prints"]])


@pytest.mark.parametrize("given", ["nowhere.py:Mine", "Mine", f"{__file__}:Mine --tokens 0"])
def test_bad_arguments_are_told_before_anything_is_loaded(given, monkeypatch, capsys):
    monkeypatch.setattr(drafter, "alone", lambda *_: pytest.fail("something is loaded"))
    monkeypatch.setattr(sys, "argv", ["course", "drafter", *given.split()])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_model_that_is_not_there_is_no_fault_of_the_drafter(monkeypatch, capsys):
    monkeypatch.setattr(bench.core, "load_engine", Mock(side_effect=OSError("no such model")))
    outcome = examine.examine(
        {"drafter": f"{lab.path_of(9, 'solutions')}:Mine", "tokens": 8, "dtype": "auto",
         "model": "nowhere", "draft_model": None}
    )  # fmt: skip
    monkeypatch.setattr(drafter, "alone", lambda *_: (outcome, "", ""))
    assert drafter.main([f"{lab.path_of(9)}:Mine"]) == 2
    assert capsys.readouterr() == ("", "error: no such model\n")


def test_q_of_a_right_drafter_is_hardly_ever_found_wrong():
    """Of 300 samples from their own q, none is near the limit; another q is far beyond it."""
    chance = torch.Generator().manual_seed(0)
    for i in range(300):
        q = (torch.randn(64, generator=chance) * (i % 5)).softmax(-1)
        drawn = torch.multinomial(q, 400, True, generator=chance).tolist()
        assert examine.p_value(examine.cells_of(drawn, [q] * 400)) > 1e-6
    other = torch.full((64,), 1 / 64)
    assert examine.p_value(examine.cells_of([3] * 400, [other] * 400)) < 1e-100
    assert examine.p_value(examine.cells_of([3] * 400, [1e-30 * other] * 400)) < inf
