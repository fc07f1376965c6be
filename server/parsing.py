"""From the bytes of a request to checked values, or an error that names the field.

Strict on purpose: a field that is misspelt, out of range or not supported must never be silently
ignored.
"""

import json
import re
import reprlib
import secrets
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any

from drafters.pool import AUTO, TREE
from runtime.models.prompts import (
    at_place,
    chat_ids,
    is_text,
    large_bodies,
    prediction_ids,
    prompt_ids,
)
from runtime.values import (
    MAX_SPECULATIVE_TOKENS,
    PLAIN,
    Engine,
    Json,
    Request,
    RequestError,
    Sampling,
    check_prompt,
)

from . import formats, masks
from .fields import known_fields, wrong
from .trace import IDS, NAMES


def parse_json(data: bytes) -> Json:
    """The JSON object in a request's body.

    Raises RequestError for anything else: broken JSON, NaN and Infinity (which Python would
    accept), bytes that are not UTF-8, nesting or integers too large for the parser, an array or a
    bare value.
    """

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        with large_bodies.take(len(data)):
            body = json.loads(data.decode("utf-8"), parse_constant=refuse_constant)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:  # so are broken JSON, bytes that are not UTF-8, huge integers
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


MAX_STOP_CHARACTERS = 1000
MAX_TOKENS_LIMIT = 1_000_000
MAX_BIASES, MAX_CHOICES, MAX_STOPS = 300, 8, 64
MAX_PROMPT_SCORES = 1 << 19  # log-probabilities of a request's prompts: 60 bytes of JSON each
_PREDICTION = "prediction"  # the name of the field, and of its drafter
Check = tuple[Callable[[Any], bool], str]  # whether a value is valid, and what it must be


def _number(low: float, high: float, kind: type = int | float, name: str = "a number") -> Check:
    def is_valid(value: Any) -> bool:
        return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high

    return is_valid, f"{name} from {low} to {high}"


def _are(is_valid: Callable[[Any], bool], least: int, most: int) -> Callable[[Any], bool]:
    """What tells whether a value is a list of `least` to `most` values that are valid."""
    return lambda values: (
        isinstance(values, list) and least <= len(values) <= most and all(map(is_valid, values))
    )


def _is_short_text(value: Any) -> bool:
    return is_text(value) and len(value) <= MAX_STOP_CHARACTERS


def _are_stops(value: Any) -> bool:
    return _are(_is_short_text, 0, MAX_STOPS)([value] if isinstance(value, str) else value)


def _are_biases(value: Any) -> bool:
    is_number = _number(-100, 100)[0]
    return (isinstance(value, dict) and len(value) <= MAX_BIASES) and all(
        re.fullmatch("0|[1-9][0-9]{0,8}", token) and is_number(bias)
        for token, bias in value.items()
    )


def _or_minus_1(check: Check) -> Check:
    return lambda value: value == -1 or check[0](value), f"-1 or {check[1]}"


def _ids(least: int) -> Check:
    is_id, _ = _number(0, 1 << 31, int)
    what = f"a list of {least} to {masks.MOST_IDS} token ids"
    return _are(is_id, least, masks.MOST_IDS), what


def _one_of(*values: Any) -> Check:
    what = " or ".join(map(str, values))
    return lambda value: not isinstance(value, bool) and value in values, what


