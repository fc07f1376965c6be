"""Mistral's /v1/fim/completions: a text between a prompt and a suffix, as editors ask for it."""

from typing import Any

from flask import Flask, Response

from messages import Json
from serving.fields import check_dialect
from serving.service import Service, read_body

from .chat import errors_name
from .completions import Completion, fill_in


def register_routes(app: Flask, service: Service) -> None:
    """Add the route for the service's model."""

    @app.post("/v1/fim/completions")
    def fim() -> Response | Json:
        fields, sent = read_body(), {"seed": "random_seed"}
        if "random_seed" in fields:
            fields["seed"] = fields.pop("random_seed")
        with errors_name(sent):
            fill_in(service, fields)
            check_dialect(fields)
            return service.respond(fields, Filled(service, fields))


class Filled(Completion):
    """Mistral's shape: the text as a message's content, and in chunks as a delta's."""

    prefix, kind, kind_of_chunk = "fim", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, body: Json) -> Json:
        choice = super().choice(index, body)
        return choice | {"message": choice.pop("delta")}

    def _choice(self, *parts: Any) -> Json:
        choice = super()._choice(*parts)
        return choice | {"delta": {"role": "assistant", "content": choice.pop("text")}}
