"""The course grades: skeletons fail, solutions pass, and each known mistake gets its own sentence.

What it takes for right is compared with transformers' generate() and with the core's plain_decode.
Bad solutions of any kind get one sentence, and never a traceback.

    python -m pytest -n0 tests/test_course.py
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TARGET

from course import grade, lab
from course.__main__ import main as command_line
from runtime.values import Sampling
from server import core

SENTENCES, WRONG = lab.read_mistakes()
NUMBERS = range(1, 9)
PROMPTS = "1, 2, 3, 4, 5,", "red, green, blue, red, green,", "class Stack:\n    def"
# numpy computes in a process of its own, with one thread: more would wait for each other.
ALL = """
import json, sys
from types import ModuleType
import numpy as np
from course import checks, grade, lab
from runtime.sampling import Noise

def said(function, *given):
    try:
        return function(*given) and ""
    except lab.Mistake as mistake:
        return mistake.sentence

def graded(number, source):
    exec(source, vars(solution := ModuleType("solution")))
    return said(checks.check, number, solution)

def raced(solution, prompt):
    solution.noise = lambda seed, at, size: Noise(seed).exponentials(at, np.arange(size))
    text, row = list(prompt), lab.Model("target").open()
    while len(text) < len(prompt) + 24:
        solution.cycle(row, text, [text[-1], 5], 0.8, 1)
    return text[len(prompt):][:24]