_integer = partial(_number, kind=int, name="an integer")
_FLAGS = (
    "fixed_k", "speculative", "stream", "trace", "compare", "chat", "ignore_eos",
    "include_stop_str_in_output", IDS, NAMES,
)  # fmt: skip
_STOP = f"a non-empty string of at most {MAX_STOP_CHARACTERS} characters"
_CHECKS: dict[str, Check] = {
    "max_tokens": _integer(0, MAX_TOKENS_LIMIT),
    "n": _integer(1, MAX_CHOICES),
    "num_speculative_tokens": _integer(0, MAX_SPECULATIVE_TOKENS),
    **dict.fromkeys(_FLAGS, (lambda value: isinstance(value, bool), "true or false")),
    "stop": (_are_stops, f"{_STOP}, or a list of at most {MAX_STOPS} of them"),
    "temperature": _number(0, 100),
    "top_k": _integer(-1, 1 << 31),
    "top_p": _number(0, 1),
    "typical_p": _number(1e-9, 1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(1e-9, 100),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": (
        _are_biases,
        f"an object of at most {MAX_BIASES} token ids, written as texts, with numbers from -100 to "
        "100",
    ),
    "seed": _integer(-(1 << 63), (1 << 64) - 1),
    "verification": _one_of("coupled", "rejection"),
    "min_tokens": _integer(0, MAX_TOKENS_LIMIT),
    "stop_token_ids": _ids(0),
    "allowed_token_ids": _ids(1),
    "bad_words": (
        _are(lambda word: _is_short_text(word) and word.strip(), 0, masks.MOST_WORDS),
        f"a list of at most {masks.MOST_WORDS} texts of up to "
        f"{MAX_STOP_CHARACTERS} characters, none of them empty",
    ),
    "truncate_prompt_tokens": _or_minus_1(_integer(1, 1 << 31)),
    "truncation_side": _one_of("left", "right"),
    "logprobs": (
        lambda value: isinstance(value, bool) or _integer(0, 20)[0](value),
        "true, false or an integer from 0 to 20",
    ),
    "prompt_logprobs": _integer(0, 20),
}
_LIMIT, _OTHER_LIMIT = "max_tokens", "max_completion_tokens"  # two names of one field
_CHECKS[_OTHER_LIMIT] = _CHECKS[_LIMIT]
# The fields of /generate. Those of the protocols in dialects/ are translated into these.
KNOWN = frozenset(
    [*_CHECKS, "prompt", "prediction", "drafter", "model", "stream_options", *formats.FIELDS]
)
_STREAM_OPTIONS = "include_usage", "continuous_usage_stats", "include_obfuscation"
READ = "truncate_prompt_tokens", "truncation_side"  # how a prompt is read
# The fields of Sampling that a request may set, with their defaults.
_SAMPLING = {
    field.name: field.default
    for field in fields(Sampling)
    if field.name in _CHECKS and field.name not in masks.NAMES
}
SAMPLING_FIELDS = (*_SAMPLING, "seed")


def check_fields(body: Json) -> Json:
    """The fields of a body, each in range. Raises RequestError, naming the first that is not."""
    known = known_fields(body, KNOWN)
    for name, (is_valid, what) in _CHECKS.items():
        if name in known and not is_valid(known[name]):
            raise RequestError(f"{name} must be {what}", param=name)
    if (limit := known.pop(_OTHER_LIMIT, None)) is not None:
        if known.setdefault(_LIMIT, limit) != limit:
            raise wrong(_OTHER_LIMIT, f"is another name of {_LIMIT}: send one")
    return known


@cache
def model_id(model: str) -> str:
    """A model's name outside: a hub id as it is, of a folder or a file its last part."""
    return Path(model).resolve().name if Path(model).exists() else model


def _shown(value: Any) -> str:
    """A wrong value in a message. (A dictionary's repr would sort all of its keys.)"""
    return reprlib.repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"


def unknown_model(wanted: Any, model: str) -> RequestError:
    """What a request for another model is answered with."""
    message = f"unknown model {_shown(wanted)}; this server has {model_id(model)}"
    return RequestError(message, param="model", status=404, code="model_not_found")


def _truncated(ids: Any, known: Json, room: int) -> Any:
    """The last ids of a prompt, or its first ones, as far as a request wants no more."""
    count = known.get("truncate_prompt_tokens", len(ids))
    count = max(1, room) if count == -1 else count
    if count >= len(ids):
        return ids
    return type(ids)(ids[:count] if known.get("truncation_side") == "right" else ids[-count:])


