"""Mistral's /v1/fim/completions: a text between a prompt and a suffix, as editors ask for it."""

from flask import Flask, Response

from messages import Json
from serving.fields import check_dialect
from serving.parsing import model_id
from serving.service import Service, read_body

from .chat import errors_name
from .completions import Completion
from .infill import fill_in
from .shapes import Logprobs


def register_routes(app: Flask, service: Service) -> None:
    """Add the route for the service's model."""
    name = model_id(service.name)

    @app.post("/v1/fim/completions")
    def fim() -> Response | Json:
        fields, sent = read_body(), {"seed": "random_seed"}
        if "random_seed" in fields:
            fields["seed"] = fields.pop("random_seed")
        with errors_name(sent):
            fill_in(service, fields)
            check_dialect(fields)
            return service.respond(fields, Filled(name, fields))


class Filled(Completion):
    """Mistral's shape: the text as a message's content, and in chunks as a delta's."""

    prefix, kind, kind_of_chunk = "fim", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, body: Json) -> Json:
        """A choice of a whole answer."""
        return self._renamed("message", super().choice(index, body))

    def end(self, index: int, reason: str) -> Json:
        """The choice in the chunk that ends it."""
        return self._renamed("delta", super().end(index, reason))

    def part(self, index: int, text: str, logprobs: Logprobs) -> Json:
        """A choice in a chunk."""
        return self._renamed("delta", super().part(index, text, logprobs))

    def _renamed(self, name: str, choice: Json) -> Json:
        text = choice.pop("text")
        return choice | {name: {"role": "assistant", "content": text}}
