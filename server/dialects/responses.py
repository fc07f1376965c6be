"""OpenAI's /v1/responses. Nothing is kept: each request has its whole conversation.

    their fields                ours, as in a chat
    instructions, input         messages: items become texts, calls and results
    tools, tool_choice          tools, tool_choice, which are flat there
    text.format                 response_format, which is flat there
    max_output_tokens           max_tokens
    top_logprobs, include       logprobs, top_logprobs
    temperature, stream, …      the same; so are most fields of /generate

An answer is a list of items: a message, reasoning, calls. It has /generate's figures, too. Not
covered: images, files, built-in tools.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from flask import Flask, Response, current_app, g

import server.dialects.translation as to_chat
from runtime.models.calls import AnswerReader, Call, Part, Thought
from runtime.values import Json, RequestError
from server.fields import known_fields
from server.service import Service, read_body

from .chat import NAMES as CHAT_NAMES
from .chat import OPENAIS_OWN, errors_name, log_probabilities, read_chat
from .shapes import InItems, Logprobs, Untold, event, figures
from .translation import objects, text_at, text_of, wrong

# What an answer tells again of its request, and what it tells of absent fields.
_TOLD: Json = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "prompt_cache_key": None, "reasoning": None, "service_tier": "default", "temperature": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip
_NAMES = CHAT_NAMES - {"messages", "n", "logprobs", *OPENAIS_OWN} | {
    "instructions", "input", "text", "include", "max_output_tokens",
}  # fmt: skip
_KEPT_ELSEWHERE = "previous_response_id", "conversation", "prompt"
_TEXTS = "input_text", "output_text", "text"
_KINDS: Json = {"message": ("msg", {"role": "assistant"}), "reasoning": ("rs", {"summary": []})}


def register_routes(app: Flask, service: Service) -> None:
    """Add the route for the service's model."""

    @app.post("/v1/responses")
    def responses() -> Response | Json:
        """Answer a conversation."""
        body, sent = read_body(), dict[str, str]()
        told = _TOLD | {field: body[field] for field in _TOLD if body.get(field) is not None}
        for name in _KEPT_ELSEWHERE:
            if body.get(name) is not None:
                raise wrong(name, "is not supported: send the whole conversation as input")
        fields = known_fields(body, _NAMES)
        with errors_name(sent):
            _translate(fields, sent)
            new_reader = read_chat(service, fields, sent)
            return service.respond(fields, Responses(service, told, new_reader))


# ------------------------------------------------------------------------- what clients send


def _translate(fields: Json, sent: dict[str, str]) -> None:
    """Turn the fields, in place, into those of a chat. `sent` gets the clients' names of them."""
    instructions, given = fields.pop("instructions", None), fields.pop("input", None)
    sent |= {"messages": "input", "prompt": "input"}
    fields["messages"] = _read_input(instructions, given, sent)
    to_chat.read_tools(fields, sent, ("function",), "parameters")
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise wrong("tool_choice.type", "must be function: no other type is supported")
    to_chat.read_choice(fields, choice)
    to_chat.rename(fields, sent, "max_output_tokens", "max_tokens")
    to_chat.read_format(fields, sent, "text")
    if not isinstance(include := fields.pop("include", None), list | None):
        raise wrong("include", "must be a list")
    top = fields["top_logprobs"] = fields.get("top_logprobs") or None
    fields["logprobs"] = bool(top) or "message.output_text.logprobs" in (include or [])


def _read_input(instructions: Any, given: Any, sent: dict[str, str]) -> list[Json]:
    """The messages of a chat, checked as far as it does not do that."""
    turns = list[Json]()
    if instructions:
        turns.append({"role": "system", "content": text_of(instructions, "instructions")})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    for path, item in objects(given, "input"):
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "reasoning":  # of an answer before, which the model does not read again
            continue
        if kind == "function_call":
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            said = (text_at(item, path, key) for key in ("call_id", "name", "arguments"))
            turns[-1].setdefault("tool_calls", []).append(to_chat.call_of(*said))
        elif kind == "function_call_output":
            result = text_of(item.get("output"), f"{path}.output", _TEXTS)
            called = text_at(item, path, "call_id")
            turns.append({"role": "tool", "tool_call_id": called, "content": result})
        elif kind == "message":
            content = text_of(item.get("content"), f"{path}.content", _TEXTS)
            turns.append({"role": text_at(item, path, "role"), "content": content})
        else:
            raise to_chat.unsupported(path, kind)
        sent[f"messages[{len(turns) - 1}]"] = path
    return turns


# --------------------------------------------------------------------------- what they read


