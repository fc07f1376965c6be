"""OpenAI's /v1/completions: a prompt is continued as it stands.

The fields of /generate (drafter, num_speculative_tokens, min_p, …) may be sent as well. Beside the
usual parts an answer, and a stream's last chunk, has vLLM's `metrics.speculative_decoding` and
llama.cpp's `timings`. What would change the output and is not supported is refused, not ignored.
"""

from collections import Counter
from itertools import accumulate
from typing import Any

from flask import Flask, Response

from messages import Json, RequestError
from serving.fields import check_dialect
from serving.parsing import model_id
from serving.service import Service, read_body

from .infill import fill_in
from .shapes import Logprobs, OpenAIShape


def register_routes(app: Flask, service: Service) -> None:
    """Add the route for the service's model."""
    name = model_id(service.name)

    @app.post("/v1/completions")
    def completions() -> Response | Json:
        fields = read_body()
        fill_in(service, fields)
        check_dialect(fields)
        fields["prompt"] = _single(fields.get("prompt"))
        return service.respond(fields, Completion(name, fields))


def _single(prompt: Any) -> Any:
    """A list of prompts may have one: its only string, or its only list of ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise RequestError("one prompt per request is supported", param="prompt")
        return prompt[0]
    return prompt


class Completion(OpenAIShape):
    """The shape of /v1/completions."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, fields: Json) -> None:
        super().__init__(model, fields)
        self._offsets: Counter[int] = Counter()  # where in a choice's text the next token begins

    def choice(self, index: int, body: Json) -> Json:
        """A choice of a whole answer."""
        return self._choice(index, body["text"], body.get("logprobs"), body["finish_reason"])

    def end(self, index: int, reason: str) -> Json:
        """The choice in the chunk that ends it."""
        return self._choice(index, "", None, reason)

    def shown(self, event: Json, number: int) -> str:
        """A chunk for an event of a choice; a comparison's other runs are not shown."""
        text, logprobs = "".join(text for text, _ in event["pieces"]), event.get("logprobs")
        is_news = number < self.num_choices and (text or logprobs is not None)
        return self.chunk(self.part(number, text, logprobs)) if is_news else ""

    def part(self, index: int, text: str, logprobs: Logprobs) -> Json:
        """A choice in a chunk."""
        return self._choice(index, text, logprobs)

    def _choice(self, index: int, text: str, logprobs: Logprobs, reason: str | None = None) -> Json:
        """A choice, or a part of it, with the log-probabilities of its tokens."""
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