given = json.loads(sys.stdin.read())
prompts = [*map(lab.encode, given["prompts"])]
print(json.dumps({
    "skeletons": [said(grade.check, n, lab.path_of(n)) for n in range(1, 9)],
    "graded": [graded(*each) for each in given["files"]],
    "texts": [checks.plain(tuple(p), 24, name) for name in ("target", "draft") for p in prompts],
    "raced": [raced(lab.load(lab.path_of(6, "solutions")), p) for p in prompts],
}))
"""
READS = "text[target.length :]"
NAMED = [  # mistakes that the checks name themselves: a task, code of its solution, wrong code
    ("not extended", 2, "text += verify", "text = text + verify"),
    ("not extended", 6, "text += verify", "text = text + verify"),
    ("not extended", 8, "text += verify", "texts[b] = text = text + verify"),
    ("not truncated", 2, "target.truncate(len(text) - 1)", ""),
    ("other read", 2, READS, "text"),
    ("other read", 2, READS, "text[target.length : -1]"),
    ("learns from draft", 3, "+ max_tokens]", "+ max_tokens] + (self.observe(state, [7]) or [])"),
    ("other draft", 3, "[start : start + max_tokens]", "[start:]"),
    ("state", 3, '"text": []', "'text': self.__dict__.setdefault('text', [])"),
    ("state", 4, "list(prompt)}", "self.__dict__.setdefault('text', list(prompt))}"),
    ("draft not truncated", 4, 'state["row"].truncate', "str"),
    ("draft forgets", 4, '(state["text"]) + accepted', '(state["text"])'),
    ("other draft read", 4, "unread = draft[-1:]", "unread = draft[-1:] * 2"),
    ("weights", 5, "max(0, a - b)", "a - b"),
    ("not token and q", 5, "return draw(q), q", "return draw(q)"),
    ("top k", 5, "[-top_k]", "[-top_k - 1]"),
    ("other q", 5, "w / sum(cut)", "w"),
    ("other q", 5, "draw(q), q", "draw(weights), q"),
    ("other q", 5, "draw(q), q", "draw(q), weights"),
    ("other tokens", 5, "[*draft, draw(p[len(draft)])]", "draft"),
    ("other chances", 5, "draw(p[len(draft)])", "(draw(p[len(draft)]) if draft else 3)"),
    ("other chances", 5, "chance(min(1, p[i][token] / q[i][token]))", "chance(p[i][token])"),
    ("other race", 6, "noise(seed, position, len(logits))", "np.random.default_rng().random(8)"),
    ("other race", 6, "times.argmin()", "weights.argmax()"),
    ("other noise", 6, "len(text) + i)", "len(text))"),
    ("other noise", 6, "len(text) + i)", "i)"),
    ("other noise", 6, "len(text) + i)", "len(text) + i - 1)"),
    ("other number", 7, "pass_ms[1] /", "pass_ms[2] /"),
    ("one pass", 8, "logits = ", "target.read([2], [[7]])\n    logits = "),
    ("rectangle", 8, "[0] * (width - len(tokens))", "[]"),
]
SOLUTIONS = {n: lab.path_of(n, "solutions").read_text("utf-8") for n in NUMBERS}
FILES = [  # a mistake, its task, and a solution with it
    *(("", *solved) for solved in SOLUTIONS.items()),
    *((name, n, SOLUTIONS[n].replace(right, wrong)) for name, n, right, wrong in WRONG + NAMED),
    # The same mistakes in other words.
    ("stand alone", 7, "def tokens(alpha, k): return 1 + k * alpha"),
    # The row of the text that drafted last; it matters where two draft before both hear.
    ("state", 4, SOLUTIONS[4].replace("draft = []", "draft, self.row = [], state['row']").replace(
        'state["row"].truncate', "self.row.truncate"
    )),
    # Only the latest tokens stay behind the prompt.
    ("other draft", 3, SOLUTIONS[3].replace('state["text"]\n        for', 'state["text"]\n        '
     'del text[state.setdefault("begin", len(tokens)) :]\n        for')),
    # Right: q as an array, and a token drawn among those that stay.
    ("", 5, "import numpy as np\n" + SOLUTIONS[5].replace("draw(q), q", "draw(q), np.array(q)")),
    ("", 5, SOLUTIONS[5].replace("return draw(q), q", "kept = [i for i, w in enumerate(q) if w]; "
     "return kept[draw([q[i] for i in kept])], q")),
    # Right: what is certain is not asked.
    ("", 5, SOLUTIONS[5].replace("not chance(", "q[i][token] > p[i][token] and not chance(")),
]  # fmt: skip


@pytest.fixture(scope="module")
def told():
    """What a process makes of all files, and what it writes."""
    given = json.dumps({"files": [file for _, *file in FILES], "prompts": PROMPTS})
    environ = os.environ | grade.ALONE
    command = [sys.executable, "-c", ALL]
    return json.loads(
        subprocess.check_output(command, input=given, text=True, cwd=ROOT, env=environ)
    )


def test_each_skeleton_fails_with_its_first_sentence(told):
    names = [lab.path_of(number).name for number in NUMBERS]
    assert told["skeletons"] == [SENTENCES["nothing yet"].format(path=name) for name in names]


def test_each_solution_passes_and_each_wrong_one_gets_the_sentence_of_its_mistake(told):
    """A known one by what it does, any other by the check that fails."""
    own = {name for name, *_ in FILES if name and not name.startswith("other")}
    assert len(own) >= 28 and {number for name, number, _ in FILES if name} == {*NUMBERS}
    expected = [name and SENTENCES[name] for name, *_ in FILES]
    pairs = zip(FILES, told["graded"], expected, strict=True)
    assert [(file, said) for file, said, right in pairs if said != right] == []
    assert len({*SENTENCES.values()}) == len(SENTENCES)


def test_texts_are_those_of_transformers_generate_and_no_tie_is_near(told, reference):
    expected = []
    for folder in (TARGET, str(ROOT / "demo_models" / "draft")):
        for prompt in PROMPTS:
            ids = torch.tensor([lab.encode(prompt)])
            answer = reference(folder).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            expected.append(answer.sequences[0, ids.shape[1] :].tolist())
            best = torch.stack(answer.logits).topk(2).values
            assert (best[..., 0] - best[..., 1]).min() > 1e-3
    assert told["texts"] == expected


def test_the_solution_of_task_6_writes_the_engine_s_own_sampled_text(told, demo_engine):
    """With the engine's noise, and drafts that are mostly wrong."""
    for prompt, text in zip(PROMPTS, told["raced"], strict=True):
        ids, sampling = lab.encode(prompt), Sampling(temperature=0.8)
        assert text == core.plain_decode(demo_engine.target, ids, 24, set(), sampling, seed=1)


