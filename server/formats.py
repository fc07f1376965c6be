"""What a text must obey: one grammar, which clients ask for under many names.

    response_format                        OpenAI's; its type json_object may have a `schema`
    json_schema, regex, grammar, choice    of /generate

A request has at most one of them.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

from runtime.grammars import (
    CHOICE,
    JSON,
    LARK,
    OPEN,
    POSSIBLE,
    REGEX,
    Grammar,
    in_characters,
    is_gbnf,
    source_of,
    vocabulary_of,
)
from runtime.grammars.measure import HELD, Limits, check_length, limits_of, schemas_in
from runtime.models.prompts import Conversation, Tokenizer, is_text
from runtime.values import Engine, Json, one_line

from .fields import wrong

_TAIL = 32  # tokens at a prompt's end, which may open or close reasoning
_ANY_OBJECT = {"type": "object"}
_KINDS = {"json_schema": JSON, "regex": REGEX, "grammar": LARK, "choice": CHOICE}
FIELDS = ("response_format", *_KINDS)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    JSON: (lambda value: isinstance(value, dict | bool), "a JSON schema"),
    REGEX: (is_text, "a regular expression, not empty"),
    LARK: (is_text, "a grammar, in the form of Lark or GBNF"),
    CHOICE: (_are_texts, "a list of texts, none of them empty"),
}


def _checked(name: str, kind: str, value: Any) -> tuple[str, str, Any]:
    """(name, kind, value) of a constraint; a schema may be sent as a text. Raises RequestError."""
    if kind == JSON and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    is_valid, what = _VALID[kind]
    if not is_valid(value):
        raise wrong(name, f"must be {what}")
    return name, kind, value


def _of_response_format(value: Any) -> Iterator[tuple[str, str, Any]]:
    """The constraint of OpenAI's field, if it is one."""
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        yield _checked(f"{name}.schema", JSON, value.get("schema", _ANY_OBJECT))
    elif kind == "json_schema":
        wrapped = value.get("json_schema", value)
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        yield _checked(f"{name}.json_schema.schema", JSON, schema)
    elif kind != "text":
        raise wrong(name, "must be an object of type text, json_object or json_schema")


def constraint_of(body: Json) -> tuple[str, str, Any] | None:
    """The constraint of a request, as (name of the field, kind, value). Raises RequestError."""
    constraints = list[tuple[str, str, Any]]()
    for name in FIELDS:
        if (value := body.get(name)) is None:
            continue
        if name == "response_format":
            constraints += _of_response_format(value)
        else:
            constraints.append(_checked(name, _KINDS[name], value))
    if len(constraints) > 1:
        first, second = (name for name, *_ in constraints[:2])
        raise wrong(second, f"cannot go with {first}: a text obeys one")
    return constraints[0] if constraints else None


def reasoning_of(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Whether reasoning between <think> tags may stand before the text, or is under way."""
    template = tokenizer.chat_template if isinstance(prompt, Conversation) else None
    if not (isinstance(template, str) and "think>" in template):
        return ""
    tail = tokenizer.decode(prompt[-_TAIL:]).rstrip()  # earlier tags may be a user's words
    return OPEN if tail.endswith("<think>") else "" if tail.endswith("</think>") else POSSIBLE


# What the first two count is not taken back with a draft's tokens, and nobody reads temperatures.
_ATTRIBUTES = re.compile(r"\b(max_tokens|stop|temperature)\s*=")
_SCHEMA = re.compile(r"%json\s*(?=\{)")  # behind it stands one of Lark's rules
_NOTES = {"description", "title", "$comment", "default", "examples"}


def _texts(schema: Any, notes: Collection[str] = _NOTES) -> Iterator[str]:
    """The texts in a schema that constrain: all but `notes`, which are for people."""
    if isinstance(schema, str):
        yield schema
    elif isinstance(schema, dict):
        for key, part in schema.items():
            if key not in notes or isinstance(part, dict):  # a dict: a property of that name
                yield key
                yield from _texts(part, () if key in ("const", "enum") else notes)
    elif isinstance(schema, list):
        for part in schema:
            yield from _texts(part, notes)


def _schemas(rules: str) -> Iterator[Json]:
    """The schemas in rules of Lark's."""
    for part in _SCHEMA.finditer(rules):
        with suppress(ValueError):
            yield json.JSONDecoder().raw_decode(rules, part.end())[0]


def _limits_of(kind: str, value: Any, special: Collection[str]) -> Limits:
    """The limits for a grammar, which is measured before it is built.

    `special` are the texts of tokens that no text has. Raises ValueError for what is too large, and
    for what llguidance takes, and does something else with.
    """
    check_length(value, kind == LARK)
    schemas = [] if isinstance(value, str) else [value]
    parts = [value]  # in which a special token's text would be taken for the token
    if kind == LARK and not is_gbnf(value):  # rules of Lark's may name a token, their schemas not
        parts = schemas = [*_schemas(value)]
    limits = limits_of(value, kind == LARK, schemas)
    if kind == REGEX and (len(value) - len(value.rstrip("\\"))) % 2:
        raise ValueError("ends with a backslash that escapes nothing")
    if kind == LARK and is_gbnf(value):
        parts = [in_characters(value)]
    elif kind == LARK and (attribute := _ATTRIBUTES.search(HELD.sub(" ", value))):
        raise ValueError(f"has a rule with {attribute[1]}, which is not supported")
    # As one text, with what no token has between its parts: there may be thousands of either.
    plain = "\0".join(text for part in parts for text in _texts(part)).replace("\\", "")
    for token in special:
        if token in plain:
            raise ValueError(f"holds {token}, which is a token of its own")
    for schema in schemas_in(schemas):  # keys would have to be counted: a text may repeat one
        required, least = schema.get("required"), schema.get("minProperties")
        known = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > known:
            raise ValueError("minProperties beyond the required ones is not supported")
    return limits


def grammar_of(body: Json, engine: Engine, prompt: list[int]) -> Grammar | None:
    """The grammar that a request's text obeys; None if it asks for none.

    Raises RequestError: 400, naming the field, for one that is too large, or that llguidance
    refuses; 503 for one that takes too long all the same.
    """
    if (constraint := constraint_of(body)) is None:
        return None
    name, kind, value = constraint
    target = engine.target
    try:
        words = target.tokenizer, target.vocab_size, frozenset(target.eos_ids)
        vocabulary = vocabulary_of(*words)
        limits = _limits_of(kind, value, vocabulary.special)
        reasoning = reasoning_of(target.tokenizer, prompt)
        has_tokens = "</think>" in target.tokenizer.added_tokens_encoder
        if kind == LARK and is_gbnf(value):
            value = vocabulary.in_lark(value)
            check_length(value, True)
            limits = limits_of(value, True, [])
        source = source_of(kind, value, reasoning, has_tokens)
        return vocabulary.compiled(source, limits)
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"cannot be used: {one_line(error, longest=200)}") from error
