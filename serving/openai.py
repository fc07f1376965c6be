"""The OpenAI-style routes, so that people's tools work unchanged: models, completions, chat.

    /v1/completions       prompt   ─┐ translated into /generate's fields, parsed, queued and decoded
    /v1/chat/completions  messages ─┘ as those are; the answer is put into OpenAI's shape

The fields of /generate (drafter, num_speculative_tokens, min_p, …) may be sent as well. Beside the
usual parts an answer, and a stream's last chunk, has vLLM's `metrics.speculative_decoding` and
llama.cpp's `timings`. What would change the output and is not supported is refused, not ignored.

Not covered: several prompts in one request, images, embeddings.
"""

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

from flask import Flask, Response, g
from werkzeug.exceptions import NotFound

from messages import Json, RequestError
from models.calls import Call, CallReader
from models.tools import read_tools

from .answers import Shape, sse
from .formats import FIELDS, constraint_of
from .parsing import model_id, unknown_model
from .service import Service, read_body

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
# What stands beside the choices, as in /generate's answer.
_FIGURES = ("usage", "metrics", "timings", "warnings", "seed", "trace", "compare")
Logprobs = list[Json] | None


def register_routes(app: Flask, service: Service) -> None:
    """Add the routes for the service's model."""
    name = model_id(service.name)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "local"}
    card["max_model_len"] = service.max_length

    @app.post("/v1/completions")
    def completions() -> Response | Json:
        fields = _supported(read_body())
        fields["prompt"] = _single(fields.get("prompt"))
        return service.respond(fields, _Completion(name, fields))

    @app.post("/v1/chat/completions")
    def chat() -> Response | Json:
        """Answer a conversation. Errors name the fields as the client does."""
        fields = read_body()
        sent = {"prompt": "messages"}  # our name of a field -> the client's
        with _errors_name(sent):
            if tools := read_tools(fields, service.call_form):
                fields["grammar"], sent["grammar"] = tools.grammar(_take_answer(fields)), "tools"
            fields = _supported(fields)
            messages = fields.pop("messages", None)
            _translate_chat(fields, sent)
            is_reasoning, shape = service.read_chat(messages, fields, tools), _Chat(name, fields)
            if tools:
                shape = _Calls(name, fields, partial(tools.reader, is_reasoning))
            return service.respond(fields, shape)

    @app.get("/v1/models")
    def models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/<path:wanted>")
    def model(wanted: str) -> Json:
        """Describe the model. Raises RequestError, a 404, for any other name."""
        if wanted != name:
            raise unknown_model(wanted, name)
        return card

    @app.errorhandler(NotFound)
    def no_route(_: NotFound) -> tuple[Json, int]:
        """Name the routes that there are: clients try others, such as /v1/responses."""
        message = f"there is no such route; this server has {_routes(app)}"
        return RequestError(message, status=404).body(), 404


def _routes(app: Flask) -> str:
    """The routes of an application, as POST /generate, …, but for the page's files."""
    plain = [rule for rule in app.url_map.iter_rules() if not rule.arguments]
    return ", ".join(
        f"{method} {rule}"
        for method in ("POST", "GET")
        for rule in sorted(rule.rule for rule in plain if method in rule.methods)
        if not rule.startswith(("/page/", "/prompts"))
    )


# ------------------------------------------------------------------------- what clients send


@contextmanager
def _errors_name(sent: dict[str, str]) -> Iterator[None]:
    """Where an error is about a field in `sent`, let it name the field that the client sent."""
    try:
        yield
    except RequestError as error:
        name = sent.get(error.param, error.param)
        if error.message.startswith(f"{error.param} "):
            error.message = error.message.replace(error.param, name, 1)
        error.param = name
        raise


