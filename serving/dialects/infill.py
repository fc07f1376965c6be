"""Texts with a gap, as dialects send them; models/fim.py makes the prompts."""

from typing import Any

from messages import Json, RequestError
from models.fim import Gap
from models.prompts import is_text
from serving.service import Service


def fill_in(service: Service, fields: Json) -> None:
    """Where there is a suffix, put the prompt of the text with the gap in front of it.

    Raises RequestError for what is no text, and for a model that cannot fill in.
    """
    suffix = fields.pop("suffix", None)
    if suffix is not None and suffix != "":
        service.read_infill(Gap(text_in(fields, "prompt"), check_text(suffix, "suffix")), fields)


def text_in(fields: Json, name: str) -> str:
    """The text of a field that may be empty or absent. Raises RequestError."""
    return check_text(fields.get(name) or "", name)


def check_text(value: Any, name: str) -> str:
    """A text as it is, which may be empty. Raises RequestError for anything else."""
    if value != "" and not is_text(value):
        raise RequestError(f"{name} must be a text, where a gap is to be filled in", param=name)
    return value
