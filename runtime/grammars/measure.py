"""Measures a grammar before it is built: what is too large is refused, as building takes too long.

The sizes are the same on every machine, so what is refused here is refused anywhere. The limits of
llguidance 1.9 do not bound all of its time. On one core of an EPYC (Zen 4) it took

    4.7 s    for a number that is a multiple of 1,000,003: the automaton has so many states
    4.3 s    for a class of 86,000 characters
    1.5 s    for 5,000 properties of one object, in which each may be left out
    13 s     for a first mask of 1,000 alternatives, each of which may be any of them again

and at most 2.2 s for whatever was tried within these limits. What llguidance takes for something
else than it says is refused here, too.
"""

import json
import math
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

Json = dict[str, Any]
JSON, REGEX, LARK, CHOICE = "json", "regex", "lark", "choice"  # kinds of grammars
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
_EXACT = 1 << 53  # llguidance reads numbers as doubles
_FEW = 200  # alternatives, with which rows are as those of an unambiguous grammar
_AMBIGUOUS_ROW, _MASK = 500, 300_000  # items; the latter are shared by at least 20 alternatives
_UNICODE = re.compile(r"\\[pPwW]")
_COMPOUND = {"$ref", "anyOf", "oneOf", "allOf", "items", "prefixItems", "properties"}
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*")
# What Lark's rules hold and do not read: comments, special tokens, regular expressions and texts.
# An open one ends with the rules, or its line: then no search begins twice at the same place.
HELD = re.compile(r'(?:#|//).*|<[^<>\s]*>?|/(?:\\.|[^/\\])*/?|"(?:\\.|[^"\\\n])*"?')
# What the first two count is not taken back with a draft's tokens, and nobody reads temperatures.
_ATTRIBUTES = re.compile(r"\b(max_tokens|stop|temperature)\s*=")
_SCHEMA = re.compile(r"%json\s*(?=\{)")  # behind it stands one of Lark's rules
# llguidance asks the same in a way that takes seconds for thousands of empty lines.
_OF_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")
_DIGIT = "[0-9a-fA-F]"
_CODE = re.compile(rf"\\\\|\\x({_DIGIT}{{2}})|\\u({_DIGIT}{{4}})|\\U({_DIGIT}{{8}})")
_VALUES = {"const", "enum", "default", "examples"}  # keys of what is no schema
_NOTES = {"description", "title", "$comment", "default", "examples"}  # of schemas, for people
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}


def is_gbnf(rules: str) -> bool:
    """Whether rules are GBNF (llama.cpp's form), and not Lark's."""
    return not _OF_LARK.search(rules)


def in_characters(rules: str, is_source: bool = False) -> str:
    """GBNF with characters in the place of their codes. Raises ValueError for a code of none.

    In a source ASCII stays in codes, as some of it has a meaning there.
    """

    def character(code: re.Match[str]) -> str:
        if code[0] == "\\\\":
            return code[0]
        number = int(code[1] or code[2] or code[3], 16)
        if number >= 0x110000 or 0xD800 <= number < 0xE000:
            raise ValueError(f"{code[0]} is no character")
        return f"\\x{number:02x}" if is_source and number < 128 else chr(number)

    return _CODE.sub(character, rules)


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


def without_notes(schema: Any) -> Any:
    """A schema without what is for people: else a grammar of many tools would be too long.

    Example: {"title": "x", "properties": {"title": {}}} -> {"properties": {"title": {}}}.
    """
    if isinstance(schema, list):
        return list(map(without_notes, schema))
    if not isinstance(schema, dict):
        return schema
    kept = Json()
    for key, part in schema.items():
        if key in _NAMED and isinstance(part, dict):
            kept[key] = {name: without_notes(each) for name, each in part.items()}
        elif key not in _NOTES:
            kept[key] = part if key in _VALUES else without_notes(part)
    return kept


def values_in(schema: Any, notes: Collection[str] = _NOTES) -> Iterator[str | int]:
    """The texts and integers in a schema that constrain: all but `notes`, which are for people."""
    if isinstance(schema, str | int):
        yield schema
    elif isinstance(schema, dict):
        for key, part in schema.items():
            if key not in notes or isinstance(part, dict):  # a dict: a property of that name
                yield key
                yield from values_in(part, () if key in ("const", "enum") else notes)
    elif isinstance(schema, list):
        for part in schema:
            yield from values_in(part, notes)


def schemas_of(rules: str) -> Iterator[Json]:
    """The schemas in rules of Lark's."""
    for part in _SCHEMA.finditer(rules):
        with suppress(ValueError):
            yield json.JSONDecoder().raw_decode(rules, part.end())[0]


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


def checked_limits(kind: str, value: Any, special: Collection[str]) -> Limits:
    """The limits for the grammar that a request brings.

    `special` are the texts of tokens that no text has. Raises ValueError for what is too large, and
    for what llguidance takes, and does something else with.
    """
    is_lark, is_rules = kind == LARK, kind == LARK and not is_gbnf(value)
    check_length(value, is_lark)
    schemas = [*schemas_of(value)] if is_rules else [] if isinstance(value, str) else [value]
    limits = limits_of(value, is_lark, schemas)
    if kind == REGEX and (len(value) - len(value.rstrip("\\"))) % 2:
        raise ValueError("ends with a backslash that escapes nothing")
    if is_rules and (attribute := _ATTRIBUTES.search(HELD.sub(" ", value))):
        raise ValueError(f"has a rule with {attribute[1]}, which is not supported")
    # Where a special token's text would be taken for the token. Rules of Lark's may name one.
    parts = schemas if is_rules else [in_characters(value) if is_lark else value]
    # As one text, with what no token has between its parts: there may be thousands of either.
    texts = (each for part in parts for each in values_in(part) if isinstance(each, str))
    plain = "\0".join(texts).replace("\\", "")
    for token in special:
        if token in plain:
            raise ValueError(f"holds {token}, which is a token of its own")
    for schema in schemas_in(schemas):  # keys would have to be counted: a text may repeat one
        for each in values_in([schema.get("const"), schema.get("enum")], ()):
            if isinstance(each, int) and abs(each) > _EXACT:
                raise ValueError("holds an integer beyond 2^53, which may be written as another")
        required, least = schema.get("required"), schema.get("minProperties")
        if isinstance(least, int) and least > len(required if isinstance(required, list) else []):
            raise ValueError("minProperties beyond the required ones is not supported")
    return limits
