"""OpenAI's /v1/completions: a prompt is continued as it stands.

The fields of /generate (drafter, num_speculative_tokens, min_p, …) may be sent as well. Beside the
usual parts an answer, and a stream's last chunk, has `metrics.speculative_decoding` and `timings`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from flask import Flask, Response

from runtime import plug
from runtime.models.prompts import LONG_TEXT, is_text, long_texts, prompt_ids
from runtime.values import Engine, Json, Model, Request, RequestError
from server.events import trace
from server.fields import NAMES, known_fields, wrong
from server.parsing import KNOWN, model_id, parse_request
from server.service import Parsed, Service, read_body

from .shapes import Logprobs, OpenAIShape, Places

fim = plug("runtime.models.fim")
_NAMES = KNOWN - {"chat"} | {"echo", "suffix"}
_MOST_PROMPTS = 128


def register_routes(app: Flask, service: Service) -> None:
    """Add the route for the service's model."""

    @app.post("/v1/completions")
    def completions() -> Response | Json:
        """Continue a prompt, or each of a list."""
        fields = known_fields(read_body(), _NAMES)
        if not isinstance(echo := fields.pop("echo", False), bool):
            raise wrong("echo", "must be true or false")
        if echo and fields.get("suffix"):
            raise wrong("echo", "does not go with suffix")
        _fill_in(service, fields)
        prompts, shape = _prompts_of(fields.get("prompt")), Completion(service, fields)
        fields["prompt"] = prompts[0]
        if echo:
            shape.echoed = prompts
            _score_prompts(fields)
        parse = partial(_parse_list, prompts) if len(prompts) > 1 else None
        return service.respond(fields, shape, parse)


@contextmanager
def _at_place(i: int) -> Iterator[None]:
    """Let an error about the prompt name its place in the list."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.param = f"prompt[{i}]"
            is_first = error.message.startswith("prompt ")
            what = error.message.removeprefix("prompt ")
            error.message = f"{error.param}{' ' if is_first else ': '}{what}"
        raise


def _ids_of(values: list[Any], target: Model) -> list[list[int]]:
    """The ids of each prompt in a list. Raises RequestError."""
    sizes = [len(value) for value in values if isinstance(value, str)]
    are_short = max(sizes, default=0) <= LONG_TEXT  # else one of them takes the turn
    every = list[list[int]]()
    with long_texts.take(sum(sizes) if are_short else 0):
        for i, value in enumerate(values):
            with _at_place(i):
                every.append(prompt_ids(value, target.tokenizer, target.max_length))
    return every


def _parse_list(prompts: list[Any], body: Json, engine: Engine, defaults: Json) -> Parsed:
    """`parse_request` for each of these prompts: (requests, stream, warnings).

    Each has the fields of the body, its seed, too. There are the choices of the first prompt, then
    those of the second, …
    """
    requests, notes = list[Request](), list[str]()
    for i, prompt in enumerate(_ids_of(prompts, engine.target)):
        with _at_place(i):
            one = body | {"prompt": prompt}
            request, stream, compare, notes = parse_request(one, engine, defaults)
        requests.append(replace(request, num_prompts=len(prompts)))
    if compare:
        raise wrong("compare", "goes with one prompt")
    if trace:
        total = sum(len(request.prompt) for request in requests)
        trace.check_scores(total, requests[0].prompt_logprobs, requests[0].n)
    return [choice for request in requests for choice in request.choices], stream, notes


def _fill_in(service: Service, fields: Json) -> None:
    """Where there is a suffix, put the prompt of the text with the gap in front of it.

    Raises RequestError for what is no text, and for a model that cannot fill in.
    """
    if (suffix := fields.pop("suffix", "")) == "":
        return
    if not fim:
        raise wrong("suffix", "needs runtime/models/fim.py, which is not here")
    before = fields.get("prompt") or ""
    for name, value in ("prompt", before), ("suffix", suffix):
        if value != "" and not is_text(value):
            raise wrong(name, "must be a text, where a gap is to be filled in")
    name, tokenizer = model_id(service.name), service.tokenizer
    fields["prompt"] = fim.infill_prompt(before, suffix, tokenizer, name, service.max_length)


def _prompts_of(prompt: Any) -> list[Any]:
    """The prompts of a list of texts, or of lists of ids; anything else is one."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))):
        return [prompt]
    if len(prompt) > _MOST_PROMPTS:
        raise wrong("prompt", f"has {len(prompt)} entries; at most {_MOST_PROMPTS} are taken")
    return prompt


