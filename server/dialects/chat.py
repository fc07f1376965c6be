"""OpenAI's /v1/chat/completions: a conversation is answered, with tools where there are any.

Other dialects that have conversations translate theirs into this one's fields (`read_chat`), and
write the parts of the answer in their own shapes (`InParts`).
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from flask import Flask, Response

from runtime.grammars import OPEN
from runtime.models.calls import AnswerReader, Part, Thought
from runtime.models.chat import TEMPLATE_FIELDS, call_form, chat_prompt, template_options
from runtime.models.prompts import Tokenizer
from runtime.models.token_bytes import bytes_of
from runtime.models.tools import read_tools
from runtime.values import Json, RequestError
from server.fields import integer, known_fields, wrong
from server.formats import FIELDS, constraint_of, reasoning_of
from server.parsing import KNOWN
from server.service import Service, read_body

from .shapes import InParts, Logprobs, OpenAIShape

_OF_TOOLS = "tools", "tool_choice", "parallel_tool_calls"
OPENAIS_OWN = {"prompt_logprobs", "return_token_ids"}  # no other protocol has a place for them
NAMES = KNOWN - {"prompt", "chat"} | {"messages", "top_logprobs", *_OF_TOOLS, *TEMPLATE_FIELDS}


def register_routes(app: Flask, service: Service) -> None:
    """Add the route for the service's model."""

    @app.post("/v1/chat/completions")
    def chat() -> Response | Json:
        """Answer a conversation."""
        fields, sent = known_fields(read_body(), NAMES), dict[str, str]()
        with errors_name(sent):
            new_reader = read_chat(service, fields, sent)
            return service.respond(fields, Chat(service, fields, new_reader=new_reader))


# ------------------------------------------------------------------------- what clients send


@contextmanager
def errors_name(sent: dict[str, str]) -> Iterator[None]:
    """Where an error is about a path in `sent`, let it name the one that the client sent."""
    try:
        yield
    except RequestError as error:
        for path in sorted(sent, key=len, reverse=True):  # messages[1].role before messages
            rest = error.message.removeprefix(path)
            if rest != error.message and not re.match(r"\w", rest):
                error.message = sent[path] + rest
                break
        error.param = sent.get(error.param, error.param)
        raise


def read_chat(service: Service, fields: Json, sent: dict[str, str]) -> Callable[[], AnswerReader]:
    """Turn a chat's fields, in place, into those of /generate. Raises RequestError.

    `sent` gets the client's name of each field that was renamed. Returns what makes a reader of an
    answer's text.
    """
    sent.setdefault("prompt", "messages")
    if tools := read_tools(fields, call_form(service.tokenizer)):
        fields["grammar"] = tools.grammar(_take_answer(fields))
        sent["grammar"] = "tools"
    messages, how = fields.pop("messages", None), template_options(fields)
    _translate(fields, sent)
    ids = chat_prompt(messages, service.tokenizer, service.max_length, tools, how)
    fields["prompt"], is_reasoning = ids, reasoning_of(service.tokenizer, ids) == OPEN
    if tools:
        return partial(tools.reader, is_reasoning)
    return partial(AnswerReader, call_form(service.tokenizer), (), is_reasoning)


def _translate(fields: Json, sent: dict[str, str]) -> None:
    """Rename the fields that chat names differently, and note the client's names in `sent`."""
    if not isinstance(fields.get("logprobs"), bool | None):
        raise wrong("logprobs", "must be true or false")
    if (top := fields.pop("top_logprobs", None)) is not None:
        is_valid, what = integer(0, 20)
        if not is_valid(top):
            raise wrong("top_logprobs", f"must be {what}")
        if not fields.get("logprobs"):
            raise wrong("top_logprobs", "goes with logprobs: true")
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


# --------------------------------------------------------------------------- what they read


class Chat(InParts, OpenAIShape):
    """The shape of /v1/chat/completions. Beside calls and reasoning the content may be null."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    has_own_prompts = False

    def __init__(
        self, service: Service, fields: Json, *, new_reader: Callable[[], AnswerReader]
    ) -> None:
        super().__init__(fields, new_reader=new_reader)
        self._tokenizer = service.tokenizer
        self._calls = defaultdict[int, list[Json]](list)  # by choice

    @property
    def opening(self) -> str:
        """A stream begins with the role, of each choice."""
        said = {"role": "assistant", "content": ""}
        every = range(self.job.request.texts)
        return "".join(self.chunk(self._choice(i, delta=said)) for i in every)

    def _said(self, index: int, part: Part) -> Json:
        """A part of a choice as a chunk's delta has it."""
        if isinstance(part, str):
            return {"content": part}
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        calls = self._calls[index]
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        calls.append(call | {"function": part._asdict()})
        return {"tool_calls": [{"index": len(calls) - 1} | calls[-1]]}

    def shown(self, event: Json, number: int) -> str:
        self.note(event, number)
        return super().shown(event, number)

    def part(self, index: int, part: Part, logprobs: Logprobs = None) -> str:
        """The chunk of a part."""
        return self.chunk(self._choice(index, None, logprobs, delta=self._said(index, part)))

    def choice(self, index: int, body: Json) -> Json:
        """A message, with its calls and its reasoning."""
        parts = [*self.readers[index].feed(body["text"]), *self.rest(index, body)]
        deltas = [self._said(index, part) for part in parts]
        content, thought = (
            "".join(delta.get(name, "") for delta in deltas)
            for name in ("content", "reasoning_content")
        )
        message = {"role": "assistant", "content": content, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls := self._calls[index]:
            message |= {"content": content or None, "tool_calls": calls}
        reason = self._reason(index, body["finish_reason"])
        return self._choice(index, reason, body.get("logprobs"), message=message)

    def end(self, index: int, reason: str) -> Json:
        """The choice in the chunk that ends it, which says nothing more."""
        return self._choice(index, self._reason(index, reason), delta={})

    def _reason(self, index: int, reason: str) -> str:
        has_called = self.readers[index].num_calls  # a call that a stop string cut is none
        return "tool_calls" if reason == "stop" and has_called else reason

    def _choice(
        self, index: int, reason: str | None = None, logprobs: Logprobs = None, **said: Json
    ) -> Json:
        listed = None
        if logprobs is not None:
            listed = {"content": log_probabilities(logprobs, self._tokenizer), "refusal": None}
        return {"index": index} | said | {"logprobs": listed, "finish_reason": reason}


def log_probabilities(logprobs: list[Json], tokenizer: Tokenizer) -> list[Json]:
    """Those of tokens, as a chat has them."""

    def entry(one: Json) -> Json:
        token, id = one["token"], one["id"]
        is_text = "\ufffd" not in token and token != f"token_id:{id}"  # whole characters
        known = token.encode("utf-8") if is_text else bytes_of(id, tokenizer)
        return {"token": token, "logprob": one["logprob"], "bytes": [*known]}

    return [entry(one) | {"top_logprobs": [*map(entry, one["top_logprobs"])]} for one in logprobs]
