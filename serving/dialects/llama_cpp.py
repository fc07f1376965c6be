"""llama.cpp's own routes: its clients and editors know no others.

    POST /completion, /completions    a prompt is continued: n_predict, n_probs, …
    POST /infill                      what is between input_prefix and input_suffix
    POST /chat/completions            OpenAI's, as llama.cpp answers it without /v1
    POST /apply-template              the prompt of a conversation; …/input_tokens counts its tokens
    GET /models /props /slots         the model, the defaults, the places; also GET /v1/health

Here a field that is absent has the server's default, not llama.cpp's.
"""

import time
from pathlib import Path
from typing import Any

from flask import Flask, Response, request

from messages import Json, RequestError
from models.fim import File, Gap
from serving.fields import LIMITS, check_dialect, wrong
from serving.parsing import MAX_BIASES, Check, model_id
from serving.service import Service, read_body

from .chat import errors_name, respond
from .completions import check_number, check_text
from .llama_shapes import SAMPLERS, LlamaChat, LlamaCompletion, error_form, settings
from .tokens import ids_of, ids_of_chat, text_of, tokenizer_of
from .translation import objects, text_at

_OURS = "/completion /completions /infill /chat/completions /models /props /slots".split()
_OURS += "/apply-template /chat/completions/input_tokens /tokenize /detokenize".split()
ERROR_FORMS = dict.fromkeys(_OURS, error_form)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= -1


# What the answer is to have, and how it is cut.
_ASKED: dict[str, Check] = {
    "return_tokens": (lambda value: isinstance(value, bool), "true or false"),
    "response_fields": (_are_names, "a list of names"),
    "samplers": (
        lambda value: _are_names(value) and {*value} <= {*SAMPLERS},
        f"a list of {', '.join(SAMPLERS)}",
    ),
    "n_indent": (_is_count, "a number of spaces"),
    **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), (_is_count, "a number of ms")),
}
_NEVER = -100  # the bias of a token that must not come
_GAP = {"prompt": "input_prefix", "suffix": "input_suffix"}


def register_routes(app: Flask, service: Service) -> None:
    """Add the routes for the service's model."""

    @app.post("/completion", endpoint="completion")
    @app.post("/completions", endpoint="llama_completions")
    def completion() -> Response | Json:
        fields = read_body()
        prompts = _read_prompts(fields.get("prompt"), service)
        fields["prompt"] = prompts[0]
        listed = service.read_list(prompts, "prompt") if len(prompts) > 1 else None
        return _respond(service, fields, listed)

    @app.post("/infill")
    def infill() -> Response | Json:
        fields = read_body()
        with errors_name(sent := dict(_GAP)):
            before, behind = (fields.pop(name, None) or "" for name in sent.values())
            texts = check_text(before, "prompt"), check_text(behind, "suffix")
        middle, files = fields.pop("prompt", None) or "", _files(fields.pop("input_extra", None))
        with errors_name(sent):
            service.read_infill(Gap(*texts, check_text(middle, "the prompt"), files), fields)
            return _respond(service, fields)

    @app.post("/chat/completions", endpoint="llama_chat")
    def chat() -> Response | Json:
        return respond(service, _chat_body(), LlamaChat)

    @app.post("/chat/completions/input_tokens")
    def count() -> Json:
        return {"input_tokens": len(ids_of_chat(service, _chat_body(takes_place=False)))}

    @app.post("/apply-template")
    def apply_template() -> Json:
        ids = ids_of_chat(service, _chat_body(takes_place=False))
        return {"prompt": text_of(service.tokenizer, ids)}

    _register_figures(app, service)


def _register_figures(app: Flask, service: Service) -> None:
    """Add the routes that tell of the server."""
    name, options = model_id(service.name), service.options

    @app.get("/models", endpoint="llama_models")
    def models() -> Json:
        health = service.health()
        target = health.get("target") or {}
        meta = {
            "n_vocab": target.get("vocabulary"), "n_ctx_train": service.max_length,
            "n_params": target.get("parameters"), "size": target.get("weight_bytes"),
        }  # fmt: skip
        card = {"id": name, "aliases": [name], "tags": [], "object": "model", "meta": meta}
        card |= {"created": int(time.time() - health["uptime_s"]), "owned_by": "local"}
        model = {"name": name, "model": name, "type": "model", "capabilities": ["completion"]}
        return {"models": [model], "object": "list", "data": [card]}

    @app.get("/props")
    def props() -> Json:
        """The defaults of requests, and what the model reads. Folders are not told."""
        texts = "chat_template", "bos_token", "eos_token"
        defaults = {"id": 0, "n_ctx": service.max_length, "params": settings(service, {})}
        return {
            "default_generation_settings": defaults,
            "total_slots": options.max_running,
            "model_alias": name,
            "model_path": Path(options.model or name).name,
            "modalities": {"vision": False, "audio": False},
            **{text: getattr(service.tokenizer, text, None) or "" for text in texts},
            "build_info": "speculative-decoding",
            "is_sleeping": False,
        }

    @app.get("/slots")
    def slots() -> Response | list[Json]:
        """The places of requests. Which request has which place is nobody's business."""
        busy = service.worker.num_running
        if request.args.get("fail_on_no_slot") and busy >= options.max_running:
            raise RequestError("no slot is free", status=503, code="unavailable")
        slot = {"n_ctx": service.max_length, "speculative": options.drafter != "none"}
        return [{"id": i, **slot, "is_processing": i < busy} for i in range(options.max_running)]

    @app.get("/v1/health", endpoint="llama_health")
    def health() -> tuple[Json, int]:
        state = service.health()
        return state, 200 if state["status"] == "ok" else 503


