"""llama.cpp's shapes: of an answer, whole or in chunks, of its chats, and of errors."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from flask import current_app

from messages import Json, RequestError
from serving.answers import Shape, sse
from serving.fields import LIMITS
from serving.service import Service

from .chat import Chat
from .shapes import bodies, bytes_of
from .tokens import text_of

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip
_SETTINGS = "temperature top_k top_p min_p typical_p presence_penalty frequency_penalty".split()
# Samplers, and what switches each off: one that a request leaves out of its list does nothing.
SAMPLERS: dict[str, Json] = {
    "penalties": {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    "temperature": {"temperature": 1}, "typ_p": {"typical_p": 1}, "top_k": {"top_k": 0},
    "top_p": {"top_p": 1}, "min_p": {"min_p": 0},
    # Others are off: what sets them up is refused. Instead of `infill` the likeliest is taken.
    "dry": {}, "xtc": {}, "top_n_sigma": {}, "adaptive_p": {}, "infill": {},
}  # fmt: skip
_TOO_LONG = "context_length_exceeded"


def error_form(error: RequestError) -> Json:
    """An error as llama.cpp writes it; `param` is ours."""
    other = "invalid_request_error" if error.status < 500 else "server_error"
    kind, message = _TYPES.get(error.status, other), error.message
    if error.code == _TOO_LONG:
        kind = "exceed_context_size_error"
        message += ": it exceeds the available context size"
    body = {"code": error.status, "message": message, "type": kind, "param": error.param}
    return {"error": body | error.counts}


class LlamaCompletion(Shape):
    """The shape of /completion: a body of each text, or chunks that end in it."""

    closing = ""

    def __init__(
        self, service: Service, fields: Json, asked: Json, prompts: list[list[int]] | None = None
    ) -> None:
        """`asked` says what the answer is to have, and `prompts` are those of a list."""
        super().__init__(fields)
        self._service, self._name = service, current_app.extensions["model"]
        self._tokenizer, self._asked = service.tokenizer, asked
        self._prompts = prompts or [None]
        self.num_prompts = len(self._prompts)
        self._counts = defaultdict[int, int](int)  # tokens that a stream has shown, by choice

    def whole(self, body: Json) -> Json:
        """The body, or a list of those of several texts."""
        listed = [self._body(i, each, body) for i, each in enumerate(bodies(body))]
        return listed if self.num_choices > 1 else listed[0]

    def shown(self, event: Json, number: int) -> str:
        """A chunk for each event, or for each token where probabilities are wanted."""
        if number >= self.num_choices or not event["tokens"]:
            return ""
        ids = [token["id"] for token in event["tokens"]]
        text, parts = "".join(text for text, _ in event["pieces"]), [(ids, Json())]
        if "logprobs" in event:  # the text is in the last one
            parts = [
                ([token], {"completion_probabilities": [entry]})
                for token, entry in zip(ids, self._probabilities(event["logprobs"]), strict=True)
            ]
        chunks = list[str]()
        for i, (tokens, more) in enumerate(parts, 1):
            self._counts[number] += len(tokens)
            said = {"index": number, "content": text if i == len(parts) else "", "tokens": tokens}
            said |= {"stop": False, "id_slot": -1, "tokens_predicted": self._counts[number]}
            chunks.append(sse(said | more))
        return "".join(chunks)

    def last(self, body: Json) -> Iterator[str]:
        """The whole body of each text, without what was said."""
        for i, each in enumerate(bodies(body)):
            yield sse(self._body(i, each, body) | {"content": "", "tokens": []})

    def failed(self, error: RequestError) -> str:
        return sse(error_form(error))

    def _body(self, index: int, body: Json, whole: Json) -> Json:
        """The body of a choice; `whole` is the answer to all of them."""
        usage, word, kind = whole["usage"], body["stop_reason"] or "", "limit"
        if body["finish_reason"] == "stop":
            kind = "word" if word else "eos"
        prompt = self._prompts[index // self.per_prompt]
        evaluated, predicted = usage["prompt_tokens"], body["timings"]["predicted_n"]
        evaluated = evaluated if prompt is None else len(prompt)
        is_full = kind == "limit" and (evaluated or 0) + predicted >= self._service.max_length
        content = _indented(body["text"], self._asked["n_indent"] or 0)
        said = {
            "index": index, "content": content,
            "tokens": body["token_ids"] if self._asked["return_tokens"] else [],
            "id_slot": -1, "stop": True, "model": self._name,
            "tokens_predicted": predicted, "tokens_evaluated": evaluated,
            "tokens_cached": (usage["prompt_tokens_details"] or {}).get("cached_tokens"),
            "generation_settings": settings(self._service, self._fields) | {"seed": body["seed"]},
            "prompt": self._prompt(prompt), "has_new_line": "\n" in content, "truncated": is_full,
            "stop_type": kind, "stopping_word": word,
            **{f"stopped_{each}": kind == each for each in ("eos", "limit", "word")},
            **{name: body[name] for name in ("timings", "metrics") if name in body},
            "warnings": whole["warnings"] + self._warnings(),
        }  # fmt: skip
        if "logprobs" in body:
            said["completion_probabilities"] = self._probabilities(body["logprobs"])
        return _selected(said, names) if (names := self._asked["response_fields"]) else said

    def _warnings(self) -> list[str]:
        names = [name for name in ("t_max_predict_ms", "t_max_prompt_ms") if self._asked[name]]
        return [f"{name} was ignored: no clock cuts a text" for name in names]

    def _prompt(self, prompt: list[int] | None) -> str:
        prompt = prompt or self._fields["prompt"]
        is_text = isinstance(prompt, str) or self._tokenizer is None
        return prompt if is_text else text_of(self._tokenizer, list(prompt))

    def _probabilities(self, logprobs: list[Json]) -> list[Json]:
        """Log-probabilities of tokens, each with its bytes."""

        def entry(one: Json) -> Json:
            known = self._tokenizer and bytes_of(one["id"], self._tokenizer)
            named = {"id": one["id"], "token": one["token"], "bytes": list(known or b"")}
            return named | {"logprob": one["logprob"]}

        tops = (list(map(entry, one["top_logprobs"])) for one in logprobs)
        return [entry(one) | {"top_logprobs": top} for one, top in zip(logprobs, tops, strict=True)]


def _indented(text: str, least: int) -> str:
    """The text up to the first line behind its first that is indented by less."""
    first, *lines = text.split("\n")
    for i, line in enumerate(lines):
        if line.strip() and len(line) - len(line.lstrip()) < least:
            return "\n".join([first, *lines[:i]])
    return text


def _selected(body: Json, names: list[str]) -> Json:
    """The fields of these names, of which one may lead inside: generation_settings/n_predict."""
    chosen = Json()
    for name in names:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[name] = value
    return chosen


def settings(service: Service, fields: Json) -> Json:
    """A request's settings, under llama.cpp's names; without fields the server's defaults."""
    values = service.options.for_requests | {n: v for n, v in fields.items() if v is not None}
    limits = [fields[name] for name in LIMITS if fields.get(name) is not None]
    limit = limits[0] if limits else service.options.max_tokens or -1
    biases = [{"token": int(t), "bias": b} for t, b in (values.get("logit_bias") or {}).items()]
    if values.get("ignore_eos"):  # null is −inf
        biases += [{"token": token, "bias": None} for token in service.end_ids]
    stop, stream = values.get("stop") or [], bool(values.get("stream"))
    return {
        "n_predict": limit, "max_tokens": limit, "seed": values.get("seed"),
        **{name: values.get(name, 1.0) for name in _SETTINGS},
        "repeat_penalty": values.get("repeat_penalty", values.get("repetition_penalty", 1.0)),
        "stop": [stop] if isinstance(stop, str) else stop,
        "n_probs": values.get("n_probs") or 0, "stream": stream, "n_keep": 0,
        "ignore_eos": bool(values.get("ignore_eos")), "logit_bias": biases,
        "adaptive_target": -1.0, "adaptive_decay": 0.9, "mirostat": 0,
        "samplers": list(SAMPLERS)[:6],
        "speculative.n_max": values["num_speculative_tokens"],
    }  # fmt: skip


class LlamaChat(Chat):
    """The shape of /chat/completions: its first chunk has null; `verbose` tells the prompt."""

    first_content = None

    def whole(self, body: Json) -> Json:
        """The body, with the prompt where that was asked for."""
        told = super().whole(body)
        if self._fields.get("verbose") is True and self._tokenizer:
            told["__verbose"] = {"prompt": text_of(self._tokenizer, list(self._fields["prompt"]))}
        return told
