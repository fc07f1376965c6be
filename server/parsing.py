"""From the bytes of a request to checked values, or an error that names the field.

Strict on purpose: a field that is misspelt, out of range or not supported must never be silently
ignored. (Of two fields with one name the last one counts, as most readers of JSON have it.)
"""

import json
import re
import reprlib
import secrets
from collections.abc import Collection
from dataclasses import fields, replace
from functools import cache
from math import isfinite
from pathlib import Path, PurePath
from typing import Any

from runtime import lack, plug
from runtime.models.prompts import large_bodies, prompt_ids
from runtime.values import (
    MAX_SPECULATIVE_TOKENS,
    PLAIN,
    Engine,
    Json,
    Model,
    Request,
    RequestError,
    Sampling,
    check_prompt,
)

from .fields import IDS, NAMES, TRUTH, Check, integer, is_stop, known_fields, list_of, number, wrong

# The fields that go with a file that may be deleted, by its module.
_PLUGGED = {
    "runtime.models.chat": ("chat",),
    "server.prediction": ("prediction",),
    "server.comparison": ("compare",),
    "server.formats": ("response_format", "json_schema", "regex", "grammar", "choice"),
    "server.masks": ("ignore_eos", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids",
                     "include_stop_str_in_output"),
    "server.trace": ("trace", "logprobs", "prompt_logprobs", NAMES, "compare"),
}  # fmt: skip
chat, prediction, comparison, formats, masks, trace = map(plug, _PLUGGED)
_MISSING = {
    name: lack(module) for module, names in _PLUGGED.items() if not plug(module) for name in names
}


def parse_json(data: bytes) -> Json:
    """The JSON object in a request's body.

    Raises RequestError for anything else: broken JSON, NaN, Infinity and 1e999 (which Python would
    accept), bytes that are not UTF-8, nesting or integers too large for the parser, an array or a
    bare value.
    """

    def finite(number: str) -> float:
        if not isfinite(value := float(number)):
            raise ValueError(f"{number} is no number of JSON's")
        return value

    try:
        with large_bodies.take(len(data)):
            body = json.loads(data.decode("utf-8"), parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:  # so are broken JSON, bytes that are not UTF-8, huge integers
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


# ----------------------------------------------------------------------- what a field may hold
_STOP = "a non-empty string of at most 1000 characters"
_MOST_STOPS, _MOST_BIASES = 64, 300
_STREAM_OPTIONS = "include_usage", "continuous_usage_stats", "include_obfuscation"


def _one_of(*values: str) -> Check:
    return lambda value: isinstance(value, str) and value in values, " or ".join(values)


def _are_flags(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), bool | None) for name in _STREAM_OPTIONS
    )


def _are_biases(value: Any) -> bool:
    is_number, _ = number(-100, 100)
    return (isinstance(value, dict) and len(value) <= _MOST_BIASES) and all(
        re.fullmatch("0|[1-9][0-9]{0,8}", token) and is_number(bias)
        for token, bias in value.items()
    )


_LIMIT, _OTHER_LIMIT = "max_tokens", "max_completion_tokens"  # two names of one field
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("fixed_k", "speculative", "stream", "compare", "chat", IDS), TRUTH),
    **dict.fromkeys((_LIMIT, _OTHER_LIMIT), integer(0, 1_000_000)),
    "n": integer(1, 8),
    "num_speculative_tokens": integer(0, MAX_SPECULATIVE_TOKENS),
    "temperature": number(0, 100),
    "typical_p": number(1e-9, 1),
    "top_k": integer(-1, 1 << 31),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(1e-9, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": (
        _are_biases,
        f"an object of at most {_MOST_BIASES} token ids, written as texts, with numbers from -100 "
        "to 100",
    ),
    "seed": integer(-(1 << 63), (1 << 64) - 1),
    "verification": _one_of("coupled", "rejection"),
    "stop": (
        lambda value: is_stop(value) or list_of(is_stop, 0, _MOST_STOPS)(value),
        f"{_STOP}, or a list of at most {_MOST_STOPS} of them",
    ),
    "truncate_prompt_tokens": (
        lambda value: value == -1 or integer(1, 1 << 31)[0](value),
        f"-1 or {integer(1, 1 << 31)[1]}",
    ),
    "truncation_side": _one_of("left", "right"),
    "stream_options": (
        _are_flags,
        f"an object, in which {', '.join(_STREAM_OPTIONS)} are true or false",
    ),
}
# The fields of Sampling that a request may set, with their defaults; masks.py sets the others.
_SAMPLING = {field.name: field.default for field in fields(Sampling) if field.name in _CHECKS}
# And fields that a Request has as they are.
_SAME = "num_speculative_tokens", "fixed_k", "n", "trace", "prompt_logprobs"
_CHECKS |= (masks.CHECKS if masks else {}) | (trace.CHECKS if trace else {})
# The fields of /generate. Those of the protocols in dialects/ are translated into these.
KNOWN = frozenset(_CHECKS).union(("prompt", "drafter", "model"), *_PLUGGED.values())


def check_fields(body: Json) -> Json:
    """The fields of a body, each in range. Raises RequestError, naming the first that is not."""
    known = known_fields(body, KNOWN)
    for name, lacking in _MISSING.items():
        if known.get(name) not in (None, False, 0, "") or known.get("drafter") == name:
            raise wrong(name, f"needs {lacking}, which is not here")
    for name, (is_valid, what) in _CHECKS.items():
        if name in known and not is_valid(known[name]):
            raise wrong(name, f"must be {what}")
    if (limit := known.pop(_OTHER_LIMIT, None)) is not None:
        if known.setdefault(_LIMIT, limit) != limit:
            raise wrong(_OTHER_LIMIT, f"is another name of {_LIMIT}: send one")
    return known