def check_model(wanted: Any, model: str) -> None:
    """Raises RequestError, a 404, if another model is wanted."""
    if wanted not in (model, model_id(model), PurePath(model).name):
        raise unknown_model(wanted, model)


def _read_prompt(known: Json, fields: Json, target: Any) -> Any:
    """The ids of a prompt, which leave room for what is to follow; without a tokenizer a text.

    Where max_tokens is -1 it becomes what the context holds beside, and None where nobody knows.
    """
    max_length, is_open = target.max_length, fields["max_tokens"] == -1
    read = chat_ids if fields.pop("chat", False) else prompt_ids
    prompt = read(known.get("prompt"), target.tokenizer, max_length)
    has_ids = not prompt or isinstance(prompt[0], int)  # a chat template may write nothing
    if has_ids:
        least = 1 if is_open else fields["max_tokens"]
        prompt = _truncated(prompt, known, max_length - least)
    if is_open:
        fields["max_tokens"] = max(1, max_length - len(prompt)) if has_ids else None
    if has_ids:
        try:
            check_prompt(prompt, max_length, target.vocab_size, fields["max_tokens"])
        except ValueError as error:
            refusal = RequestError(str(error), param="prompt")
            if len(prompt) >= max_length:
                refusal.code = "context_length_exceeded"
            raise refusal from error
    _check_scores(len(prompt), fields.get("prompt_logprobs"), fields.get("n", 1))
    return prompt


def _check_scores(num_tokens: int, num_top: int | None, num_choices: int) -> None:
    """Raises RequestError for more log-probabilities of prompts than an answer may have."""
    if num_top is not None and num_tokens * (1 + num_top) * num_choices > MAX_PROMPT_SCORES:
        most = MAX_PROMPT_SCORES // (1 + num_top) // num_choices
        why = f"prompt_logprobs: so many likeliest tokens are for up to {most} tokens of prompts"
        raise RequestError(why, param="prompt_logprobs")


def _read_sampling(fields: Json, vocab_size: int) -> Sampling:
    """Take the fields of Sampling out of a request's checked fields.

    Raises RequestError for a bias of a token that is not in the vocabulary.
    """
    biases = {int(token): float(bias) for token, bias in dict(fields.pop("logit_bias", {})).items()}
    # JSON may write 1 or 1.0.
    values = {name: type(v)(fields.pop(name, v)) for name, v in _SAMPLING.items()}
    if (largest := max(biases, default=0)) >= vocab_size:
        raise wrong("logit_bias", f"has token id {largest}: the largest one is {vocab_size - 1}")
    return Sampling(**values | {"logit_bias": tuple(biases.items())})


def _check_choices(num_choices: int, fields: Json) -> None:
    """Raises RequestError for several choices together with fields that they do not go with."""
    if fields["compare"] and num_choices > 1:
        raise RequestError("n must be 1 with compare: one text is compared", param="n")
    if fields["seed"] + num_choices > 1 << 64:
        why = f"seed must be at most {(1 << 64) - num_choices} with n {num_choices}"
        raise RequestError(f"{why}: choices have the seeds behind it", param="seed")


def _expect(fields: Json, known: Json, target: Any) -> list[str]:
    """Put the prediction's ids into the fields, whose drafter is chosen; returns warnings."""
    value, drafter = known.get("prediction", ""), fields["drafter"]
    fields["prediction"] = ids = prediction_ids(value, target.tokenizer, target.max_length)
    if known.get("drafter") == _PREDICTION and not ids:
        raise RequestError("drafter prediction goes with a prediction", param="drafter")
    if ids and drafter not in (AUTO, TREE, _PREDICTION):
        return [f"prediction was not used: the drafter is {drafter or PLAIN}"]
    if ids and "num_speculative_tokens" not in known:  # long drafts pay: most tokens are right
        fields["num_speculative_tokens"] = MAX_SPECULATIVE_TOKENS
    return []


