"""Anthropic's /v1/messages and /v1/messages/count_tokens, as agents in terminals speak them.

    their fields                ours, as in a chat of OpenAI's
    system, messages            messages: blocks become texts, calls and results
    tools, tool_choice          tools, tool_choice, parallel_tool_calls
    stop_sequences              stop
    output_config.format        response_format
    max_tokens, temperature,    the same; so are all fields of /generate
    top_k, top_p, stream, model
    thinking, metadata, …       nothing: see _HARMLESS

A block of an answer is a text, thinking (the model's reasoning; nobody has signed it) or tool_use.
`metrics`, with `timings` in it, `seed` and `warnings` stand beside what Anthropic's answers have.
Not covered: images, documents, and tools that Anthropic's servers run.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from flask import Flask, Response, g

from messages import Json, RequestError
from models.calls import AnswerReader, Call, Part, Thought
from serving.answers import sse
from serving.parsing import check_model, model_id
from serving.service import Service, read_body

from .chat import errors_name, read_chat
from .shapes import InParts, Logprobs, event, figures
from .translation import objects, take, text_at, text_of, unsupported, wrong

_PATH = "/v1/messages"
_HARMLESS = (
    "metadata", "service_tier", "cache_control", "inference_geo", "thinking", "context_management",
    "diagnostics", "user_profile_id", "speed",
)  # fmt: skip
_REFUSED = {
    "mcp_servers": "this server calls no others",
    "container": "this server runs no code",
    "logprobs": "/v1/chat/completions has them",
}
_SIGNATURE = {"type": "signature_delta", "signature": ""}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def register_routes(app: Flask, service: Service) -> None:
    """Add the routes for the service's model, and their form of errors."""
    name = model_id(service.name)
    for path in (_PATH, f"{_PATH}/count_tokens"):
        app.extensions["error_forms"][path] = lambda error: error_body(error, g.id)

    @app.post(_PATH)
    def messages() -> Response | Json:
        """Answer a conversation."""
        fields, sent = read_body(), dict[str, str]()
        with errors_name(sent):
            if fields.get("max_tokens") is None:
                raise wrong("max_tokens", "must be an integer: this protocol has no default")
            _translate(fields, sent)
            new_reader = read_chat(service, fields, sent)
            return service.respond(fields, Messages(name, fields, new_reader=new_reader))

    @app.post(f"{_PATH}/count_tokens")
    def count_tokens() -> Json:
        """Count the tokens of a conversation and its tools, as the model would read them."""
        fields, sent = read_body(), dict[str, str]()
        with errors_name(sent):
            check_model(fields.get("model") or service.name, service.name)
            _translate(fields, sent)
            read_chat(service, fields, sent)
            if not _is_counted(fields["prompt"]):
                raise RequestError("tokens are not counted here: the engine reads the texts")
            return {"input_tokens": len(fields["prompt"])}


def error_body(error: RequestError, request_id: str) -> Json:
    """An error in Anthropic's form."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    said = {"type": _ERRORS.get(error.status, other), "message": error.message}
    return {"type": "error", "error": said, "request_id": request_id}


def _is_counted(prompt: Any) -> bool:
    """Whether a prompt's tokens are known: another engine reads texts itself."""
    return isinstance(prompt[0], int)


# ------------------------------------------------------------------------- what clients send


def _translate(fields: Json, sent: dict[str, str]) -> None:
    """Turn the fields, in place, into those of a chat. `sent` gets the clients' names of them."""
    take(fields, _HARMLESS, _REFUSED, _PATH)
    fields["messages"] = _read_messages(fields.pop("system", None), fields.get("messages"), sent)
    if (tools := fields.pop("tools", None)) is not None:
        fields["tools"] = _read_tools(tools, sent)
    _read_choice(fields)
    if (stop := fields.pop("stop_sequences", None)) is not None:
        fields["stop"], sent["stop"] = stop, "stop_sequences"
    config = fields.pop("output_config", None)
    if not isinstance(config, dict | None):
        raise wrong("output_config", "must be an object")
    if (form := (config or {}).get("format")) is not None:
        fields["response_format"] = form
        sent["response_format"] = "output_config.format"
        sent["response_format.json_schema.schema"] = "output_config.format.schema"


def _read_messages(system: Any, messages: Any, sent: dict[str, str]) -> list[Json]:
    """The messages of a chat, checked as far as it does not do that."""
    turns = list[Json]()
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    if system:
        turns.append({"role": "system", "content": text_of(system, "system")})
    if not messages:
        raise wrong("messages", "must be a non-empty list")
    for path, message in objects(messages, "messages"):
        if message.get("role") not in ("user", "assistant", "system"):
            raise wrong(f"{path}.role", "must be user or assistant")
        for where, turn in _read_message(message, path):
            sent[f"messages[{len(turns)}]"] = where
            turns.append(turn)
    return turns


