"""An engine as the routes use it: what becomes of a request, and what the server says of itself.

    fields → begin: parse, queue → wait, or stream → answer → written in a Shape

relay.py speaks for an engine that runs elsewhere.
"""

from typing import Any

from flask import Flask, Response, current_app, g, request

from runtime import plug
from runtime.grammars import OPEN
from runtime.models.calls import Form
from runtime.models.chat import call_form, chat_prompt
from runtime.models.fim import infill_prompt
from runtime.models.prompts import Conversation, list_ids
from runtime.models.reference import system_fingerprint
from runtime.models.tools import Tools
from runtime.values import Engine, Json, RequestError

from . import answers
from .answers import Shape, stream
from .formats import reasoning_of
from .http import WHEN_LEFT, base_app
from .options import Options
from .parsing import model_id, parse_json, parse_list, parse_request
from .worker import Job, Run, Worker

_ROUTES = "page", "metrics", "curve", "dialects"  # each may be deleted
comparison = plug("server.comparison")


def read_body(takes_place: bool = True) -> Json:
    """The JSON object that was sent. Raises RequestError for anything else.

    `takes_place`: whether a request of this kind is queued; with a full queue it is not even read.
    """
    if takes_place:
        current_app.extensions["worker"].expect_place()
    return parse_json(request.get_data(cache=False))


class Service:
    """The engine inside this server, and the worker that runs it."""

    def __init__(self, engine: Engine, options: Options, worker: Worker | None = None) -> None:
        """Without a worker it starts one."""
        target = engine.target
        self.engine, self.options = engine, options
        self.worker = worker or Worker(engine, options).start()
        self.name, self.max_length = target.name, target.max_length
        self.is_chat = options.is_chat(target.tokenizer)
        self.call_form: Form | None = call_form(target.tokenizer)
        self.tokenizer = target.tokenizer
        self.fingerprint = system_fingerprint(target, options.quantize)

    def new_app(self) -> Flask:
        """An application with all routes but /generate and /health, as far as they are there."""
        app = base_app(self.options)
        app.extensions |= {"worker": self.worker, "fingerprint": self.fingerprint}
        app.extensions["model"] = model_id(self.name)
        for name in _ROUTES:
            if module := plug(f"server.{name}"):
                module.register(app, self)
        return app

    def respond(
        self, fields: Json, shape: Shape | None = None, prompts: list[list[int]] | None = None
    ) -> Response | Json:
        """Answer a request when all is done, or stream it; in the shape of /generate or another.

        `prompts` stand for the field `prompt` if there are several. Raises RequestError, and what
        made its job fail.
        """
        shape = shape or Shape(fields)
        job, is_stream, notes = self.begin(fields, prompts)
        shape.requests = [run.request for run in job.runs]
        if is_stream:
            events = stream(job, shape, lambda: self.answer(job.runs, notes))
            return Response(events, mimetype="text/event-stream")
        job.wait()
        if job.cancelled:
            return Response(status=499)  # the client has left: nobody reads it
        return shape.whole(self.answer(job.runs, notes))

    def begin(
        self, fields: Json, prompts: list[list[int]] | None = None
    ) -> tuple[Job, bool, list[str]]:
        """Parse and queue a request. Returns its job, whether to stream, and warnings.

        The log names the job, and it is cancelled if the client leaves.

        Of several `prompts` there are choices of the first, then those of the second, … Where
        neither the request nor the operator limits it, a chat goes on to the end of the context:
        its clients mostly name no limit, and want the whole answer. Raises RequestError.
        """
        defaults = self.options.for_requests
        if self.options.max_tokens is None and isinstance(fields.get("prompt"), Conversation):
            defaults["max_tokens"] = -1  # what fits
        if prompts:
            requests, is_stream, notes = parse_list(fields, prompts, self.engine, defaults)
            requests = [choice for each in requests for choice in each.choices]
        else:
            first, is_stream, compare, notes = parse_request(fields, self.engine, defaults)
            if compare and not comparison:
                raise RequestError("server/comparison.py is not there", param="compare")
            requests = comparison.runs_to_compare(first) if compare else first.choices
        g.job = job = self.worker.submit(*requests)
        request.environ.get(WHEN_LEFT, lambda act: None)(job.cancel)
        return job, is_stream, notes

    def read_list(self, prompts: list[Any]) -> list[list[int]]:
        """The ids of prompts. Raises RequestError, which names the prompt that is wrong."""
        target = self.engine.target
        return list_ids(prompts, target.tokenizer, target.max_length, target.vocab_size)

    def read_chat(
        self, messages: Any, fields: Json, tools: Tools | None = None, how: Json | None = None
    ) -> bool:
        """Put a conversation with these tools into the fields that `begin` gets.

        `how` is what template_options returns. Returns whether the answer begins amid reasoning.
        Raises RequestError.
        """
        tokenizer = self.engine.target.tokenizer
        ids = chat_prompt(messages, tokenizer, self.max_length, tools, how)
        fields["prompt"] = ids
        return reasoning_of(tokenizer, ids) == OPEN

    def read_infill(self, prefix: str, suffix: str, fields: Json) -> None:
        """Put the prompt of a text with a gap into the fields that `begin` gets.

        Raises RequestError.
        """
        model = model_id(self.name)
        fields["prompt"] = infill_prompt(prefix, suffix, self.tokenizer, model, self.max_length)

    def answer(self, runs: list[Run], notes: list[str]) -> Json:
        """What /generate returns for the runs of a job; `notes` are the request's warnings."""
        return answers.answer(runs, notes, self.engine.target.model.dtype)

    def health(self) -> Json:
        """The body of GET /health."""
        return answers.health(self.engine, self.worker, self.options)
