"""Prompts to train drafters with: templates over topics, and texts that Python itself ships.

No prompt comes from a benchmark. There are about 13,000 of mixed kinds, in an order that
never changes. Topics and templates are in prompts.toml.
"""

import ast
import random
import sysconfig
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _list(name: str) -> list[str]:
    """What stands between the semicolons."""
    return " ".join(DATA[name].split()).split("; ")


def _passages() -> Iterator[str]:
    """Paragraphs of the documentation that Python brings along."""
    from pydoc_data import topics

    for text in topics.topics.values():
        for part in text.split("\n\n"):
            words = " ".join(part.split())
            num_letters = sum(c.isalpha() or c == " " for c in words)
            if 200 < len(words) < 700 and num_letters > 0.9 * len(words):
                yield words


def _functions() -> Iterator[str]:
    """Short functions of the standard library."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            source = file.read_text("utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = source.split("\n")  # ast.get_source_segment splits it anew for each function
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                *body, last = lines[node.lineno - 1 : node.end_lineno]
                last = last.encode()[: node.end_col_offset].decode()  # without a comment behind it
                text = "\n".join([*body, last])
                if 120 < len(text) < 600:
                    yield text


def about(text: str, number: int) -> str:
    """A task on a text to read, each number another one."""
    forms = DATA["read"]
    return forms[number % len(forms)].format(text)


def prompts() -> list[str]:
    """All of them, mixed."""
    rng = random.Random(0)
    topics = _list("topics")
    made = [form.format(topic, rng.choice(topics)) for topic in topics for form in DATA["asked"]]
    for form, task in product(DATA["coded"], _list("tasks")):
        made += [form.format(task, language) for language in _list("languages")]
    for kind, texts in (("read", _passages()), ("seen", _functions())):
        made += [rng.choice(DATA[kind]).format(text) for text in texts for _ in range(2)]
    for _ in range(600):
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        made += [
            f"What is {a} {rng.choice('+-*')} {b}? Show the steps.",
            f"I have {a} apples, buy {b} more and give {c} away. How many are left?",
        ]
    made = list(dict.fromkeys(made))
    rng.shuffle(made)
    return made
