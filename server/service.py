"""An engine as the routes use it: what becomes of a request, and what the server says of itself.

    fields → begin: parse, queue → wait, or stream → answer → written in a Shape

relay.py speaks for an engine that runs elsewhere.
"""

from collections.abc import Callable

from flask import Flask, Response, current_app, g, request

from runtime import plug
from runtime.models.prompts import Conversation
from runtime.values import Engine, Json, Request

from . import answers
from .answers import Shape, stream
from .http import WHEN_LEFT, base_app
from .options import Options
from .parsing import comparison, model_id, parse_json, parse_request
from .worker import Job, Run, Worker

_ROUTES = "page", "metrics", "curve", "dialects"  # each may be deleted
Parsed = tuple[list[Request], bool, list[str]]  # requests, whether to stream, and warnings
Parse = Callable[[Json, Engine, Json], Parsed]  # from a request's fields, an engine and defaults


def read_body(takes_place: bool = True) -> Json:
    """The JSON object that was sent. Raises RequestError for anything else.

    `takes_place`: whether a request of this kind is queued; with a full queue it is not even read.
    """
    if takes_place:
        current_app.extensions["worker"].expect_place()
    return parse_json(request.get_data(cache=False))


def parse_one(fields: Json, engine: Engine, defaults: Json) -> Parsed:
    """The requests of one prompt: its choices, or the runs of a comparison. Raises RequestError."""
    first, is_stream, compare, notes = parse_request(fields, engine, defaults)
    return comparison.runs_to_compare(first) if compare else first.choices, is_stream, notes


class Service:
    """The engine inside this server, and the worker that runs it."""

    def __init__(self, engine: Engine, options: Options, worker: Worker | None = None) -> None:
        """Without a worker it starts one."""
        target = engine.target
        self.engine, self.options = engine, options
        self.worker = worker or Worker(engine, options).start()
        self.name, self.max_length = target.name, target.max_length
        self.is_chat = options.is_chat(target.tokenizer)
        self.tokenizer = target.tokenizer
        reference = plug("runtime.models.reference")
        self.fingerprint = reference and reference.system_fingerprint(target, options.quantize)

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
        self, fields: Json, shape: Shape | None = None, parse: Parse | None = None
    ) -> Response | Json:
        """Answer a request when all is done, or stream it; in the shape of /generate or another.

        `parse` makes requests of the fields, where they are not those of one prompt. Raises
        RequestError, and what made its job fail.
        """
        shape = shape or Shape()
        job, is_stream, notes = self.begin(fields, parse or parse_one)
        shape.job = job
        if is_stream:
            events = stream(job, shape, lambda: self.answer(job.runs, notes))
            return Response(events, mimetype="text/event-stream")
        job.wait()
        if job.cancelled:
            return Response(status=499)  # the client has left: nobody reads it
        return shape.whole(self.answer(job.runs, notes))

    def begin(self, fields: Json, parse: Parse) -> tuple[Job, bool, list[str]]:
        """Parse and queue a request. Returns its job, whether to stream, and warnings.

        The log names the job, and it is cancelled if the client leaves.

        Where neither the request nor the operator limits it, a chat goes on to the end of the
        context: its clients mostly name no limit, and want the whole answer. Raises RequestError.
        """
        defaults = self.options.for_requests
        is_chat = fields.get("chat") is True or isinstance(fields.get("prompt"), Conversation)
        if is_chat and self.options.max_tokens is None:
            defaults["max_tokens"] = -1  # what fits
        requests, is_stream, notes = parse(fields, self.engine, defaults)
        g.job = job = self.worker.submit(*requests)
        request.environ.get(WHEN_LEFT, lambda act: None)(job.cancel)
        return job, is_stream, notes

    def answer(self, runs: list[Run], notes: list[str]) -> Json:
        """What /generate returns for the runs of a job; `notes` are the request's warnings."""
        return answers.answer(runs, notes, self.engine.target.model.dtype)

    def health(self) -> Json:
        """The body of GET /health."""
        return answers.health(self.engine, self.worker, self.options)