BAD = {  # what is said, or the name of its sentence: a file
    "endless": "def verify(draft, choices):\n    while True:\n        pass",
    "prints": "def verify(draft, choices):\n    while True:\n        print('x' * 1000)",
    "ends": "import os\nos._exit(3)",
    "no tokens": "def verify(draft, choices):\n    return 'text'",
    "`verify` is to return a list of token ids, and returns: None": "def verify(*given): 7",
    "It raises KeyError in line 2, in a call with draft = [7, 8], choices = [7, 8, 9]: 7": (
        "def verify(draft, choices):\n    return {}[7]"
    ),
    "It raises ModuleNotFoundError in line 1: No module named 'nothing'": "import nothing",
    "It raises SyntaxError: '(' was never closed (mine.py, line 1)": "def verify(draft",
    "It raises AttributeError: module 'course_file' has no attribute 'verify'": "other = 7",
    "It raises MemoryError in line 1: ": "letters = bytearray(10 ** 11)",
    "It raises FileNotFoundError: ": None,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_solution_gets_one_sentence(name, tmp_path, monkeypatch, capsys):
    """Through the command line: the exit status is 1, and nothing else is said."""
    path = tmp_path / "mine.py"
    if BAD[name]:
        path.write_text(BAD[name], "utf-8")
    limit_s = 1 if name == "endless" else 60  # it never ends, so any limit will do
    monkeypatch.setattr("course.__main__.grade", lambda *given: grade.grade(*given, limit_s))
    monkeypatch.setattr(sys, "argv", ["course", "1", "--file", str(path)])
    assert command_line() == 1
    said = capsys.readouterr()
    begin, *_ = re.split(r"\{\w+", SENTENCES.get(name, name))
    sentence = said.out.partition("Not yet. ")[2].strip("\n")
    assert sentence.startswith(begin) and "\n" not in sentence
    assert "Traceback" not in said.out and said.err == ""


def test_the_way_so_far_and_a_picture(monkeypatch, capsys, tmp_path):
    """The list asks for the first task that is not done; a wrong answer is shown in its cycle."""
    solved = [grade.Grade(number == 1, "") for number in NUMBERS]
    monkeypatch.setattr("course.__main__.grade", lambda number, path: solved[number - 1])
    monkeypatch.setattr(sys, "argv", ["course"])
    assert command_line() == 0
    said = capsys.readouterr().out
    assert said.count("not yet") == 7 and "Next: read course/tasks/2_truncate.py" in said
    monkeypatch.undo()
    path = tmp_path / "mine.py"
    path.write_text(SOLUTIONS[1].replace("choices[: i + 1]", "choices[:i]"), "utf-8")
    told = grade.grade(1, path)
    assert told.sentence == SENTENCES["recovered"] and not told.is_solved
    assert (
        "5 ✓      6 ✗" in told.picture
        and "expected: keeps 5 9\n  yours:    keeps 5" in told.picture
    )
    state = "@dataclass\nclass State:\n    text: list[int]\n"
    lines = "from __future__ import annotations", "from dataclasses import dataclass", state
    path.write_text("\n".join((*lines, SOLUTIONS[3])), "utf-8")
    assert grade.grade(3, path).is_solved
    path.write_text(f"print('my own words')\n{SOLUTIONS[1]}", "utf-8")
    assert grade.grade(1, path)[::3] == (True, "my own words\n")


def test_each_chapter_of_the_page_names_its_task_and_the_task_has_its_chapters_addresses():
    page = (ROOT / "server" / "page" / "index.html").read_text("utf-8")
    begin, code = (
        r'id="(chapter-\d+)" data-chapter="\w+">\s+',
        "<p><small>Write it: <code>(.+?)</code>",
    )
    there = re.findall(rf"{begin}<h2>(\d+\. .+?)</h2>{code}", page)
    texts = {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in map(lab.path_of, NUMBERS)}
    assert [name for name, *_ in there] == [f"chapter-{i}" for i in range(1, 12)]
    assert {path for *_, path in there} == {*texts}
    assert [(n, t) for n, t, path in there if f"#{n}, {t}" not in texts[path]] == []
    assert all("(Page: http://127.0.0.1:5000/#chapter-" in text for text in texts.values())


def test_the_course_has_at_most_1500_lines():
    files = [p for p in (ROOT / "course").rglob("*") if p.suffix in (".py", ".txt", ".md")]
    assert sum(path.read_text("utf-8").count("\n") for path in files) <= 1500
