"""Whatever README and docs/ say can be relied on: each command runs, each name and link exists.

The lesson's blocks write the texts that it says, the curl commands are answered, and each field
that the server answers with is described.
"""

import inspect
import io
import json
import re
import shlex
import subprocess
from contextlib import redirect_stdout
from importlib.util import find_spec

import pytest
from conftest import ROOT
from started import SCRIPT, module_server, naming_a_model

from server import core
from server.options import parse_arguments

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = {page: page.read_text("utf-8") for page in PAGES}
server = module_server()
OTHERS_OPTIONS = {"--per-request-spec-decode-metrics", "--speculative-adaptive"}  # vLLM's, SGLang's
MAKE = "python3 -m venv .venv && .venv/bin/pip install -q -r "


def read(name):
    return (ROOT / name).read_text("utf-8")


def blocks(text, language):
    """The fenced blocks of one language; of none for ""."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for kind, block in fences if kind == language]


def commands():
    """Every line of every bash block, once, in order."""
    found = (block for text in DOCUMENTS.values() for block in blocks(text, "bash"))
    return list(dict.fromkeys(line for block in found for line in block.splitlines()))


def arguments(command):
    """What follows the script's name in a command, or None if it runs something else."""
    _, found, rest = command.split(" > ")[0].partition(SCRIPT)
    return shlex.split(rest) if found else None


@pytest.mark.parametrize("command", list(filter(arguments, commands())), ids=str)
def test_commands_of_the_script_run(command, capsys):
    """One server is started below, and test_command_line runs the demo: both are parsed here."""
    given = arguments(command)
    parse_arguments(given)
    if "--prompt" in given:
        assert core.main(naming_a_model(given)) == 0
        assert "tokens per pass" in capsys.readouterr().out


def test_each_step_of_the_lesson_writes_the_same_text(monkeypatch, capsys):
    """With and without cache, drafts, truncation; sampled or not; alone and together."""
    monkeypatch.chdir(ROOT)
    steps = blocks(read("docs/lesson.md"), "python")
    assert len(steps) == 10 and len(re.findall(r"^.+$", steps[0], re.MULTILINE)) == 15
    names = {}
    for step in steps:
        exec(step, names)  # noqa: S102
    prompt, text = names["prompt"], names["result_1"]
    assert len(text) == len(prompt) + 48
    assert names["result_2"] == names["result_4"] == names["result_5"] == text
    assert names["result_6"] == names["undrafted"] != text
    assert names["result_7"] == [names["plain_loop"](p, 48) for p in names["prompts"]]
    assert names["result_7"][0] == text
    said = capsys.readouterr().out
    passes = {int(step): int(count) for step, count in re.findall(r"^(\d): (\d+) pas", said, re.M)}
    assert passes[1] == passes[2] == 48 and said.count("same text: True") == 5
    assert passes[4] == passes[5] < 30 and passes[6] < 40  # the same drafts, with cache or without
    assert "the same texts: True" in said
    assert len(re.findall(r"\d positions \d", said)) == 4  # how long they take is the machine's
    assert "\n9: 16777216 16777218\n" in said
    constrained = names["result_10"]
    assert constrained == names["undrafted_10"]
    told = json.loads(names["tokenizer"].decode(constrained))
    assert [*told] == ["colour", "size"] and told["colour"] in ("red", "blue")
    assert type(told["size"]) is int and 0 <= told["size"] <= 99
    for draft in ([token] * 3 for token in {*constrained}):  # mostly forbidden, or rejected
        assert names["constrained"](prompt, lambda _: draft)[0] == constrained  # noqa: B023
    fewer, more = re.search(r"^10: (\d+) passes, (\d+) without", said, re.M).groups()
    assert int(fewer) < int(more) / 2 and int(more) == len(constrained)
    loses = names["hard_text"], names["slow_drafter"], names["large_batch"]
    assert max(loses) < 1 and f"{names['pays']:.2f}" in read("docs/lesson.md")


def test_the_lesson_begins_with_the_core_s_four_steps():
    steps = re.findall(r"^\| (\d\. \w+) \| `(.+?)` \|", read("docs/lesson.md"), re.MULTILINE)
    source = inspect.getsource(core.speculate)
    places = [source.index(part) for step, line in steps for part in (f"# {step.title()}", line)]
    assert len(steps) == 4 and places == sorted(places)


