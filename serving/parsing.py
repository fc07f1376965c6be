"""From the bytes of a request to checked values, or an error that names the field.

Strict on purpose: a field that is misspelt, out of range or not supported must never be silently
ignored. The one error body is {"error": {"message", "type", "param", "code"}}.
"""

import json
import reprlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from drafters.panel import PLAIN
from messages import Request, Sampling, in_short

if TYPE_CHECKING:
    from .options import Options


class RequestError(Exception):
    """A caller's mistake, or a state in which nothing can be served; becomes the error body."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        is_callers = self.status < 500 or self.status == 501  # which HTTP has for odd encodings
        kind = "invalid_request_error" if is_callers else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def engine_failure(error: Exception) -> RequestError:
    """What a client is told of a fault that is not its own."""
    message = f"the engine failed: {type(error).__name__}: {in_short(error)}"
    return RequestError(message, status=500, code="engine_failed")


class Turns:
    """Lets requests do long work one at a time and with pauses, so that decoding keeps its pace.

    The engine's thread needs the interpreter's lock for every operation, and each thread that wants
    it as well makes it wait for milliseconds. Work of a size up to `short` needs no turn. Other
    work begins when the work before has ended, and `pause` seconds times its size have passed. Who
    waits or works has one of the `places`, as each holds a thread of the server.
    """

    def __init__(self, what: str, short: int, pause: float, places: threading.Semaphore) -> None:
        self._what, self._short, self._pause, self._places = what, short, pause, places
        self._turn, self._next = threading.Lock(), 0.0

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait for the turn. Raises RequestError 429 where no place is free."""
        if size <= self._short:
            yield
            return
        if not self._places.acquire(blocking=False):
            raise RequestError(f"too many {self._what} at once", status=429, code="queue_full")
        try:
            with self._turn:
                time.sleep(max(0.0, self._next - time.monotonic()))
                try:
                    yield
                finally:
                    self._next = time.monotonic() + size * self._pause
        finally:
            self._places.release()


_LONG_TEXT = 20_000  # characters
_places = threading.BoundedSemaphore(8)
_large_bodies = Turns("large bodies", 32 << 10, 5e-8, _places)  # bytes; pauses of 50 ms for 1 MiB
long_texts = Turns("long prompts", _LONG_TEXT, 1e-6, _places)  # of 1 s for 1 MB


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises RequestError for anything else: broken JSON, NaN and Infinity (which Python would
    accept), bytes that are not UTF-8, nesting or integers too large for the parser, an array or a
    bare value.
    """

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        with _large_bodies.take(len(data)):
            body = json.loads(data.decode("utf-8"), parse_constant=refuse_constant)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:  # so are broken JSON, bytes that are not UTF-8, huge integers
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _integer(low: int, high: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if valid else f"must be an integer from {low} to {high}"

    return check


def _number(low: float, high: float) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        valid = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        )
        return None if valid else f"must be a number from {low} to {high}"

    return check


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else f"must be {' or '.join(choices)}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _is_text(value: Any) -> bool:
    """A string, not empty, without lone surrogates (which JSON can write, and UTF-8 cannot)."""
    try:
        return isinstance(value, str) and value.encode("utf-8") != b""
    except UnicodeEncodeError:
        return False


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_STOP_CHARACTERS and _is_text(value)


def _stops(value: Any) -> str | None:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) <= 8 and all(map(_is_stop, stops)):
        return None
    return (
        f"must be a non-empty string of at most {MAX_STOP_CHARACTERS} characters, or a list of "
        "at most 8 of them"
    )


def _logprobs(value: Any) -> str | None:
    valid = isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= 20)
    return None if valid else "must be true, false or an integer from 0 to 20"


MAX_STOP_CHARACTERS = 1000
MAX_TOKENS_LIMIT = 1_000_000
_MAX_NAMED = 16  # unknown fields that a warning names
MAX_SPECULATIVE_TOKENS = 16

# field -> what is wrong with a value, or None
_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "max_tokens": _integer(1, MAX_TOKENS_LIMIT),
    "num_speculative_tokens": _integer(0, MAX_SPECULATIVE_TOKENS),
    "speculative": _flag,
    "stream": _flag,
    "trace": _flag,
    "compare": _flag,
    "stop": _stops,
    "temperature": _number(0, 100),
    "top_k": _integer(-1, 1 << 31),
    "top_p": _number(1e-9, 1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(1e-9, 100),
    "seed": _integer(-(1 << 63), (1 << 64) - 1),
    "verification": _one_of("coupled", "rejection"),
    "logprobs": _logprobs,
}
_KNOWN = dict.fromkeys([*_CHECKS, "prompt", "drafter", "model", "stream_options"])
_REAL_NUMBERS = ("repetition_penalty", "temperature", "top_p", "min_p")
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "verification", "seed",
)  # fmt: skip


def check_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given (a null counts as absent), each in range.

    Raises RequestError, naming the first that is not.
    """
    given = {name: body[name] for name in _KNOWN if body.get(name) is not None}
    for name, check in _CHECKS.items():
        problem = check(given[name]) if name in given else None
        if problem:
            raise RequestError(f"{name} {problem}", param=name)
    return given


