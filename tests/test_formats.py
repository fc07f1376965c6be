"""Clients ask for one format by many names, and get the same text on each route.

What cannot be used is a 400 that names the field, however a schema explodes. A text that max_tokens
cuts is said to be cut. Behind reasoning the format begins where that ends.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import llguidance.hf
import pytest
import speculative_decoding as core
from conftest import application, load
from llguidance import LLMatcher
from server import end_of, is_error
from transformers import AutoTokenizer

import grammars
from grammars import probe
from serving.options import Options

GENERATE, COMPLETIONS, CHAT = ROUTES = "/generate", "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
SCHEMA["properties"]["days"]["minimum"] = 1
REGULAR, CHOICES = "(red|green), [0-9]{2}", ["red", "green", "blue"]
LARK = 'start: ("red" | "green") ", " /[0-9]{2}/'
GBNF = 'root ::= ("red" | "green") ", " [0-9] [0-9]'


def wrapped(schema):
    """OpenAI's."""
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


NAMES = {  # the fields that ask for the same
    "schema": [
        {"response_format": wrapped(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},  # llama.cpp's
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA},
    ],
    "regex": [
        {"regex": REGULAR}, {"guided_regex": REGULAR}, {"structured_outputs": {"regex": REGULAR}},
        {"grammar": LARK}, {"ebnf": LARK}, {"guided_grammar": LARK}, {"grammar": GBNF},
        {"ebnf": GBNF}, {"structured_outputs": {"grammar": GBNF}},
    ],
    "choice": [
        {"choice": CHOICES}, {"guided_choice": CHOICES},
        {"structured_outputs": {"choice": CHOICES}},
    ],
    "object": [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"json_schema": {"type": "object"}},
    ],
}  # fmt: skip
PATTERNS = {
    "schema": r'\{"unit":"[CF]","days":[1-9]\}', "regex": REGULAR, "choice": "red|green|blue",
    "object": r"\{.*",
}  # fmt: skip
