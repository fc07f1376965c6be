"""What a text must obey: one grammar, which clients ask for under many names.

    response_format                        OpenAI's; its type json_object may have a `schema`
    json_schema, regex, grammar, choice    of /generate

A request has at most one of them.
"""

import json
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from math import inf
from typing import Any

from runtime.grammars import OPEN, POSSIBLE, Grammar, source_of, vocabulary_of
from runtime.grammars.measure import (
    CHOICE,
    JSON,
    LARK,
    REGEX,
    check_length,
    checked_limits,
    is_gbnf,
    limits_of,
)
from runtime.models.prompts import Conversation, Tokenizer, is_text
from runtime.values import Engine, Json, TextSequence, one_line

from .fields import list_of, wrong

if not find_spec("llguidance"):  # which computes masks, and is imported when it is asked
    raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")
_TAIL = 32  # tokens: reasoning may open or close in a prompt's last ones, and open in the first
# Of each field its kind, what tells whether its value is one, and what it must be.
_KINDS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "json_schema": (JSON, lambda value: isinstance(value, dict | bool), "a JSON schema"),
    "regex": (REGEX, is_text, "a regular expression, not empty"),
    "grammar": (LARK, is_text, "a grammar, in the form of Lark or GBNF"),
    "choice": (CHOICE, list_of(is_text, 1, inf), "a list of texts, none of them empty"),
}
FIELDS = ("response_format", *_KINDS)


def constraint_of(body: Json) -> tuple[str, str, Any] | None:
    """The constraint of a request, as (path of the field, kind, value). Raises RequestError.

    A schema may be sent as a text.
    """
    asked = [(name, name, body[name]) for name in _KINDS if body.get(name) is not None]
    if (form := body.get("response_format")) is not None:
        asked = [*_of_response_format(form), *asked]
    if len(asked) > 1:
        raise wrong(asked[1][0], f"cannot go with {asked[0][0]}: a text obeys one")
    if not asked:
        return None
    path, name, value = asked[0]
    kind, is_valid, what = _KINDS[name]
    if kind == JSON and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not is_valid(value):
        raise wrong(path, f"must be {what}")
    return path, kind, value


def _of_response_format(form: Any) -> list[tuple[str, str, Any]]:
    """The schema that OpenAI's field asks for, if it does."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format.schema", "json_schema", form.get("schema", {"type": "object"}))]
    if kind != "json_schema":
        raise wrong("response_format", "must be an object of type text, json_object or json_schema")
    held = form.get("json_schema", form)
    schema = held.get("schema") if isinstance(held, dict) else None
    return [("response_format.json_schema.schema", "json_schema", schema)]


def reasoning_of(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Whether reasoning between <think> tags may stand before the text, or is under way."""
    template = tokenizer.chat_template if isinstance(prompt, Conversation) else None
    if not (isinstance(template, str) and "think>" in template):
        return ""
    tail = tokenizer.decode(prompt[-_TAIL:]).rstrip()  # earlier tags may be a user's words
    return OPEN if tail.endswith("<think>") else "" if tail.endswith("</think>") else POSSIBLE


def reasoning_tokens(sequence: TextSequence) -> Json:
    """How many tokens of a chat's answer are reasoning, with its tags, where there may be any."""
    prompt, tokenizer, output = sequence.request.prompt, sequence.tokenizer, sequence.output
    if not (reasoning := reasoning_of(tokenizer, prompt)):
        return {}
    begin = tokenizer.decode(output[:_TAIL]).lstrip()
    if reasoning != OPEN and not begin.startswith("<think>"):
        return {"reasoning_tokens": 0}
    counts = range(1, len(output))  # of the first tokens: the fewest with the tag that ends it
    end = bisect_left(counts, True, key=lambda n: "</think>" in tokenizer.decode(output[:n]))
    return {"reasoning_tokens": min(end + 1, len(output))}


def grammar_of(body: Json, engine: Engine, prompt: list[int]) -> Grammar | None:
    """The grammar that a request's text obeys; None if it asks for none.

    Raises RequestError: 400, naming the field, for one that is too large, or that llguidance
    refuses; 503 for one that takes too long all the same.
    """
    if (constraint := constraint_of(body)) is None:
        return None
    name, kind, value = constraint
    target, tokenizer = engine.target, engine.target.tokenizer
    try:
        vocabulary = vocabulary_of(tokenizer, target.vocab_size, frozenset(target.eos_ids))
        limits = checked_limits(kind, value, vocabulary.special)
        if kind == LARK and is_gbnf(value):
            value = vocabulary.in_lark(value)
            check_length(value, True)
            limits = limits_of(value, True, [])
        has_tokens = "</think>" in tokenizer.added_tokens_encoder
        source = source_of(kind, value, reasoning_of(tokenizer, prompt), has_tokens)
        return vocabulary.compiled(source, limits)
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"cannot be used: {one_line(error, longest=200)}") from error
