"""What the steps of a stranger's tokenizer.json may do.

Steps are data, and yet a few of them make gigabytes of a short text, or look for a pattern for
ever. A tokenizer has no process with limits, as chat templates have. So such steps are refused
before the tokenizer is loaded.

Not covered: patterns that take the square of a text's length.
"""

import re
from base64 import b64decode
from collections.abc import Iterator
from typing import Any
from unicodedata import normalize

from runtime.values import Json

_PARTS = ("normalizer", "pre_tokenizer", "post_processor"), ("decoder",)
_MOST_TIMES = 16  # as long as before
_TIMES = {"ByteLevel": 2, "BertNormalizer": 3}  # a byte of two; spaces around a character
_LONGEST_ENTRY = 33  # bytes of Unicode's own table, which is applied once
_LONGEST_PATTERN = 10_000  # those of real tokenizers have a thousand characters
_ESCAPE = re.compile(r"\\[pPxuo]\{[^}]*\}|\\.", re.DOTALL)
_CLASS, _GROUP = re.compile(r"\[\^?\]?[^][]*\]"), re.compile(r"\(\??([^()]*)\)")
# Digits come in groups of up to three. NUL stands for a group that has a repetition in it.
_REPETITION = re.compile(r"[*+]|\{\d*,([4-9]|\d\d+)?\}|\0")
_REPEATED = re.compile(r"\0([*+]|\{(\d*,)?([4-9]|\d\d+)?\})")
# Each round begins with another character, so there is one way to match it: K-EXAONE's.
_HARMLESS = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"


def check_steps(content: Json) -> None:
    """Raises ValueError if a tokenizer.json's steps may take any memory or time for a text.

    Raises AttributeError or TypeError for steps of other types than the library's.
    """
    for parts in _PARTS:
        steps = [*_steps([content.get(part) for part in parts])]
        if (times := _growth(steps)) > _MOST_TIMES:
            by = f"by its {', '.join(parts)}"
            raise ValueError(f"it can make a text {times:.2g} times as long ({by})")
        for pattern in (step["Regex"] for step in steps if "Regex" in step):
            if is_endless(pattern):
                raise ValueError(f"{pattern[:80]!r} has a repetition inside a repetition")


def _steps(part: Any) -> Iterator[Json]:
    """All objects of a part, in order: its steps, and what they have."""
    if isinstance(part, dict):
        yield part
        part = [*part.values()]
    for each in part if isinstance(part, list) else ():
        yield from _steps(each)


def _growth(steps: list[Json]) -> float:
    """A bound on how many times longer these steps make a text, but for Unicode's own 18."""
    times, free = 1.0, _LONGEST_ENTRY
    for step in steps:
        new = step.get("prepend") or step.get("content") or step.get("replacement") or ""
        old, made = step.get("pattern", {}).get("String"), len(normalize("NFKD", new))
        # Other patterns may match between any two characters.
        times *= max(1.0, made / len(old)) if old else 1 + made
        times *= _TIMES.get(step.get("type"), 1)
        times *= sum("Sequence" in piece for piece in step.get("single", ())) or 1
        if table := b64decode(step.get("precompiled_charsmap") or ""):
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            times, free = times * max(1.0, max(map(len, texts)) / free), 1
    return times


def is_endless(pattern: str) -> bool:
    """Whether a repetition repeats what has one in it, as in (x+x+)+y. Not: (?:\\d{3})+, (a+b)?."""
    before, text = "", _ESCAPE.sub("a", pattern.replace(_HARMLESS, ""))
    if len(text) > _LONGEST_PATTERN:
        return True  # for all that is known
    while text != before:  # classes may have classes in them
        before, text = text, _CLASS.sub("a", text)
    while (group := _GROUP.search(text)) and not _REPEATED.search(text):
        text = text.replace(group[0], "\0" if _REPETITION.search(group[1]) else "a")
    return bool(_REPEATED.search(text))