def _translate_chat(fields: Json, sent: dict[str, str]) -> None:
    """Rename the fields that chat names differently, and note the client's names in `sent`."""
    if (limit := fields.pop("max_completion_tokens", None)) is not None:
        fields["max_tokens"], sent["max_tokens"] = limit, "max_completion_tokens"
    if not isinstance(fields.get("logprobs"), bool | None):
        raise RequestError("logprobs must be true or false", param="logprobs")
    if (top := fields.pop("top_logprobs", None)) is not None:
        if isinstance(top, bool):
            raise RequestError("top_logprobs must be an integer", param="top_logprobs")
        if not fields.get("logprobs"):
            raise RequestError("top_logprobs goes with logprobs: true", param="top_logprobs")
        fields["logprobs"], sent["logprobs"] = top, "top_logprobs"


def _take_answer(fields: Json) -> Json | None:
    """Take the schema of answers without calls out of the fields of a request that has tools.

    Raises RequestError for a bound of another kind on the text.
    """
    bounds = {name: fields.pop(name) for name in FIELDS if name in fields}
    name, _, schema = constraint_of(bounds) or ("", "", None)
    if not isinstance(schema, dict | None):
        raise RequestError(f"{name} does not go with tools", param=name)
    return schema


def _supported(body: Json) -> Json:
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


def _single(prompt: Any) -> Any:
    """A list of prompts may have one: its only string, or its only list of ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise RequestError("one prompt per request is supported", param="prompt")
        return prompt[0]
    return prompt


# --------------------------------------------------------------------------- what they read


class _OpenAI(Shape):
    """OpenAI's shape of an answer: a body with choices, or chunks of them and then the figures."""

    prefix, kind, kind_of_chunk = "", "", ""

    def __init__(self, model: str, fields: Json) -> None:
        """`fields` are the request's; `model` is the name by which clients know the model."""
        super().__init__(fields)
        self._head = {"id": f"{self.prefix}-{g.id}"}  # the X-Request-Id
        self._head |= {"object": self.kind, "created": int(time.time()), "model": model}

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs, is_part: bool
    ) -> Json:
        """A choice of a whole answer, or what a chunk tells of it (`is_part`)."""
        raise NotImplementedError

    def whole(self, body: Json) -> Json:
        """The body of a request that is answered at once, from /generate's answer."""
        choices = [
            self.choice(i, each["text"], each["finish_reason"], each.get("logprobs"), False)
            for i, each in enumerate(body.get("choices", [body]))
        ]
        return self._head | {"choices": choices} | _figures(body)

    def _chunk(self, *choices: Json, **figures: Any) -> str:
        kind = {"object": self.kind_of_chunk}
        return sse(self._head | kind | {"choices": list(choices)} | figures)

    def shown(self, event: Json, number: int) -> str:
        """A chunk for an event of a choice; a comparison's other runs are not shown."""
        text, logprobs = "".join(text for text, _ in event["pieces"]), event.get("logprobs")
        is_news = number < self.num_choices and (text or logprobs is not None)
        return self._chunk(self.choice(number, text, None, logprobs, True)) if is_news else ""

    def last(self, body: Json) -> Iterator[str]:
        """Why each choice ended, at last with figures; the usage in its own chunk, if asked for."""
        figures = _figures(body)
        usage = figures.pop("usage")
        ends = [
            self.choice(i, "", each["finish_reason"], None, True)
            for i, each in enumerate(body.get("choices", [body]))
        ]
        yield from map(self._chunk, ends[:-1])
        yield self._chunk(ends[-1], **figures)
        if (self._fields.get("stream_options") or {}).get("include_usage"):
            yield self._chunk(**figures, usage=usage)


def _figures(body: Json) -> Json:
    return {name: body[name] for name in _FIGURES if name in body}