def _is_billing(block: Any) -> bool:
    """Whether an agent's block is for Anthropic's books: it would part prompts that begin alike."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


def _read_message(message: Json, path: str) -> list[tuple[str, Json]]:
    """The messages of a chat that say what one of Anthropic's says, each behind its path.

    A user's message has results of tools among its blocks; each is a message of its own.
    """
    role, content, turns = message["role"], message.get("content"), list[tuple[str, Json]]()
    if isinstance(content, str):
        return [(path, {"role": role, "content": content})]
    for where, block in objects(content, f"{path}.content"):
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            result = text_of(block.get("content") or "", f"{where}.content")
            name = {"tool_call_id": text_at(block, where, "tool_use_id")}
            turns.append((where, {"role": "tool", "content": result} | name))
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
            raise unsupported(where, kind)
    for _, turn in turns:
        turn["content"] = turn["content"] or ""
    return turns


def _read_call(block: Json, path: str) -> Json:
    if not isinstance(given := block.get("input"), dict):
        raise wrong(f"{path}.input", "must be an object")
    arguments = json.dumps(given, ensure_ascii=False)
    function = {"name": text_at(block, path, "name"), "arguments": arguments}
    return {"id": text_at(block, path, "id"), "type": "function", "function": function}


def _read_tools(tools: Any, sent: dict[str, str]) -> list[Json]:
    listed = list[Json]()
    for path, tool in objects(tools, "tools"):
        if (kind := tool.get("type")) not in (None, "custom"):
            raise wrong(path, f"is of type {kind}: only tools of type custom are supported")
        keys = {"name": "name", "description": "description", "parameters": "input_schema"}
        function = {ours: tool[theirs] for ours, theirs in keys.items() if theirs in tool}
        sent[f"{path}.function"] = path
        sent[f"{path}.function.parameters"] = f"{path}.input_schema"
        listed.append({"type": "function", "function": function})
    return listed


def _read_choice(fields: Json) -> None:
    """Turn tool_choice into a chat's, and what it says of parallel calls into a field."""
    if (choice := fields.pop("tool_choice", None)) is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = text_at(choice, "tool_choice", "name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise wrong("tool_choice.type", "must be auto, any, tool or none")
    if kind == "auto" and not fields.get("tools"):
        del fields["tool_choice"]
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False


# --------------------------------------------------------------------------- what they read


class Messages(InParts):
    """A message of blocks; or a stream of events, each with a name, that tell of them in turn."""

    closing = ""

    def __init__(self, model: str, fields: Json, *, new_reader: Callable[[], AnswerReader]) -> None:
        super().__init__(fields, new_reader=new_reader)
        prompt, self._id = fields["prompt"], g.id
        self._head = {"id": f"msg_{g.id}", "type": "message", "role": "assistant", "model": model}
        self._num_prompt = len(prompt) if _is_counted(prompt) else 0
        self._kind, self._index = "", -1  # of the block that is being told

    @property
    def opening(self) -> str:
        """A stream begins with the message without its content."""
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head | nothing | {"usage": _usage(self._num_prompt, 0, 0)}
        return event("message_start", message=message) + event("ping")

    def part(self, index: int, part: Part, logprobs: Logprobs = None) -> str:
        """The events of a part, which goes on with a block or begins one."""
        (block, delta), told = _said(part), ""
        if block["type"] != self._kind or isinstance(part, Call):
            told = self._stop()
            self._kind, self._index = block["type"], self._index + 1
            told += event("content_block_start", index=self._index, content_block=block)
        return told + event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> str:
        """The events that end the block, if there is one."""
        about, told = {"index": self._index}, ""
        if self._kind == "thinking":  # clients wait for this one
            told = event("content_block_delta", **about, delta=_SIGNATURE)
        return told + event("content_block_stop", **about) if self._kind else ""

    def whole(self, body: Json) -> Json:
        """The message. A call that was cut has no input."""
        content = list[Json]()
        for part in self.parts(0, body["text"]) or [""]:
            block, delta = _said(part)
            kind = block["type"]
            if isinstance(part, Call):
                content.append(block | {"input": _parsed(part.arguments)})
            elif content and content[-1]["type"] == kind:
                content[-1][kind] += delta[kind]
            else:
                content.append(block | {kind: delta[kind]})
        return self._head | {"content": content} | self._ending(body) | _figures(body)

    def last(self, body: Json) -> Iterator[str]:
        """The rest of the blocks, and why the message ended, with figures."""
        yield from (self.part(0, part) for part in self.readers[0].finish())
        if not self._kind:
            yield self.part(0, "")
        yield self._stop()
        yield event("message_delta", delta=self._ending(body), **_figures(body))
        yield event("message_stop")

    def failed(self, error: RequestError) -> str:
        """An error in a stream."""
        return f"event: error\n{sse(error_body(error, self._id))}"

    def _ending(self, body: Json) -> Json:
        reason, stop = "end_turn", None
        if body["finish_reason"] == "length":
            reason = "max_tokens"
        elif self.readers[0].num_calls:
            reason = "tool_use"
        elif stop := body.get("stop_reason"):
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def _said(part: Part) -> tuple[Json, Json]:
    """The block that a part begins, and the delta that has it."""
    if isinstance(part, str):
        return {"type": "text", "text": ""}, {"type": "text_delta", "text": part}
    if isinstance(part, Thought):
        delta = {"type": "thinking_delta", "thinking": part.text}
        return {"type": "thinking", "thinking": "", "signature": ""}, delta
    block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name}
    return block | {"input": {}}, {"type": "input_json_delta", "partial_json": part.arguments}


def _parsed(arguments: str) -> Json:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {}


def _usage(prompt: int, cached: int, output: int) -> Json:
    """Tokens in Anthropic's words. Theirs of the prompt are those that no cache had."""
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"input_tokens": prompt - cached} | cache | {"output_tokens": output}


def _figures(body: Json) -> Json:
    """What /generate tells of an answer; clients of this protocol take `timings` for an error."""
    told = figures(body)
    usage, timings = told.pop("usage") or {}, told.pop("timings", None)
    if "metrics" in told:
        told["metrics"] = told["metrics"] | {"timings": timings}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt, output = (usage.get(f"{name}_tokens") or 0 for name in ("prompt", "completion"))
    return {"usage": _usage(prompt, cached, output)} | told
