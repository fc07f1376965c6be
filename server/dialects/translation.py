"""What other protocols have in common: how their fields become those of a chat.

Whatever is wrong is named by its path, such as messages[2].content[0].
"""

import json
from collections.abc import Iterator
from typing import Any

from runtime.models.calls import Call
from runtime.values import Json, RequestError
from server.fields import wrong


def unsupported(path: str, kind: Any) -> RequestError:
    """The error for an object of a type that is not read here."""
    kind = kind if isinstance(kind, str) else "no type"
    why = "image input is not supported" if "image" in kind else "which is not supported"
    return wrong(path, f"is of type {kind}, {why}")


def objects(value: Any, path: str) -> Iterator[tuple[str, Json]]:
    """The objects in a list, each behind its path. Raises RequestError where there are none."""
    if not isinstance(value, list) or not value:
        raise wrong(path, "must be a non-empty list")
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
    texts = list[str]()
    for where, part in objects(content, path):
        if part.get("type") not in kinds:
            raise unsupported(where, part.get("type"))
        texts.append(text_at(part, where))
    return "".join(texts)


def rename(fields: Json, sent: dict[str, str], theirs: str, ours: str) -> None:
    """Give a field its name in a chat. Raises RequestError if that was sent with another value."""
    if (value := fields.pop(theirs, None)) is not None:
        if fields.get(ours, value) != value:
            raise wrong(theirs, f"is another name of {ours}: send one")
        fields[ours], sent[ours] = value, theirs


def read_format(fields: Json, sent: dict[str, str], holder: str) -> None:
    """Turn the `format` in a field into the response_format of a chat."""
    if not isinstance(held := fields.pop(holder, None), dict | None):
        raise wrong(holder, "must be an object")
    if held and (form := held.get("format")) is not None:
        fields["response_format"] = form
        sent["response_format"] = path = f"{holder}.format"
        sent["response_format.json_schema.schema"] = f"{path}.schema"


def read_tools(
    fields: Json, sent: dict[str, str], kinds: tuple[str | None, ...], schema: str
) -> None:
    """Turn flat tools of these types into those of a chat; theirs name the schema like this."""
    if not fields.get("tools"):
        return
    listed = list[Json]()
    for path, tool in objects(fields["tools"], "tools"):
        if (kind := tool.get("type")) not in kinds:
            raise wrong(path, f"is of type {kind}: only type {kinds[0]} is supported")
        names = {"name": "name", "description": "description", "parameters": schema}
        function = {ours: tool[theirs] for ours, theirs in names.items() if theirs in tool}
        listed.append({"type": "function", "function": function})
        sent |= {f"{path}.function": path, f"{path}.function.parameters": f"{path}.{schema}"}
    fields["tools"] = listed


def read_choice(fields: Json, choice: Any) -> None:
    """Put a choice of tools into the fields: a word, or a tool by its name in an object."""
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": text_at(choice, "tool_choice", "name")}}
    fields["tool_choice"] = choice


def call_of(number: str, name: str, arguments: Any) -> Json:
    """A call in a chat's message; its arguments may be a text already."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(call: Call) -> Json | None:
    """A call's arguments; None where it was cut, which leaves no JSON."""
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None


def counts(body: Json) -> tuple[int, int, int, int]:
    """Tokens of an answer: of its prompt, those that a cache had, written ones, of reasoning."""
    usage = body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return usage["prompt_tokens"], cached, usage["completion_tokens"], reasoning