def model_id(model: str) -> str:
    """A model's name outside: a hub id as it is, of a folder its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _shown(value: Any) -> str:
    """A wrong value in a message. (A dictionary's repr would sort all of its keys.)"""
    return reprlib.repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"


def unknown_model(wanted: Any, model: str) -> RequestError:
    """What a request for another model is answered with."""
    message = f"unknown model {_shown(wanted)}; this server has {model_id(model)}"
    return RequestError(message, param="model", status=404, code="model_not_found")


def parse_fields(
    body: dict[str, Any],
    tokenizer: Any,
    drafters: Collection[str],
    defaults: dict[str, Any],
    model: str,
    max_length: int = 1 << 20,
) -> tuple[dict[str, Any], list[str]]:
    """Checked fields of a generate request, `defaults` filled in, and warnings about unknown ones.

    `prompt` comes back as token ids, `stop` as a tuple, `drafter` as a name or None (for "none",
    and without `speculative`), `logprobs` as a number or None, and `seed` as a number, by chance if
    none was given. A null counts as absent. Raises RequestError, naming the field.
    """
    given = check_fields(body)
    if given.get("model", model) not in (model, model_id(model), PurePath(model).name):
        raise unknown_model(given["model"], model)
    if "stream_options" in given:
        if not given.get("stream"):
            raise RequestError("stream_options goes with stream: true", param="stream_options")
        if not isinstance(given["stream_options"], dict):
            raise RequestError("stream_options must be an object", param="stream_options")
    flags = {"stream": False, "trace": False, "compare": False}
    fields = flags | defaults | {name: given[name] for name in _CHECKS if name in given}
    for name in _REAL_NUMBERS:  # which JSON may write as 1 or 1.0
        fields[name] = float(fields[name])
    fields["prompt"] = _prompt(given.get("prompt"), tokenizer, max_length)
    stop = given.get("stop", ())
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "drafter" in given:
        if not isinstance(given["drafter"], str) or given["drafter"] not in (*drafters, PLAIN):
            choices = ", ".join(sorted([*drafters, PLAIN]))
            raise RequestError(
                f"unknown drafter {_shown(given['drafter'])}; choose: {choices}", param="drafter"
            )
        fields["drafter"] = given["drafter"]
    if not fields.pop("speculative", True) or fields["drafter"] == PLAIN:
        fields["drafter"] = None
    if fields.get("seed") is None:
        fields["seed"] = secrets.randbits(32)  # few enough bits for every JSON parser
    logprobs = fields.get("logprobs", False)
    if isinstance(logprobs, bool):
        fields["logprobs"] = 0 if logprobs else None
    unknown = islice((name for name in body if name not in _KNOWN), _MAX_NAMED)
    notes = [f"unknown field {reprlib.repr(name)} was ignored" for name in unknown]
    if more := len(body) - len(body.keys() & _KNOWN.keys()) - len(notes):
        notes.append(f"{more} more unknown fields were ignored")
    return fields, notes


def parse_request(
    body: dict[str, Any], engine: Any, options: "Options"
) -> tuple[Request, bool, bool, list[str]]:
    """A request's fields, defaults filled in: (request, stream, compare, warnings).

    Raises RequestError, naming the field that is wrong.
    """
    target = engine.target
    names = (*SAMPLING_FIELDS, "num_speculative_tokens")
    defaults = {name: getattr(options, name) for name in names}
    defaults["max_tokens"] = options.max_tokens or Request.max_tokens
    defaults["drafter"] = engine.default_drafter
    given, notes = parse_fields(
        body, target.tokenizer, engine.panel.choices, defaults, target.name, target.max_length
    )
    try:
        check_prompt(given["prompt"], target)
    except ValueError as error:
        raise RequestError(str(error), param="prompt") from error
    stream, compare = given.pop("stream"), given.pop("compare")
    sampling = Sampling(**{field.name: given.pop(field.name) for field in fields(Sampling)})
    return Request(**given, sampling=sampling), stream, compare, notes


def check_prompt(prompt: list[int], target: Any) -> None:
    """Raises ValueError if a prompt is empty, leaves no room or has ids unknown to `target`."""
    length, context, largest = len(prompt), target.max_length, target.vocab_size - 1
    if not prompt:
        raise ValueError("the prompt is empty")
    if length >= context:
        raise ValueError(f"the prompt's {length} tokens leave no room in a context of {context}")
    if not all(0 <= token <= largest for token in prompt):
        raise ValueError(f"the prompt has a token id outside 0 to {largest}")


@lru_cache(1)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))  # which takes 0.1 s where there are many


def check_characters(count: int, tokenizer: Any, max_length: int) -> None:
    """Raises RequestError if a text of so many characters cannot fit `max_length` tokens."""
    # Twice, as a normaliser may shorten the text.
    if count > _LONG_TEXT and count > 2 * _longest_token(tokenizer) * max_length:
        raise RequestError(
            f"the prompt's {count} characters are more than a context of {max_length} tokens holds",
            param="prompt",
        )


def tokenize(text: str, tokenizer: Any, max_length: int, **options: Any) -> list[int]:
    """The ids of a text, which has to fit `max_length` tokens.

    Reading a text of 1 MB can take seconds. So what cannot fit is refused unread (400), and long
    ones are read one at a time: the requests of the others need the processor, too.
    """
    check_characters(len(text), tokenizer, max_length)
    with long_texts.take(len(text)):
        return tokenizer(text, verbose=False, **options)["input_ids"]


def _prompt(value: Any, tokenizer: Any, max_length: int) -> list[int]:
    if isinstance(value, str) and value:
        if not _is_text(value):
            raise RequestError("prompt holds a lone surrogate, which is not text", param="prompt")
        ids = tokenize(value, tokenizer, max_length)
        if ids:
            return ids
    elif (
        isinstance(value, list)
        and value
        # More ids than the context holds are refused for their number, whatever they are.
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value[:max_length])
    ):
        return value
    raise RequestError(
        "prompt must be a non-empty string or a non-empty list of token ids", param="prompt"
    )
