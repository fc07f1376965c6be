"""Text with known regularities for the embedded models: what library code does not teach.

Real code and docstrings leave a small model unable to continue `1, 2, 3, 4, 5,` or to tell a story.
This module writes what is missing, from a seeded generator, so that the training text can be made
again anywhere. Its words and sentences are in synthetic.toml. The order of the draws is part of the
training text, too: another order tells other stories.

    cycles   `A B C D A B C D …`, repeated sentences and lines (never ended by an end-of-text)
    counting 1, 2, 3 … with every separator, steps, backwards, numbered lists
    tables   CSV, Markdown tables, JSON records
    facts    short questions with factual answers
    stories  little stories from a grammar: a name, a wish, an obstacle, a helper, an end
    prose    descriptive paragraphs from a grammar
    program  short Python modules: a class, functions, a unit test
"""

import json
import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from string import Template
from textwrap import indent

DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
WORDS: dict[str, list[str]] = {name: text.split() for name, text in DATA["words"].items()}
WORDS |= {"times": DATA["phrases"]["times"], "numbers": list(map(str, range(100)))}
SENTENCES: dict[str, list[str]] = DATA["sentences"]
PLACES: dict[str, list[str]] = DATA["places"]
CODE = {name: text.split("\n\n") for name, text in DATA["code"].items()}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def filled(rng: random.Random, sentence: str, fixed: dict[str, str]) -> str:
    """A sentence with the words in `fixed`, and some drawn from {several|words} or from WORDS.

    Example: "{name} likes {figs|plums} and {colours} {fruits}." -> "Anna likes figs and red pears."
    """

    def word(match: re.Match[str]) -> str:
        name = match[1]
        return fixed[name] if name in fixed else rng.choice(WORDS.get(name) or name.split("|"))

    return re.sub(r"{(.*?)}", word, sentence)


def drawn(rng: random.Random, sentences: list[str], fixed: dict[str, str]) -> str:
    """One of these sentences; all of them are filled before."""
    return rng.choice([filled(rng, sentence, fixed) for sentence in sentences])


def cycle(rng: random.Random) -> str:
    """A list of 2 to 9 items repeated 6 to 40 times, with one separator."""
    kinds = "colours animals fruits names words code days months cities".split()
    pool = rng.choice([*(WORDS[kind] for kind in kinds), None, None])
    size = rng.randint(2, 9)
    if pool is None:
        alphabet = rng.choice([LETTERS, LETTERS.lower(), "0123456789"])
        start = rng.randrange(len(alphabet) - size)
        run = list(alphabet[start : start + size])
        items = run if rng.random() < 0.5 else rng.sample(alphabet, size)
    else:
        items = rng.sample(pool, min(size, len(pool)))
    sep = rng.choice([" ", " ", " ", ", ", ", ", ", ", "\n", "; ", " - ", "-", ",", " | "])
    return sep.join(items * rng.randint(6, 40))


def repeated_sentence(rng: random.Random) -> str:
    """One sentence, or one line of code, again and again."""
    fixed = {kind[:-1]: rng.choice(WORDS[kind]) for kind in ("names", "animals", "colours")}
    sentences = [filled(rng, sentence, fixed) for sentence in SENTENCES["repeated"]]
    sentences.append(prose_sentence(rng, rng.choice(list(PLACES))))
    sentences.append(story(rng).split(". ")[-1])
    sentence = rng.choice(sentences)
    return rng.choice([" ", " ", "\n"]).join([sentence] * rng.randint(5, 20))


def counting(rng: random.Random) -> str:
    """Numbers in order; also numbered lists, days and months in order."""
    kind = rng.random()
    if kind < 0.6:
        step = rng.choice([1, 1, 1, 1, 2, 5, 10])
        start = rng.choice([0, 1, 1, 1, step, rng.randint(0, 90)])
        numbers = range(start, start + step * rng.randint(20, 90), step)
        if rng.random() < 0.12:
            numbers = reversed(numbers)
        sep = rng.choice([", ", ", ", ", ", " ", " ", "\n", "; ", ",", " and ", "... "])
        return sep.join(map(str, numbers))
    if kind < 0.8:
        mark = rng.choice([". ", ") ", ": ", " - "])
        pool = WORDS[rng.choice(["animals", "fruits", "names", "colours", "words", "cities"])]
        items = rng.sample(pool, min(len(pool), rng.randint(6, 18)))
        return "\n".join(f"{i}{mark}{item}" for i, item in enumerate(items, 1))
    pool = rng.choice([WORDS["days"], WORDS["months"], list(LETTERS)])
    return rng.choice([", ", "\n", " "]).join(pool * rng.randint(1, 6))