# ------------------------------------------------------------------------- what clients send


def _chat_body(takes_place: bool = True) -> Json:
    """The fields of a chat, in which a last message of the assistant goes on."""
    fields = read_body(takes_place)
    turns = fields.get("messages")
    last = turns[-1] if isinstance(turns, list) and turns else None
    is_open = isinstance(last, dict) and last.get("role") == "assistant"
    if is_open and not fields.keys() & {"add_generation_prompt", "continue_final_message"}:
        fields["continue_final_message"] = not last.get("tool_calls")
    return fields


def _respond(
    service: Service, fields: Json, prompts: list[list[int]] | None = None
) -> Response | Json:
    """Answer a request whose prompt was read, or whose `prompts` were, of a list."""
    asked = {name: fields.pop(name, None) for name in _ASKED}
    for name, (is_valid, what) in _ASKED.items():
        if asked[name] is not None and not is_valid(asked[name]):
            raise RequestError(f"{name} must be {what}", param=name)
    if asked["n_indent"] and fields.get("stream"):
        raise RequestError("n_indent does not go with stream: true", param="n_indent")
    if fields.get("seed") == -1:
        del fields["seed"]
    if service.options.max_tokens is None and all(fields.get(name) is None for name in LIMITS):
        fields["n_predict"] = -1
    if fields.get("logit_bias") is not None:
        fields["logit_bias"] = _biases(fields["logit_bias"], service)
    for name in SAMPLERS.keys() - set(asked["samplers"] or SAMPLERS):
        fields |= SAMPLERS[name]
    if "infill" in (asked["samplers"] or ()):
        fields["temperature"] = 0
    check_dialect(fields)
    return service.respond(fields, LlamaCompletion(service, fields, asked, prompts), prompts)


def _read_prompts(value: Any, service: Service) -> list[Any]:
    """The prompts of a request: several where a list has texts alone, lists or objects."""
    kinds = {type(part) for part in value} if isinstance(value, list) else set()
    are_several = bool(kinds & {list, dict}) or kinds == {str}
    if are_several:
        check_number(value)
    return [_read_prompt(each, service) for each in (value if are_several else [value])]


def _read_prompt(value: Any, service: Service) -> Any:
    """A prompt as /generate takes it: a text, or ids. A list may mix ids and texts."""
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise RequestError("multimodal_data: this model reads text alone", param="prompt")
        value = value.get("prompt_string")
    kinds = {type(part) for part in value} if isinstance(value, list) else set()
    if kinds == {int, str}:
        if len(value) > service.max_length:
            why = f"prompt has {len(value)} parts: the context holds {service.max_length} tokens"
            raise RequestError(why, param="prompt", code="context_length_exceeded")
        tokenizer, ids = tokenizer_of(service), list[int]()
        for i, part in enumerate(value):
            is_id = isinstance(part, int)
            ids += [part] if is_id else ids_of(part, tokenizer, "prompt", has_special=i == 0)
        return ids
    return value


def _biases(value: Any, service: Service) -> Any:
    """Biases as OpenAI has them; llama.cpp has pairs, too, texts in place of ids, and false.

    A text of digits is an id where it is a key, and a text in a pair.
    """
    pairs, biases = list(value.items()) if isinstance(value, dict) else value, dict[str, Any]()
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise wrong("logit_bias", f"must be an object or a list of pairs, of at most {MAX_BIASES}")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) not in (int, str):
            raise RequestError("logit_bias has an entry that is no pair", param="logit_bias")
        key, bias = pair
        is_id = isinstance(key, int) or (isinstance(value, dict) and key.isdecimal())
        ids = [key]
        if not is_id:
            ids = ids_of(key, tokenizer_of(service), "logit_bias", has_special=False)
        biases |= {str(token): _NEVER if bias is False else bias for token in ids}
    return biases


def _files(extra: Any) -> list[File]:
    """The other files of a project. Raises RequestError, naming the first that is none."""
    files = list[File]()
    for path, file in objects(extra, "input_extra") if extra else ():
        text = check_text(text_at(file, path), path)
        files.append(File(text_at({"filename": "tmp"} | file, path, "filename") or "tmp", text))
    return files
