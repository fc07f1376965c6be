"""What other protocols' conversations have in common: objects in lists, and texts in parts.

Whatever is wrong is named by its path, such as messages[2].content[0].
"""

import re
from collections.abc import Iterator
from typing import Any

from messages import Json, RequestError


def wrong(path: str, what: str) -> RequestError:
    """The error for what stands at a path, which is the message's first word."""
    return RequestError(f"{path} {what}", param=re.match(r"\w+", path)[0])


def unsupported(path: str, kind: Any) -> RequestError:
    """The error for an object of a type that is not read here."""
    kind = kind if isinstance(kind, str) else "no type"
    if "image" in kind:
        return wrong(path, f"is of type {kind}: image input is not supported, text is")
    return wrong(path, f"is of type {kind}, which is not supported here")


def objects(value: Any, path: str) -> Iterator[tuple[str, Json]]:
    """The objects in a list, each behind its path. Raises RequestError for anything else."""
    if not isinstance(value, list):
        raise wrong(path, "must be a list")
    for i, each in enumerate(value):
        if not isinstance(each, dict):
            raise wrong(f"{path}[{i}]", "must be an object")
        yield f"{path}[{i}]", each


def text_at(part: Json, path: str, key: str = "text") -> str:
    """The text that an object has under this key. Raises RequestError where it is none."""
    if not isinstance(text := part.get(key), str):
        raise wrong(f"{path}.{key}", "must be a text")
    return text


def text_of(content: Any, path: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a content: that itself, or that of its parts, which are of these types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(path, "must be a text or a list")
    texts = list[str]()
    for where, part in objects(content, path):
        if part.get("type") not in kinds:
            raise unsupported(where, part.get("type"))
        texts.append(text_at(part, where))
    return "".join(texts)


def take(fields: Json, harmless: tuple[str, ...], refused: dict[str, str], route: str) -> None:
    """Take out what changes no text. Raises RequestError for what is refused, and says why.

    An answer of these protocols is one text.
    """
    for name in harmless:
        fields.pop(name, None)
    for name, why in refused.items():
        if fields.pop(name, None) not in (None, False, []):
            raise RequestError(f"{name} is not supported: {why}", param=name)
    if fields.get("n") not in (None, 1):
        raise RequestError(f"n must be 1: an answer of {route} is one text", param="n")