def _check_stream_options(value: Any) -> None:
    """Raises RequestError for options that are no object of flags."""
    if not isinstance(value, dict):
        raise wrong("stream_options", "must be an object")
    for option in _STREAM_OPTIONS:
        if not isinstance(value.get(option), bool | None):
            raise wrong(f"stream_options.{option}", "must be true or false")


def parse_fields(
    body: Json, target: Any, drafters: Collection[str], defaults: Json
) -> tuple[Json, list[str]]:
    """Checked fields of a generate request, `defaults` filled in, and warnings.

    `target` is a Model, or an engine that runs elsewhere and has no tokenizer. `prompt` comes back
    as _read_prompt has it, `stop` as a tuple, `drafter` as a name or None (for "none", and without
    `speculative`), `logprobs` as a number or None, `seed` as a number (random if absent), the
    fields of Sampling as `sampling`, and those of masks.py in `masks`, as they were sent. A null
    counts as absent. Raises RequestError, naming the field.
    """
    known = check_fields(body)
    check_model(known.get("model", target.name), target.name)
    if "stream_options" in known:
        if not known.get("stream"):
            raise RequestError("stream_options goes with stream: true", param="stream_options")
        _check_stream_options(known["stream_options"])
    flags = {"stream": False, "trace": False, "compare": False}
    fields = flags | defaults | {name: known[name] for name in _CHECKS if name in known}
    taken = {name: fields.pop(name) for name in (*masks.NAMES, *READ, IDS, NAMES) if name in fields}
    fields["returns"] = frozenset(name for name in (IDS, NAMES) if taken.get(name))
    fields["masks"] = {name: taken[name] for name in masks.NAMES if name in taken}
    fields["sampling"] = _read_sampling(fields, target.vocab_size)
    fields["prompt"] = _read_prompt(known, fields, target)
    stop = known.get("stop", ())
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if (drafter := known.get("drafter")) is not None:
        if drafter not in (*drafters, PLAIN):
            choices = ", ".join(sorted([*drafters, PLAIN]))
            why = f"there is no drafter {_shown(drafter)} here; choose: {choices}"
            raise RequestError(why, param="drafter")
        fields["drafter"] = drafter
    if not fields.pop("speculative", True) or fields["drafter"] == PLAIN:
        fields["drafter"] = None
    if fields.get("seed") is None:
        fields["seed"] = secrets.randbits(32)  # few enough bits for every JSON parser
    _check_choices(fields.get("n", 1), fields)
    logprobs = fields.get("logprobs", False)
    if isinstance(logprobs, bool):
        fields["logprobs"] = 0 if logprobs else None
    return fields, _expect(fields, known, target)


def parse_request(
    body: Json, engine: Engine, defaults: Json
) -> tuple[Request, bool, bool, list[str]]:
    """A request's fields, `defaults` filled in: (request, stream, compare, warnings).

    Raises RequestError, naming the field that is wrong.
    """
    target = engine.target
    defaults = defaults | {"drafter": engine.default_drafter}
    fields, notes = parse_fields(body, target, engine.pool.choices, defaults)
    stream, compare = fields.pop("stream"), fields.pop("compare")
    masks.take_masks(fields, target)
    fields["grammar"] = formats.grammar_of(body, engine, fields["prompt"])
    return Request(**fields), stream, compare, notes


def parse_list(
    body: Json, prompts: list[list[int]], engine: Engine, defaults: Json
) -> tuple[list[Request], bool, list[str]]:
    """`parse_request` for each of these prompts: (requests, stream, warnings).

    Each has the fields of the body, its seed, too.
    """
    requests, notes = list[Request](), list[str]()
    for i, prompt in enumerate(prompts):
        with at_place(i):
            one = body | {"prompt": prompt}
            request, stream, compare, notes = parse_request(one, engine, defaults)
        requests.append(replace(request, num_prompts=len(prompts)))
    if compare:
        raise RequestError("compare goes with one prompt", param="compare")
    total = sum(len(request.prompt) for request in requests)
    _check_scores(total, requests[0].prompt_logprobs, requests[0].n)
    return requests, stream, notes