class Responses(InItems):
    """A response with items; or a stream of events, each with a name, that tell of them in turn."""

    def __init__(
        self, service: Service, told: Json, new_reader: Callable[[], AnswerReader]
    ) -> None:
        """`told` are the request's fields as they are told again."""
        super().__init__(new_reader=new_reader)
        head = {"id": f"resp_{g.id}", "object": "response", "created_at": int(time.time())}
        head |= {"model": current_app.extensions["model"], "background": False, "store": False}
        nothing = dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage"))
        self._response = head | told | nothing
        self._items = list[Json]()  # those that are done
        self._item: Json | None = None  # the one under way, a message or reasoning
        self._about, self._content = Json(), Json()  # what its events say of it; what it has
        self._tokenizer, self._untold = service.tokenizer, Untold(service.tokenizer)
        self._numbers = count()  # of events

    def _event(self, kind: str, **data: Any) -> str:
        return event(f"response.{kind}", sequence_number=next(self._numbers), **data)

    def _state(self, status: str, **more: Any) -> Json:
        return self._response | {"status": status, "output": self._items} | more

    @property
    def opening(self) -> str:
        """A stream begins with the response without its items."""
        response = self._state("in_progress")
        return "".join(self._event(kind, response=response) for kind in ("created", "in_progress"))

    def part(self, index: int, part: Part, logprobs: Logprobs = None) -> str:
        """Add a part to the items. Returns the events that tell of it."""
        self._untold.push(logprobs or [], log_probabilities(logprobs or [], self._tokenizer))
        if isinstance(part, Call):
            return self._close() + self._call(part)
        if not part and logprobs is not None:
            return ""
        kind, text = ("reasoning", part.text) if isinstance(part, Thought) else ("message", part)
        is_new = self._item is None or self._item["type"] != kind
        told = self._close() + self._open(kind) if is_new else ""
        self._content["text"] += text
        said = {"delta": text}
        if kind == "message":
            end = self.readers[index].position
            said["logprobs"] = self._untold.take(end - len(text), end)
            self._content["logprobs"] += said["logprobs"]
        return told + self._event(f"{self._content['type']}.delta", **self._about, **said)

    def _open(self, kind: str) -> str:
        """Begin an item. Returns the events that tell of it."""
        prefix, more = _KINDS[kind]
        number = f"{prefix}_{secrets.token_hex(12)}"
        self._item = {"id": number, "type": kind, "status": "in_progress", "content": []} | more
        self._content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            self._content = {"type": "reasoning_text", "text": ""}
        self._about = {"item_id": number, "output_index": len(self._items), "content_index": 0}
        told = self._added(self._item)
        return told + self._event("content_part.added", **self._about, part=self._content)

    def _close(self, status: str = "completed") -> str:
        """End the item under way, if there is one. Returns the events that tell of it."""
        if self._item is None:
            return ""
        content = self._content
        said = {name: content[name] for name in ("text", "logprobs") if name in content}
        told = self._event(f"{content['type']}.done", **self._about, **said)
        told += self._event("content_part.done", **self._about, part=content)
        item, self._item = self._item | {"status": status, "content": [content]}, None
        return told + self._done(item)

    def _added(self, item: Json) -> str:
        return self._event("output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: Json) -> str:
        self._items.append(item)
        return self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: Call) -> str:
        """Add the item of a call. Returns the events that tell of it."""
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "name": call.name}
        item |= {"call_id": f"call_{secrets.token_hex(12)}", "arguments": ""}
        about, said = {"item_id": item["id"], "output_index": len(self._items)}, call._asdict()
        told = self._added(item | {"status": "in_progress"})
        told += self._event("function_call_arguments.delta", **about, delta=call.arguments)
        told += self._event("function_call_arguments.done", **about, **said)
        is_cut = to_chat.arguments_of(call) is None
        return told + self._done(item | said | {"status": "incomplete" if is_cut else "completed"})

    def last(self, body: Json) -> Iterator[str]:
        """The rest of the items, and the whole response."""
        yield from (self.part(0, part) for part in self.rest(0, body))
        why = {"reason": "max_output_tokens"} if body["finish_reason"] == "length" else None
        status = "incomplete" if why else "completed"
        if not (self._items or self._item):
            yield self.part(0, "")
        # Tokens of no text are left: of a stop string, or of half a character.
        if self._item and self._item["type"] == "message" and (rest := self._untold.take(0)):
            self._content["logprobs"] += rest
            yield self._event("output_text.delta", **self._about, delta="", logprobs=rest)
        yield self._close(status)
        given, cached, written, reasoning = to_chat.counts(body)
        usage = {"input_tokens": given, "output_tokens": written, "total_tokens": given + written}
        usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": reasoning}
        more = figures(body) | {"usage": usage, "incomplete_details": why}
        self.answer = self._state(status, **more)
        yield self._event(status, response=self.answer)

    def failed(self, error: RequestError) -> str:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        about = {"code": code, "message": error.message}
        return self._event("failed", response=self._state("failed", error=about))