# ------------------------------------------------------------------------ which model is asked
@cache
def model_id(model: str) -> str:
    """A model's name outside: a hub id as it is, of a folder or a file its last part."""
    return Path(model).resolve().name if Path(model).exists() else model


def check_model(wanted: Any, model: str) -> None:
    """Raises RequestError, a 404, if another model is wanted."""
    if wanted not in (model, model_id(model), PurePath(model).name):
        message = f"unknown model {_shown(wanted)}; this server has {model_id(model)}"
        raise RequestError(message, param="model", status=404, code="model_not_found")


def _shown(value: Any) -> str:
    """A wrong value in a message. (A dictionary's repr would sort all of its keys.)"""
    return reprlib.repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"


# ---------------------------------------------------------------------- from fields to a request
def parse_request(
    body: Json, engine: Engine, defaults: Json
) -> tuple[Request, bool, bool, list[str]]:
    """A request's fields, `defaults` filled in: (request, stream, compare, warnings).

    A null counts as absent. A max_tokens of -1 among the defaults is what the context holds.
    Raises RequestError, naming the field that is wrong.
    """
    target, known = engine.target, check_fields(body)
    check_model(known.get("model", target.name), target.name)
    if "stream_options" in known and not known.get("stream"):
        raise wrong("stream_options", "goes with stream: true")
    values = {"drafter": engine.default_drafter} | defaults | known
    sampling = _sampling(values, target.vocab_size)
    prompt, max_tokens = _read_prompt(values, target)
    if trace:
        trace.check_scores(len(prompt), values.get("prompt_logprobs"), values.get("n", 1))
    if (seed := values.get("seed")) is None:
        seed = secrets.randbits(32)  # few enough bits for every JSON parser
    _check_choices(values.get("n", 1), seed, values.get("compare", False))
    stop, logprobs = values.get("stop", ()), values.get("logprobs", False)
    request = Request(
        prompt,
        max_tokens,
        _drafter(values, engine.pool.choices),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=seed,
        sampling=sampling,
        logprobs=logprobs if not isinstance(logprobs, bool) else 0 if logprobs else None,
        returns=frozenset(name for name in (IDS, NAMES) if values.get(name)),
        **{name: values[name] for name in _SAME if name in values},
    )
    if masks:
        request = masks.masked(request, known, target)
    if formats:
        request = replace(request, grammar=formats.grammar_of(body, engine, prompt))
    notes = list[str]()
    if prediction:
        request, notes = prediction.expecting(request, known, target)
    return request, values.get("stream", False), values.get("compare", False), notes


def _sampling(values: Json, vocab_size: int) -> Sampling:
    """The Sampling of a request without masks.

    Raises RequestError for a bias of a token that is not in the vocabulary.
    """
    biases = {int(token): float(bias) for token, bias in values.get("logit_bias", {}).items()}
    if (largest := max(biases, default=0)) >= vocab_size:
        raise wrong("logit_bias", f"has token id {largest}: the largest one is {vocab_size - 1}")
    # JSON may write 1 or 1.0.
    numbers = {n: type(v)(values.get(n, v)) for n, v in _SAMPLING.items() if n != "logit_bias"}
    return Sampling(**numbers, logit_bias=tuple(biases.items()))


def _read_prompt(values: Json, target: Model) -> tuple[Any, int]:
    """The ids of a prompt, and how many tokens may follow, for which it leaves room."""
    context, most = target.max_length, values["max_tokens"]
    read = chat.chat_ids if values.get("chat") else prompt_ids
    prompt = read(values.get("prompt"), target.tokenizer, context)
    if (count := values.get("truncate_prompt_tokens")) is not None:
        if count == -1:  # the answer is left its room, but no more than half of the context
            count = context - (1 if most == -1 else min(most, context // 2))
        if count < len(prompt):
            is_right = values.get("truncation_side") == "right"
            prompt = type(prompt)(prompt[:count] if is_right else prompt[-count:])
    if most == -1:
        most = max(1, context - len(prompt))
    try:
        check_prompt(prompt, context, target.vocab_size, most)
    except ValueError as error:
        code = "context_length_exceeded" if len(prompt) >= context else None
        raise RequestError(str(error), param="prompt", code=code) from error
    return prompt, most


def _drafter(values: Json, drafters: Collection[str]) -> str | None:
    """The name of the drafter that is asked for; None for plain decoding."""
    name = values["drafter"]
    if name not in (None, *drafters, PLAIN):
        choices = ", ".join(sorted([*drafters, PLAIN]))
        why = f"there is no drafter {_shown(name)} here; choose: {choices}"
        raise RequestError(why, param="drafter")
    return None if name == PLAIN or not values.get("speculative", True) else name


def _check_choices(count: int, seed: int, compare: bool) -> None:
    """Raises RequestError for several choices together with fields that they do not go with."""
    if compare and count > 1:
        raise wrong("n", "must be 1 with compare: one text is compared")
    if seed + count > 1 << 64:
        most = f"must be at most {(1 << 64) - count} with n {count}"
        raise wrong("seed", f"{most}: choices have the seeds behind it")
