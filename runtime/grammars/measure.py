"""Measures a grammar before it is built: what is too large is refused, as building takes too long.

The sizes are the same on every machine, so what is refused here is refused anywhere. The limits of
llguidance 1.9 do not bound all of its time. On one core of an EPYC (Zen 4) it took

    4.7 s    for a number that is a multiple of 1,000,003: the automaton has so many states
    4.3 s    for a class of 86,000 characters
    1.5 s    for 5,000 properties of one object, in which each may be left out
    13 s     for a first mask of 1,000 alternatives, each of which may be any of them again

and at most 2.2 s for whatever was tried within these limits.
"""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

Json = dict[str, Any]
_MOST = {
    "characters": 1 << 18,
    "characters of a regular expression": 1 << 16,
    "characters of rules": 1 << 16,  # which are translated in Python if they are GBNF
    "schemas in it": 10_000,
    "properties of one object": 2_000,
    "properties of one object that may be left out": 490,  # a row has four items for each
    "alternatives": 1_000,
    "characters in classes": 40_000,
    "classes of Unicode": 2_000,
    "states for multipleOf": 100_000,
}
_FEW = 200  # alternatives, with which rows are as those of an unambiguous grammar
_AMBIGUOUS_ROW, _MASK = 500, 300_000  # items; the latter are shared by at least 20 alternatives
_UNICODE = re.compile(r"\\[pPwW]")
_COMPOUND = {"$ref", "anyOf", "oneOf", "allOf", "items", "prefixItems", "properties"}
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*")
# What Lark's rules hold and do not read: comments, special tokens, regular expressions and texts.
# An open one ends with the rules, or its line: then no search begins twice at the same place.
HELD = re.compile(r'(?:#|//).*|<[^<>\s]*>?|/(?:\\.|[^/\\])*/?|"(?:\\.|[^"\\\n])*"?')
_VALUES = {"const", "enum", "default", "examples"}  # keys of what is no schema
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}


def schemas_in(part: Any, has_names: bool = False) -> Iterator[Json]:
    """A schema, and all schemas in it. `has_names`: the keys are names, each of a schema."""
    if isinstance(part, list):
        for each in part:
            yield from schemas_in(each)
    elif isinstance(part, dict):
        if not has_names:
            yield part
        for key, each in part.items():
            if has_names or key not in _VALUES:
                yield from schemas_in(each, not has_names and key in _NAMED)


def _check(what: str, size: int) -> None:
    if size > (most := _MOST[what]):
        count = size if size < 1e9 else f"{float(min(size, 10**300)):.3g}"
        raise ValueError(f"has {count} {what}, and at most {most} are read")


def _multiple(schema: Json) -> int:
    """How many states the multiples of a schema's number need. Examples: 12.34 -> 617; 500 -> 5."""
    value = schema.get("multipleOf")
    if type(value) not in (int, float) or not math.isfinite(value):  # llguidance says so
        return 1
    number = Fraction(str(value)).numerator
    while number and number % 10 == 0:  # zeros at the end need no more
        number //= 10
    return number


def _num_alternatives(schema: Json) -> int:
    """How many schemas that hold others may come at one place; one of them is no choice."""
    every = [some for key in ("anyOf", "oneOf") if isinstance(some := schema.get(key), list)]
    counts = [
        sum(isinstance(each, dict) and not _COMPOUND.isdisjoint(each) for each in some)
        for some in every
    ]
    return sum(count for count in counts if count > 1)


def check_length(value: Any, is_lark: bool) -> None:
    """Raises ValueError for a grammar's `value` that is too long to be read."""
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    kind = " of rules" if is_lark else " of a regular expression" if is_text else ""
    _check(f"characters{kind}", len(text))


class Limits(NamedTuple):
    """What llguidance may take for a grammar, in Earley items."""

    row: int = 2_000  # behind one byte of the text
    mask: int = 15_000


USUAL = Limits()


def limits_of(value: Any, is_lark: bool, schemas: list[Any]) -> Limits:
    """The limits for a grammar's `value` of checked length, whose parts `schemas` are schemas.

    Where rules are ambiguous, a row's time grows with the cube of its items: 2 ms for 500, 110 ms
    for 2,000. JSON is not, and 500 properties that may be left out need a row of 2,000. A mask of
    many alternatives takes longer, as each item is compared with more of them.

    Raises ValueError for a grammar that is too large.
    """
    nodes, multiple = list(schemas_in(schemas)), 1
    patterns = [value] if isinstance(value, str) else []
    _check("schemas in it", len(nodes))
    for node in nodes:
        if isinstance(named := node.get("properties"), dict):
            required = node.get("required")
            needed = {*map(str, required)} if isinstance(required, list) else set[str]()
            _check("properties of one object", len(named))
            _check("properties of one object that may be left out", len(named.keys() - needed))
        patterns += [part for part in (node.get("pattern"),) if isinstance(part, str)]
        patterns += [*named] if isinstance(named := node.get("patternProperties"), dict) else []
        multiple = math.lcm(multiple, _multiple(node))
        _check("states for multipleOf", multiple)
    classes = (found for pattern in patterns for found in _CLASS.findall(pattern))
    _check("characters in classes", sum(map(len, classes)))
    _check("classes of Unicode", sum(len(_UNICODE.findall(pattern)) for pattern in patterns))
    breadth = HELD.sub(" ", value).count("|") if is_lark else 0
    breadth += sum(map(_num_alternatives, nodes))
    _check("alternatives", breadth)
    is_plain = not is_lark and breadth <= _FEW
    return Limits(USUAL.row if is_plain else _AMBIGUOUS_ROW, _MASK // max(20, breadth))
