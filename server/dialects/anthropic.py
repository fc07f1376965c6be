"""Anthropic's /v1/messages and /v1/messages/count_tokens, as agents in terminals speak them.

    their fields                ours, as in a chat of OpenAI's
    system, messages            messages: blocks become texts, calls and results
    tools, tool_choice          tools, tool_choice, parallel_tool_calls
    stop_sequences              stop
    output_config.format        response_format
    max_tokens, top_k, stream…  the same; so are most fields of /generate

A block of an answer is a text, thinking (the model's reasoning, which nobody has signed) or a call.
`metrics`, with `timings` in it, `seed` and `warnings` stand beside what Anthropic's answers have.
Not covered: images, documents, and tools that Anthropic's servers run.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

from flask import Flask, Response, current_app, g

import server.dialects.translation as to_chat
from runtime.models.calls import AnswerReader, Call, Part, Thought
from runtime.values import Json, RequestError
from server.fields import known_fields
from server.parsing import check_model
from server.service import Service, read_body

from .chat import NAMES as CHAT_NAMES
from .chat import OPENAIS_OWN, errors_name, read_chat
from .shapes import InItems, Logprobs, event, figures
from .translation import objects, text_at, text_of, wrong

_PATH = "/v1/messages"
_NAMES = CHAT_NAMES - {"n", "logprobs", "top_logprobs", *OPENAIS_OWN} | {
    "system", "stop_sequences", "output_config",
}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def register_routes(app: Flask, service: Service) -> None:
    """Add the routes for the service's model."""

    @app.post(_PATH)
    def messages() -> Response | Json:
        """Answer a conversation."""
        body, sent = read_body(), dict[str, str]()
        if body.get("thread"):
            raise wrong("thread", "is not supported: send the whole conversation as messages")
        fields = known_fields(body, _NAMES)
        with errors_name(sent):
            if "max_tokens" not in fields:
                raise wrong("max_tokens", "must be an integer: this protocol has no default")
            _translate(fields, sent)
            new_reader = read_chat(service, fields, sent)
            return service.respond(fields, Messages(new_reader=new_reader))

    @app.post(f"{_PATH}/count_tokens")
    def count_tokens() -> Json:
        """Count the tokens of a conversation and its tools, as the model would read them."""
        fields = known_fields(read_body(takes_place=False), _NAMES)
        sent = dict[str, str]()
        check_model(fields.get("model") or service.name, service.name)
        with errors_name(sent):
            _translate(fields, sent)
            read_chat(service, fields, sent)
        return {"input_tokens": len(fields["prompt"])}


