"""The fields that clients of other servers send, and what becomes of them here."""

from typing import Any

from messages import Json, RequestError

_TEXT_ALONE = "not supported: this server answers with text alone"
# The only values of these fields that are served (null counts as absent); what is said of others.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat": ((False,), "is a field of /generate: /v1/chat/completions takes messages"),
    "echo": ((False,), "is not supported: the answer is the new text alone"),
    "suffix": (("",), "is not supported: a text is continued, and not filled in"),
    "tools": (([],), "go with messages: /v1/chat/completions takes both"),
    "tool_choice": (("none", "auto"), "goes with tools: /v1/chat/completions takes them"),
    "functions": (([],), "are not supported: tools are"),
    "function_call": (("none", "auto"), "is not supported: tool_choice is"),
    "modalities": ((["text"],), f'must be ["text"]: others are {_TEXT_ALONE}'),
}


def supported(body: Json) -> Json:
    """The fields without those that may have one value only. Raises RequestError for another."""
    best_of = body.pop("best_of", None)
    if best_of is not None and (best_of is True or best_of != (body.get("n") or 1)):
        raise RequestError("best_of must equal n: no choice is left out", param="best_of")
    for name, (served, otherwise) in _ONLY.items():
        value = body.pop(name, None)
        is_served = value in served and not (isinstance(value, bool) and served[0] is not False)
        if value is not None and not is_served:
            raise RequestError(f"{name} {otherwise}", param=name)
    return body