def test_every_command_is_one_that_is_run_here_or_in_an_environment_of_its_own():
    kinds = (MAKE, f".venv/bin/python {SCRIPT} ", "curl -s", "sed -n")
    assert [line for line in commands() if not line.startswith(kinds)] == []
    demo, test = (line for line in commands() if line.startswith(MAKE))
    assert demo == f"{MAKE}requirements.txt && .venv/bin/python {SCRIPT} --demo"
    assert test == f"{MAKE}requirements-dev.txt && .venv/bin/python -m pytest"
    assert test in read(".ci/run"), "CI must run README's own test command"
    (command,) = blocks(read("docs/lesson.md"), "bash")  # which extracts the lesson's blocks
    extract = command.split(" > ")[0]
    found = subprocess.check_output(["bash", "-c", extract], cwd=ROOT, text=True)
    assert found == "".join(blocks(read("docs/lesson.md"), "python"))


def test_curl_commands_are_answered(server):
    """README starts a server at port 5000; here it has any port that is free."""
    (given,) = (a for a in map(arguments, commands()) if a and a[0] == "--port" and len(a) == 2)
    assert given == ["--port", "5000"]
    found = [shlex.split(line) for line in commands() if line.startswith("curl")]
    assert len(found) > 5
    for words in found:
        options = dict(zip(words, words[1:], strict=False))
        (url,) = (word for word in words if word.startswith("localhost:5000"))
        body = options.get("-d")
        body = body and body.replace('"smollm2"', '"embedded"')  # which runs here
        path = url.removeprefix("localhost:5000") or "/"
        assert server.call("POST" if body else "GET", path, body)[0] == 200, words


def test_what_the_server_answers_is_described(server):
    """Every field of an answer and of /health; and no field of a request that is unknown."""
    text = read("docs/api.md")
    more = {"max_tokens": 2, "trace": True, "compare": True, "logprobs": True}
    answer, state = server.generate(prompt="x = [", **more)[1], server.health()
    said = [*answer, *answer["timings"], *answer["trace"][0], *answer["compare"], *state]
    assert [name for name in said if f"`{name}`" not in text] == []
    table = text[text.index("### Fields") : text.index("### The answer")]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    nothing = dict.fromkeys(names) | {"prompt": "x", "max_tokens": 1}
    assert len(names) > 15 and server.generate(**nothing)[1]["warnings"] == []


def test_every_option_that_is_named_exists():
    """Each `--option` in README and docs/; bash blocks are parsed by the tests above."""
    with pytest.raises(SystemExit) as end, redirect_stdout(io.StringIO()) as said:
        parse_arguments(["--help"])
    known = set(re.findall(r"--[a-z][\w-]*", said.getvalue()))
    assert end.value.code == 0 and 30 < len(known) <= 45
    callers = said.getvalue().partition("Who may call:")[2].partition("\n\n")[0]
    own = "--host", "--allowed-host", "--allow-origin", "--api-key"
    assert re.findall(r"^  (--[\w-]+)", callers, re.MULTILINE) == [*own]
    text = "".join(DOCUMENTS.values())
    quoted = [words for words in re.findall(r"`([^`\n]+)`", text) if words.startswith("--")]
    named = {name for words in quoted for name in re.findall(r"(?<!\S)--[a-z][\w-]*", words)}
    assert len(named) > 25 and named - known == OTHERS_OPTIONS


def test_links_headings_and_benchmarks_exist():
    for page, text in DOCUMENTS.items():
        for link in re.findall(r"\]\((?!\w+://)([^)]+)\)", text):
            path, _, heading = link.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), (page.name, link)
            if heading:
                titles = re.findall(r"^#+ (.+)$", other.read_text("utf-8"), re.MULTILINE)
                plain = (re.sub(r"[^\w -]", "", title).strip().lower() for title in titles)
                assert heading in {title.replace(" ", "-") for title in plain}, (page.name, link)
        assert [m for m in re.findall(r"tools\.\w+", text) if not find_spec(m)] == []


def test_readme_stays_short_and_its_tree_names_what_exists():
    text, missing = read("README.md"), []
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 900
    (tree,) = (block for block in blocks(text, "") if SCRIPT in block)
    for line in re.sub(r"\n +", " ", tree).splitlines():
        paths, names = re.split("  +", line, maxsplit=1)
        found = [ROOT / path for path in paths.split()]
        if paths in ("runtime/", "drafters/", "server/"):
            found += [ROOT / paths / name for name in re.findall(r"\w+", names.split(":")[0])]
        missing += [p for p in found if not (p.exists() or p.with_suffix(".py").exists())]
    assert missing == []
