"""Which fields a request may have, so that none that is misspelt is silently ignored.

A Check tells what a field may hold. A route has its own names. Some of other servers change no
text, whatever their value: clients send them unasked, and they are taken silently. Others change
nothing by one value alone. Any other field is a 400. A null counts as absent everywhere. Names
inside of messages and of other values are not looked at: clients send back what servers gave them.
"""

import json
import re
import reprlib
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

from runtime.models.prompts import is_text
from runtime.values import Json, RequestError

# Who asks, how it is billed, kept or computed; and how much a model is to think, which only the
# chat template could tell it.
SILENT = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options parallel_tool_calls max_tool_calls reasoning_effort reasoning verbosity "
    "truncation thinking context_management cache_control inference_geo request_id priority "
    "cache_salt session_id cache_prompt id_slot keep_alive stream_interval".split()
)
# Of what is not done here, or not on every route, the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "background": (False,),
    "use_beam_search": (False,), "length_penalty": (1,), "top_logprobs": (0,), "logprobs": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "chat": (False,),
    "tools": ([],), "tool_choice": ("auto", "none"), "functions": ([],),
    "function_call": ("auto", "none"), "modalities": (["text"],), "mcp_servers": ([],),
}  # fmt: skip
IDS, NAMES = "return_token_ids", "return_tokens_as_token_ids"

Check = tuple[Callable[[Any], bool], str]  # whether a value is valid, and what it must be
TRUTH: Check = lambda value: isinstance(value, bool), "true or false"


def number(low: float, high: float, kind: Any = int | float, name: str = "a number") -> Check:
    """The check of a number in a range."""

    def is_valid(value: Any) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high

    return is_valid, f"{name} from {low} to {high}"


def integer(low: int, high: int) -> Check:
    """The check of an integer in a range."""
    return number(low, high, int, "an integer")


def list_of(is_valid: Callable[[Any], Any], least: int, most: float) -> Callable[[Any], bool]:
    """What tells whether a value is a list of so many valid ones."""
    return lambda values: (
        isinstance(values, list) and least <= len(values) <= most and all(map(is_valid, values))
    )


def is_stop(value: Any) -> bool:
    """Whether a value is a text as long as a stop string may be."""
    return is_text(value) and len(value) <= 1000


def wrong(path: str, what: str) -> RequestError:
    """The error for what stands at a path, which is the message's first word."""
    return RequestError(f"{path} {what}", param=re.match(r"\w+", path)[0])


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are equal; in JSON true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def known_fields(body: Json, names: Collection[str]) -> Json:
    """The fields of a body that have one of these names, without those that are null.

    Raises RequestError for the first other one that may change an answer, and names the nearest.
    """
    fields: Json = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in names:
            fields[name] = value
        elif name in NEUTRAL:
            neutral = (body.get("n") or 1,) if name == "best_of" else NEUTRAL[name]
            if not any(_is_same(value, each) for each in neutral):
                only = "n" if name == "best_of" else " or ".join(map(json.dumps, neutral))
                raise RequestError(f"{name} is not supported here, other than as {only}", name)
        elif name not in SILENT:
            near = get_close_matches(name[:100], names, 1)
            what = f"there is no field {reprlib.repr(name)} here"
            what += f": the nearest one is {near[0]}" if near else ""
            raise RequestError(what, param=name[:100], code="unknown_parameter")
    return fields
