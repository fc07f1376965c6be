"""The OpenAI-style routes, so that people's tools work unchanged: models, completions, chat.

    /v1/completions       prompt   ─┐ translated into /generate's fields, parsed, queued and decoded
    /v1/chat/completions  messages ─┘ as those are; the answer is put into OpenAI's shape

/generate's own fields (drafter, num_speculative_tokens, min_p, …) may be sent as well. Beside the
usual parts an answer, and a stream's last chunk, has vLLM's `metrics.speculative_decoding` and
llama.cpp's `timings`. What would change the output and is not supported is refused, not ignored.

Not covered: several choices or prompts in one request, tools, images, embeddings.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

from flask import Flask, Response, g
from werkzeug.exceptions import NotFound

from messages import Json, Model, RequestError
from models.prompts import chat_prompt

from .answers import sse, stream
from .http import read_body, respond
from .parsing import model_id, unknown_model
from .worker import Job

_TEXT_ALONE = "not supported: this server answers with text alone"
# The only values of these fields that are served (null counts as absent); what is said of others.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "must be 1: a request gets one choice"),
    "best_of": ((1,), "must be 1: a request gets one choice"),
    "chat": ((False,), "is a field of /generate: /v1/chat/completions takes messages"),
    "echo": ((False,), "is not supported: the answer is the new text alone"),
    "suffix": (("",), "is not supported: a text is continued, and not filled in"),
    "presence_penalty": ((0,), "is not supported: repetition_penalty is"),
    "frequency_penalty": ((0,), "is not supported: repetition_penalty is"),
    "logit_bias": (({},), "is not supported"),
    "tools": (([],), f"are {_TEXT_ALONE}"),
    "tool_choice": (("none", "auto"), f"is {_TEXT_ALONE}"),
    "functions": (([],), f"are {_TEXT_ALONE}"),
    "function_call": (("none", "auto"), f"is {_TEXT_ALONE}"),
    "response_format": (
        ({"type": "text"},),
        'must be {"type": "text"}: no other format is enforced, but a prompt may ask for one',
    ),
    "modalities": ((["text"],), f'must be ["text"]: others are {_TEXT_ALONE}'),
}
# What stands beside the choices, as in /generate's answer.
_FIGURES = ("usage", "metrics", "timings", "warnings", "seed", "trace", "compare")
Begin = Callable[[Json], tuple[list[Job], bool, list[str]]]
Whole = Callable[[list[Job], list[str]], Json]
ReadChat = Callable[[Any, Json], None]
Logprobs = list[Json] | None


def read_chat(target: Model, limit: int | None, messages: Any, fields: Json) -> None:
    """Put a conversation into the fields, as its ids.

    `limit` is the operator's, where a request names none. Without one either, a chat goes on to the
    end of the context: its clients mostly name none, and want the whole answer.
    """
    fields["prompt"] = chat_prompt(messages, target.tokenizer, target.max_length)
    if limit is None and fields.get("max_tokens") is None:
        fields["max_tokens"] = max(1, target.max_length - len(fields["prompt"]))


def register_routes(
    app: Flask, name: str, max_length: int, begin: Begin, whole: Whole, read_chat: ReadChat
) -> None:
    """Add the routes for a model of this name, whose context holds `max_length` tokens.

    `read_chat(messages, fields)` puts a conversation into the fields that `begin` gets, and `whole`
    makes the answer of /generate, of which these routes take the figures.
    """
    name = model_id(name)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "local"}
    card["max_model_len"] = max_length
    serve = partial(_serve, name, begin, whole)

    @app.post("/v1/completions")
    def completions() -> Response | Json:
        fields = _supported(read_body())
        fields["prompt"] = _single(fields.get("prompt"))
        return serve(fields, _Completion())

    @app.post("/v1/chat/completions")
    def chat() -> Response | Json:
        """Answer a conversation. Errors name the fields as the client does."""
        fields = _supported(read_body())
        sent = {"prompt": "messages"}  # our name of a field -> the client's
        with _errors_name(sent):
            messages = fields.pop("messages", None)
            _translate_chat(fields, sent)
            read_chat(messages, fields)
            return serve(fields, _Chat())

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
    """The routes of an application, as POST /generate, …, but for the page's own files."""
    plain = [rule for rule in app.url_map.iter_rules() if not rule.arguments]
    return ", ".join(
        f"{method} {rule}"
        for method in ("POST", "GET")
        for rule in sorted(rule.rule for rule in plain if method in rule.methods)
        if not rule.startswith(("/page/", "/prompts"))
    )