class _Completion(_OpenAI):
    """The shape of /v1/completions."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, fields: Json) -> None:
        super().__init__(model, fields)
        self._offsets: Counter[int] = Counter()  # where in a choice's text the next token begins

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs, is_part: bool
    ) -> Json:
        """A choice with log-probabilities; a chunk has those of its part of the text."""
        listed = None
        if logprobs is not None:
            tokens = [entry["token"] for entry in logprobs]
            begin = self._offsets[index]
            *starts, self._offsets[index] = accumulate(map(len, tokens), initial=begin)
            listed = {
                "tokens": tokens,
                "token_logprobs": [entry["logprob"] for entry in logprobs],
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                    for entry in logprobs
                ],
                "text_offset": starts,
            }
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": reason}


class _Chat(_OpenAI):
    """The shape of /v1/chat/completions."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    nothing: str | None = ""  # the content before there is any

    @property
    def opening(self) -> str:
        """A stream begins with the role, of each choice."""
        said = {"role": "assistant", "content": self.nothing}
        return "".join(
            self._chunk(self._choice(i, None, None, delta=said)) for i in range(self.num_choices)
        )

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs, is_part: bool
    ) -> Json:
        """A message, or its next part; the chunk that ends the text says nothing more."""
        if is_part:
            return self._choice(index, reason, logprobs, delta={} if reason else {"content": text})
        return self._choice(index, reason, logprobs, message={"role": "assistant", "content": text})

    def _choice(self, index: int, reason: str | None, logprobs: Logprobs, **said: Json) -> Json:
        return {"index": index} | said | {"logprobs": _content(logprobs), "finish_reason": reason}


class _Calls(_Chat):
    """The shape of a chat with tools: their calls stand beside the content, which may be null.

    A stream has each call whole in one chunk, and no text that may still become a call.
    """

    nothing = None

    def __init__(self, model: str, fields: Json, new_reader: Callable[[], CallReader]) -> None:
        super().__init__(model, fields)
        self._readers = defaultdict[int, CallReader](new_reader)  # by choice
        self._calls = defaultdict[int, list[Json]](list)

    def _said(self, index: int, part: str | Call) -> Json:
        """A part of a choice as a chunk's delta has it."""
        if isinstance(part, str):
            return {"content": part}
        calls = self._calls[index]
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        calls.append(call | {"function": part._asdict()})
        return {"tool_calls": [{"index": len(calls) - 1} | calls[-1]]}

    def shown(self, event: Json, number: int) -> str:
        """The chunks for an event; the first one has its log-probabilities, whatever it says."""
        if number >= self.num_choices:
            return ""
        parts = self._readers[number].feed("".join(text for text, _ in event["pieces"]))
        logprobs = event.get("logprobs")
        if logprobs is not None and not parts:
            parts = [""]
        chunks = []
        for part in parts:
            delta = self._said(number, part)
            chunks.append(self._chunk(self._choice(number, None, logprobs, delta=delta)))
            logprobs = None
        return "".join(chunks)

    def last(self, body: Json) -> Iterator[str]:
        """What was held back, then why each choice ended."""
        for index in range(self.num_choices):
            for part in self._readers[index].finish():
                said = self._said(index, part)
                yield self._chunk(self._choice(index, None, None, delta=said))
        yield from super().last(body)

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs, is_part: bool
    ) -> Json:
        """A message with its calls, or the end of a stream."""
        reader, said = self._readers[index], {"delta": {}}
        if not is_part:
            parts = [*reader.feed(text), *reader.finish()]
            deltas = [self._said(index, part) for part in parts]
            content = "".join(delta.get("content", "") for delta in deltas)
            message = {"role": "assistant", "content": content}
            if calls := self._calls[index]:
                message |= {"content": content or None, "tool_calls": calls}
            said = {"message": message}
        if reason == "stop" and reader.num_calls:  # a call that a stop string cut is none
            reason = "tool_calls"
        return self._choice(index, reason, logprobs, **said)


def _content(logprobs: Logprobs) -> Json | None:
    if logprobs is None:
        return None

    def entry(one: Json) -> Json:
        token = one["token"]
        # A part of a character is decoded as "�", which are not its bytes.
        known = None if "\ufffd" in token else list(token.encode("utf-8"))
        return {"token": token, "logprob": one["logprob"], "bytes": known}

    listed = [
        entry(one) | {"top_logprobs": list(map(entry, one["top_logprobs"]))} for one in logprobs
    ]
    return {"content": listed, "refusal": None}
