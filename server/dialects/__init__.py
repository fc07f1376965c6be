"""The protocols that the server speaks beside its own, so that people's tools work unchanged.

    completions.py   OpenAI's /v1/completions
    chat.py          OpenAI's /v1/chat/completions, with tools and reasoning
    responses.py     OpenAI's /v1/responses
    anthropic.py     Anthropic's /v1/messages

A dialect translates a request into the fields of /generate, and writes the answer in its own shape.
It is parsed, queued and decoded as one of /generate, whose fields may be sent as well.
"""

import time

from flask import Flask
from werkzeug.exceptions import NotFound

from runtime.values import Json, RequestError
from server.parsing import check_model, model_id
from server.service import Service

from . import anthropic, chat, completions, responses
from .anthropic import ERROR_FORMS

_DIALECTS = completions, chat, responses, anthropic


def register_routes(app: Flask, service: Service) -> None:
    """Add the routes of all dialects, and of what they have in common: the list of models."""
    app.extensions["error_forms"] |= ERROR_FORMS
    for dialect in _DIALECTS:
        dialect.register_routes(app, service)
    name = model_id(service.name)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "local"}
    card |= {"root": name, "parent": None, "max_model_len": service.max_length}

    @app.get("/v1/models")
    def models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/<path:wanted>")
    def model(wanted: str) -> Json:
        """Describe the model. Raises RequestError, a 404, for any other name."""
        check_model(wanted, service.name)
        return card

    @app.errorhandler(NotFound)
    def no_route(_: NotFound) -> tuple[Json, int]:
        """Name the routes that there are: clients try others, such as /v1/embeddings."""
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