def error_body(error: RequestError, request_id: str) -> Json:
    """An error in Anthropic's form."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    said = {"type": _ERRORS.get(error.status, other), "message": error.message}
    return {"type": "error", "error": said, "request_id": request_id}


ERROR_FORMS = dict.fromkeys((_PATH, f"{_PATH}/count_tokens"), lambda error: error_body(error, g.id))


# ------------------------------------------------------------------------- what clients send


def _translate(fields: Json, sent: dict[str, str]) -> None:
    """Turn the fields, in place, into those of a chat. `sent` gets the clients' names of them."""
    fields["messages"] = _read_messages(fields.pop("system", None), fields.get("messages"), sent)
    last = fields["messages"][-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True  # as this protocol has it
    to_chat.read_tools(fields, sent, ("custom", None), "input_schema")
    if (choice := fields.pop("tool_choice", None)) is not None:
        kind = str(choice.get("type")) if isinstance(choice, dict) else ""
        if kind != "tool" and kind not in _CHOICES:
            raise wrong("tool_choice.type", "must be auto, any, tool or none")
        to_chat.read_choice(fields, choice if kind == "tool" else _CHOICES[kind])
        if choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
    to_chat.rename(fields, sent, "stop_sequences", "stop")
    to_chat.read_format(fields, sent, "output_config")


def _read_messages(system: Any, messages: Any, sent: dict[str, str]) -> list[Json]:
    """The messages of a chat, checked as far as it does not do that."""
    turns = list[Json]()
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    if system:
        turns.append({"role": "system", "content": text_of(system, "system")})
    for path, message in objects(messages, "messages"):
        if message.get("role") not in ("user", "assistant", "system"):
            raise wrong(f"{path}.role", "must be user or assistant")
        for where, turn in _read_message(message, path):
            sent[f"messages[{len(turns)}]"] = where
            turns.append(turn)
    return turns


def _is_billing(block: Any) -> bool:
    """Whether a block is for Anthropic's books: agents' prompts would not begin alike with it."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


def _read_message(message: Json, path: str) -> list[tuple[str, Json]]:
    """The messages of a chat that say the same, each behind its path: results are of their own."""
    role, content, turns = message["role"], message.get("content"), list[tuple[str, Json]]()
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for where, block in objects(content, f"{path}.content"):
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            result = text_of(block.get("content") or "", f"{where}.content")
            called = text_at(block, where, "tool_use_id")
            turns.append((where, {"role": "tool", "tool_call_id": called, "content": result}))
            continue
        if not turns or turns[-1][1]["role"] != role:
            turns.append((path, {"role": role, "content": []}))
        turn = turns[-1][1]
        if kind == "text":
            turn["content"].append({"type": "text", "text": text_at(block, where)})
        elif kind == "tool_use" and role == "assistant":
            turn.setdefault("tool_calls", []).append(_read_call(block, where))
        elif kind == "thinking" and role == "assistant":
            turn["reasoning_content"] = text_at(block, where, "thinking")
        elif kind != "redacted_thinking":
            raise to_chat.unsupported(where, kind)
    for _, turn in turns:
        turn["content"] = turn["content"] or ""
    return turns


def _read_call(block: Json, path: str) -> Json:
    if not isinstance(block.get("input"), dict):
        raise wrong(f"{path}.input", "must be an object")
    number, name = (text_at(block, path, key) for key in ("id", "name"))
    return to_chat.call_of(number, name, block["input"])


# --------------------------------------------------------------------------- what they read


class Messages(InItems):
    """A message of blocks; or a stream of events, each with a name, that tell of them in turn."""

    def __init__(self, *, new_reader: Callable[[], AnswerReader]) -> None:
        super().__init__(new_reader=new_reader)
        self._head = {"id": f"msg_{g.id}", "type": "message", "role": "assistant"}
        self._head["model"] = current_app.extensions["model"]
        self._id, self._content = g.id, list[Json]()  # blocks, of which the last is under way

    @property
    def opening(self) -> str:
        """A stream begins with the message without its content."""
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head | nothing | {"usage": _usage(len(self.job.request.prompt))}
        return event("message_start", message=message) + event("ping")

    def part(self, index: int, part: Part, logprobs: Logprobs = None) -> str:
        """Go on with a block, or begin one. Returns the events that tell of it."""
        (block, delta), told = _said(part), ""
        kind, is_call = block["type"], isinstance(part, Call)
        if is_call or not self._content or self._content[-1]["type"] != kind:
            told = self._stop()
            told += event("content_block_start", index=len(self._content), content_block=block)
            self._content.append(block)
        if is_call:
            self._content[-1] = block | {"input": to_chat.arguments_of(part) or {}}  # if it was cut
        else:
            self._content[-1][kind] += delta[kind]
        return told + event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _stop(self) -> str:
        """The event that ends the block, if there is one."""
        count = len(self._content)
        return event("content_block_stop", index=count - 1) if count else ""

    def last(self, body: Json) -> Iterator[str]:
        """The rest of the blocks, and why the message ended, with figures."""
        yield from (self.part(0, part) for part in self.rest(0, body))
        yield ("" if self._content else self.part(0, "")) + self._stop()
        ending, told = self._ending(body), _figures(body)
        self.answer = self._head | {"content": self._content} | ending | told
        yield event("message_delta", delta=ending, **told)
        yield event("message_stop")

    def failed(self, error: RequestError) -> str:
        return event("error", **error_body(error, self._id))

    def _ending(self, body: Json) -> Json:
        stop, has_called = body.get("stop_reason"), self.readers[0].num_calls
        reason = "tool_use" if has_called else "stop_sequence" if stop else "end_turn"
        reason = "max_tokens" if body["finish_reason"] == "length" else reason
        return {"stop_reason": reason, "stop_sequence": None if has_called else stop}


def _said(part: Part) -> tuple[Json, Json]:
    """The block that a part begins, and the delta that has it."""
    if isinstance(part, Call):
        block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name}
        return block | {"input": {}}, {"type": "input_json_delta", "partial_json": part.arguments}
    kind, text = ("thinking", part.text) if isinstance(part, Thought) else ("text", part)
    more = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: ""} | more, {"type": f"{kind}_delta", kind: text}


def _usage(prompt: int, cached: int = 0, written: int = 0, *_: int) -> Json:
    """Tokens in Anthropic's words. Theirs of the prompt are those that no cache had."""
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"input_tokens": prompt - cached} | cache | {"output_tokens": written}


def _figures(body: Json) -> Json:
    """What /generate tells of an answer, with `timings` where clients do not look for them."""
    told = figures(body) | {"usage": _usage(*to_chat.counts(body))}
    timings = told.pop("timings", None)
    return told | {"metrics": body.get("metrics", {}) | {"timings": timings}}