def _score_prompts(fields: Json) -> None:
    """Have prompts scored that are echoed, where log-probabilities are asked for. RequestError."""
    if fields.get("truncate_prompt_tokens") is not None:
        raise wrong("truncate_prompt_tokens", "does not go with echo")
    count, scored = fields.get("logprobs", False), fields.get("prompt_logprobs")
    is_number = type(scored) in (int, type(None))  # True is none, and is refused as such
    if count is not False and isinstance(count, int) and is_number:
        fields["prompt_logprobs"] = max(0 if count is True else count, scored or 0)


class Completion(OpenAIShape):
    """The shape of /v1/completions: the choices of the first prompt, then those of the next."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    echoed: list[Any] = []  # the prompts, texts or ids, that are repeated before their choices

    def __init__(self, service: Service, fields: Json) -> None:
        super().__init__(fields)
        self._begun = set[int]()  # choices whose prompt is repeated already
        self._tokenizer = service.tokenizer
        self._places = dict[int, Places]()  # by choice

    def choice(self, index: int, body: Json) -> Json:
        text, logprobs = body["text"], body.get("logprobs")
        if self.echoed:
            before, scored = self._echo(index, self.scores[index // self.job.request.n])
            text, logprobs = before + text, logprobs if scored is None else [*scored, *logprobs]
        return self._choice(index, text, logprobs, body["finish_reason"])

    def end(self, index: int, reason: str) -> Json:
        return self._choice(index, "", None, reason)

    def _beginning(self, number: int) -> str:
        """Before a choice's first event, a chunk that repeats the prompt."""
        if not self.echoed or number in self._begun or number >= self.job.request.texts:
            return ""
        self._begun.add(number)
        # Scores of the prompt, which the first of its choices has.
        scored = self.job.runs[number - number % self.job.request.n].sequence
        scores = trace.prompt_logprobs(scored) if trace else []
        return self.chunk(self._choice(number, *self._echo(number, scores)))

    def last(self, body: Json) -> Iterator[str]:
        yield from filter(None, map(self._beginning, range(self.job.request.texts)))
        yield from super().last(body)

    def shown(self, event: Json, number: int) -> str:
        """A chunk for an event of a choice; a comparison's other runs are not shown."""
        beginning = self._beginning(number)
        self.note(event, number)
        text, logprobs = "".join(text for text, _ in event["pieces"]), event.get("logprobs")
        is_news = number < self.job.request.texts and (text or logprobs is not None)
        return beginning + (self.chunk(self._choice(number, text, logprobs)) if is_news else "")

    def _echo(self, index: int, scores: list[Json | None]) -> tuple[str, Logprobs]:
        """The text of a choice's prompt, and with logprobs its tokens."""
        sent, ids = self.echoed[index // self.job.request.n], self.job.runs[index].request.prompt
        decode = self._tokenizer.decode
        text = sent if isinstance(sent, str) else decode(ids, skip_special_tokens=True)
        if self.job.request.logprobs is None:
            return text, None
        name = f"token_id:{ids[0]}" if NAMES in self.job.request.returns else decode(ids[:1])
        first = {"id": ids[0], "token": name, "logprob": None, "top_logprobs": None}
        return text, [first, *filter(None, scores)]

    def _choice(self, index: int, text: str, logprobs: Logprobs, reason: str | None = None) -> Json:
        """A choice, or a part of it, with the log-probabilities of its tokens."""
        listed = None
        if logprobs is not None:
            if index not in self._places:
                before = () if self.echoed else self.job.runs[index].sequence.before
                self._places[index] = Places(self._tokenizer, before)
            listed = {
                "tokens": [entry["token"] for entry in logprobs],
                "token_logprobs": [entry["logprob"] for entry in logprobs],
                "top_logprobs": list(map(self._tops, logprobs)),
                "text_offset": [self._places[index].next(entry)[0] for entry in logprobs],
            }
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": reason}

    def _tops(self, entry: Json) -> Json | None:
        """The likeliest tokens where one stands, and that one."""
        if (tops := entry["top_logprobs"]) is None:
            return None
        return {top["token"]: top["logprob"] for top in [*tops[: self.job.request.logprobs], entry]}