def _serve(
    name: str, begin: Begin, whole: Whole, fields: Json, shape: "_Completion | _Chat"
) -> Response | Json:
    """Begin the request, then answer when all is done, or stream it."""
    options = fields.get("stream_options")
    jobs, is_stream, notes = begin(fields)
    head = {
        "id": f"{shape.prefix}-{g.id}",  # the X-Request-Id
        "object": shape.kind_of_chunk if is_stream else shape.kind,
        "created": int(time.time()),
        "model": name,
    }

    def shaped(jobs: list[Job], notes: list[str]) -> Json:
        body = whole(jobs, notes)
        choice = shape.whole(body["text"], body["finish_reason"], body.get("logprobs"))
        figures = {name: body[name] for name in _FIGURES if name in body}
        return head | {"choices": [choice]} | figures

    with_usage = bool(options and options.get("include_usage"))
    return respond(jobs, is_stream, notes, shaped, partial(_chunks, head, shape, with_usage))


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
    """Rename the fields that chat has names of its own for, and note their names in `sent`."""
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


def _supported(body: Json) -> Json:
    """The fields without those that may have one value only. Raises RequestError for another."""
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


class _Completion:
    """How /v1/completions shapes the text: the choices of one answer."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"
    opening = None

    def __init__(self) -> None:
        self._offset = 0  # where in the text the next token begins

    def part(self, text: str, reason: str | None, logprobs: Logprobs) -> Json:
        """What a chunk tells, and a whole answer."""
        listed = None
        if logprobs is not None:
            tokens = [entry["token"] for entry in logprobs]
            ends = list(accumulate(map(len, tokens), initial=self._offset))
            tops = [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                for entry in logprobs
            ]
            listed = {
                "tokens": tokens,
                "token_logprobs": [entry["logprob"] for entry in logprobs],
                "top_logprobs": tops,
                "text_offset": ends[:-1],
            }
            self._offset = ends[-1]
        return {"index": 0, "text": text, "logprobs": listed, "finish_reason": reason}

    whole = part


class _Chat:
    """The same of /v1/chat/completions."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self) -> None:
        self.opening = self._choice({"delta": {"role": "assistant", "content": ""}}, None, None)

    def whole(self, text: str, reason: str | None, logprobs: Logprobs) -> Json:
        """The choice of a whole answer."""
        return self._choice({"message": {"role": "assistant", "content": text}}, reason, logprobs)

    def part(self, text: str, reason: str | None, logprobs: Logprobs) -> Json:
        """What a chunk tells; the one that ends the text says nothing more."""
        return self._choice({"delta": {} if reason else {"content": text}}, reason, logprobs)

    def _choice(self, said: Any, reason: str | None, logprobs: Logprobs) -> Json:
        return {"index": 0} | said | {"logprobs": _content(logprobs), "finish_reason": reason}


def _chunks(
    head: Json, shape: _Completion | _Chat, with_usage: bool,
    jobs: list[Job], whole: Callable[[], Json],
) -> Iterator[str]:  # fmt: skip
    """Chunks of the text as it comes, then the reason of its end with the figures."""

    def chunk(choice: Json) -> str:
        return sse(head | {"choices": [choice]})

    def shown(event: Json, number: int) -> str:
        text, logprobs = "".join(text for text, _ in event["pieces"]), event.get("logprobs")
        is_news = number == 0 and (text or logprobs is not None)
        return chunk(shape.part(text, None, logprobs)) if is_news else ""

    def last() -> Iterator[str]:
        body = whole()
        usage, reason = body.pop("usage"), body["choices"][0]["finish_reason"]
        yield sse(body | {"choices": [shape.part("", reason, None)]})
        if with_usage:
            yield sse(body | {"choices": [], "usage": usage})

    return stream(jobs, shown, last, chunk(shape.opening) if shape.opening else "")


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