def table(rng: random.Random) -> str:
    """Records as CSV, as a Markdown table or as JSON, with an id that counts."""
    pools = {column: WORDS[kind] for column, kind in DATA["columns"].items()}
    pools |= {"age": range(5, 80), "score": range(0, 100), "day": WORDS["days"]}
    columns = rng.sample(list(pools), rng.randint(2, 4))
    first = rng.choice([0, 1, 1, 1, 100])
    length = rng.randint(5, 12)
    # No value twice in a column, so that a model learns to go on rather than around.
    values = {c: rng.sample(pools[c], min(length, len(pools[c]))) for c in columns}
    length = min(map(len, values.values()))
    rows = [{"id": first + i} | {c: values[c][i] for c in columns} for i in range(length)]
    cells = [[*rows[0]], *([*map(str, row.values())] for row in rows)]
    style = rng.randrange(4)
    if style == 0:
        return "\n".join(map(",".join, cells))
    if style == 1:
        heading, *lines = (f"| {' | '.join(line)} |" for line in cells)
        return "\n".join([heading, "|" + "---|" * len(rows[0]), *lines])
    if style == 2:
        return "[\n" + ",\n".join("  " + json.dumps(r) for r in rows) + "\n]"
    return json.dumps({rng.choice(["users", "items", "rows", "people"]): rows}, indent=2)


def facts(rng: random.Random) -> str:
    """A list of questions and answers in which no question comes twice."""
    found = [*SENTENCES["facts"]]
    for kind in DATA["facts"]:
        for pair in " ".join(kind["pairs"].split()).split("; "):
            one, other = pair.split(": ")
            begun = one[0].upper() + one[1:]
            found += [form.format(one, other, begun) for form in kind["forms"]]
    for pool, noun in ((WORDS["days"], "day"), (WORDS["months"], "month")):
        i = rng.randrange(len(pool) - 1)
        found.append(f"Which {noun} comes after {pool[i]}? {pool[i + 1]} comes after {pool[i]}.")
    for _ in range(8):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        found.append(f"What is {a} plus {b}? {a} plus {b} is {a + b}.")
    chosen = rng.sample(found, rng.randint(3, 9))
    q, a = rng.choice([("Question: ", "Answer: "), ("Q: ", "A: "), ("Question: ", "Answer: ")])
    asked = (fact.partition("? ") for fact in chosen)
    return rng.choice(["\n", "\n\n"]).join(
        f"{q}{question}?\n{a}{answer}" for question, _, answer in asked
    )


def story_words(rng: random.Random) -> dict[str, str]:
    """Who and what a story is about, by the names that its sentences have for them."""
    name, friend = rng.sample(WORDS["names"], 2)
    he, his, him = rng.choice([("he", "his", "him"), ("she", "her", "her")])
    animal, helper = rng.sample(WORDS["animals"], 2)
    if rng.random() < 0.3:
        who = filled(rng, "a {little|small|young|old|clever} {animal}", {"animal": animal})
    else:
        who = filled(rng, "a {little|kind|curious|brave|quiet} child", {})
    return {
        "name": name, "friend": friend, "helper": helper, "who": f"{who} named {name}",
        "he": he, "his": his, "him": him, "home": rng.choice(DATA["phrases"]["homes"]),
        "thing": rng.choice(WORDS["things"]), "colour": rng.choice(WORDS["colours"]),
    }  # fmt: skip


def story(rng: random.Random) -> str:
    """A little story: who, wish, obstacle, helper, end. Names and things stay the same."""
    fixed = story_words(rng)
    openings, *rest = DATA["story"].values()
    opening = filled(rng, rng.choice(openings), fixed)
    fixed["relative"] = rng.choice(["mother", "father", "aunt", "uncle"])
    wish, weather, *others = (filled(rng, rng.choice(sentences), fixed) for sentences in rest)
    parts = [opening, wish, *([weather] if rng.random() < 0.6 else []), *others]
    if rng.random() < 0.3:
        parts.insert(2, "\n")
    return " ".join(parts).replace(" \n ", "\n\n")


def prose_sentence(rng: random.Random, place: str) -> str:
    """One sentence about a place."""
    a, b = rng.sample(PLACES[place], 2)
    time, person = rng.choice(WORDS["times"]), rng.choice(DATA["phrases"]["people"])
    fixed = {"place": place, "a": a, "b": b, "time": time, "person": person}
    return drawn(rng, SENTENCES["prose"], fixed)


