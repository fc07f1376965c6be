"""Whatever README and docs/ say can be relied on: each command runs, each name and link exists.

The curl commands are answered, and each field that the server answers with is described.
"""

import inspect
import io
import re
import shlex
from contextlib import redirect_stdout
from importlib.util import find_spec

import pytest
from conftest import ROOT
from started import SCRIPT, module_server, naming_a_model

from server import core
from server.options import parse_arguments

PAGES = [ROOT / "README.md", ROOT / "course" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = {page: page.read_text("utf-8") for page in PAGES}
server = module_server()
OTHERS_OPTIONS = {"--per-request-spec-decode-metrics", "--speculative-adaptive"}  # vLLM's, SGLang's
COURSE = ".venv/bin/python -m course"  # test_course.py runs it
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


def test_a_sum_in_another_order_is_another_number(capsys):
    (block,) = blocks(text := read("docs/exactness.md"), "python")
    exec(block, {})  # noqa: S102
    assert f"This writes `{capsys.readouterr().out.strip()}`" in text


def test_the_four_steps_are_the_core_s():
    steps = re.findall(r"^\| (\d\. \w+) \| `(.+?)` \|", read("docs/exercises.md"), re.M)
    source = inspect.getsource(core.speculate)
    places = [source.index(part) for step, line in steps for part in (f"# {step.title()}", line)]
    assert len(steps) == 4 and places == sorted(places)


def test_every_command_is_one_that_is_run_here_or_in_an_environment_of_its_own():
    kinds = (MAKE, f".venv/bin/python {SCRIPT} ", "curl -s", COURSE)
    assert [line for line in commands() if not line.startswith(kinds)] == []
    demo, test = (line for line in commands() if line.startswith(MAKE))
    assert demo == f"{MAKE}requirements.txt && .venv/bin/python {SCRIPT} --demo"
    assert test == f"{MAKE}requirements-dev.txt && .venv/bin/python -m pytest"
    assert test in read(".ci/run"), "CI must run README's own test command"


def test_curl_commands_are_answered(server):
    """README starts a server at port 5000; here it has any port that is free."""
    (given,) = (a for a in map(arguments, commands()) if a and a[0] == "--port" and len(a) == 2)
    assert given == ["--port", "5000"]
    found = [shlex.split(line) for line in commands() if line.startswith("curl")]
    assert len(found) > 5
    for words in found:
        options = dict(zip(words, words[1:], strict=False))
        (url,) = (word for word in words if word.startswith("127.0.0.1:5000"))
        body = options.get("-d")
        body = body and body.replace('"smollm2"', '"embedded"')  # which runs here
        path = url.removeprefix("127.0.0.1:5000") or "/"
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