def prose(rng: random.Random) -> str:
    """A paragraph or two about one place. No sentence comes twice."""
    place = rng.choice(list(PLACES))
    sentences = [drawn(rng, SENTENCES["prose_openings"], {"place": place})]
    sentences += [prose_sentence(rng, place) for _ in range(rng.randint(4, 9))]
    text = " ".join(dict.fromkeys(sentences))
    return text if rng.random() < 0.7 else text + "\n\n" + story(rng)


def class_module(rng: random.Random) -> str:
    """A class that keeps things, with four to eight methods."""
    kind = rng.choice(DATA["classes"])
    name, kept = rng.choice(kind["names"].split()), rng.choice(kind["keep"].split())
    docs = ["A simple {class}.", "A {class} of {nouns}.", "Keeps {nouns}."]
    if name == "Stack":
        docs[-1] = "A last-in, first-out stack."
    doc = drawn(rng, docs, {"class": name.lower()})
    parts = [f"def __init__(self):\n    self.{kept} = {kind['empty']}"]
    for method in rng.sample(CODE[kind["methods"]], rng.randint(4, 8)):
        if rng.random() >= 0.5:
            method = re.sub(r' *""".*"""\n', "", method)
        parts.append(Template(method).substitute(kept=kept, name=name))
    header = "import json\n\n\n" if "json" in "".join(parts) else ""
    return f'{header}class {name}:\n    """{doc}"""\n\n{_inside(parts)}\n'


def _inside(methods: list[str]) -> str:
    return "\n\n".join(indent(method, "    ") for method in methods)


def _run_as_script(call: str) -> str:
    return f"\n\n\nif __name__ == '__main__':\n    {call}"


def function_module(rng: random.Random) -> str:
    """Two to five functions about one kind of thing, with the imports that they need."""
    noun, parts = rng.choice(WORDS["nouns"]), list[str]()
    for function in rng.sample(CODE["functions"], rng.randint(2, 5)):
        if rng.random() < 0.25 and "'#'" in function:
            more = "\n\n    Lines that begin with '#' are comments.\n    "
            function = function.replace('."""', f'.{more}"""')
        parts.append(Template(function).substitute(noun=noun))
    modules = [m for m in ("argparse", "json") if any(m + "." in part for part in parts)]
    header = "\n".join(f"import {m}" for m in modules) + "\n\n\n" if modules else ""
    footer = _run_as_script("main()") if any("def main" in part for part in parts) else ""
    return header + "\n\n\n".join(parts) + footer + "\n"


def unit_test_module(rng: random.Random) -> str:
    """A unit test of three to eight cases."""
    subject = rng.choice(["StringMethods", "Lists", "Basics", "Builtins", "Strings", "Methods"])
    tests = rng.sample(CODE["tests"], rng.randint(3, 8))
    footer = _run_as_script("unittest.main()") if rng.random() < 0.7 else ""
    header = f"import unittest\n\n\nclass Test{subject}(unittest.TestCase):\n\n"
    return header + _inside(tests) + footer + "\n"


def program(rng: random.Random) -> str:
    """A short Python module: a class, or a few functions, or a unit test."""
    kind = rng.random()
    if kind < 0.4:
        return class_module(rng)
    return function_module(rng) if kind < 0.75 else unit_test_module(rng)


# kind -> (writer, share of the synthetic characters, ends with an end-of-text token)
KINDS: dict[str, tuple[Callable[[random.Random], str], float, bool]] = {
    "cycle": (cycle, 0.18, False),
    "repeated": (repeated_sentence, 0.07, False),
    "counting": (counting, 0.08, False),
    "table": (table, 0.11, True),
    "facts": (facts, 0.12, True),
    "story": (story, 0.14, True),
    "prose": (prose, 0.12, True),
    "program": (program, 0.18, True),
}


def documents(seed: int, num_chars: int) -> list[tuple[str, bool]]:
    """Texts of `num_chars` characters in all, each with whether an end-of-text token follows.

    Example: documents(seed=0, num_chars=1000)[0] -> ("1, 2, 3, …", False)
    """
    rng = random.Random(seed)
    result = []
    for writer, share, ends in KINDS.values():
        written = 0
        while written < num_chars * share:
            text = writer(rng)
            written += len(text)
            result.append((text, ends))
    rng.shuffle(result)
    return result
