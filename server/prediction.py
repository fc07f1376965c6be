"""The text that a client expects, as OpenAI's clients send it: what it says of a request."""

from dataclasses import replace
from typing import Any

from drafters.pool import AUTO, TREE
from runtime.models.chat import joined
from runtime.models.prompts import Tokenizer, is_text, tokenize
from runtime.values import MAX_SPECULATIVE_TOKENS, PLAIN, Json, Model, Request, RequestError

from .fields import wrong

_PREDICTION = "prediction"  # the name of the field, and of its drafter


def expecting(request: Request, known: Json, target: Model) -> tuple[Request, list[str]]:
    """The request with its prediction's ids, if its drafter reads them; and warnings."""
    given, ids = known.get(_PREDICTION), ()
    if given is not None:
        ids = prediction_ids(given, target.tokenizer, target.max_length)
        ids = ids if max(ids, default=0) < target.vocab_size else ()  # the model lacks some
    if known.get("drafter") == _PREDICTION and not ids:
        raise wrong("drafter", "prediction goes with a prediction")
    request, notes = replace(request, prediction=ids), list[str]()
    if ids and request.drafter not in (AUTO, TREE, _PREDICTION):
        notes = [f"prediction was not used: the drafter is {request.drafter or PLAIN}"]
    elif ids and "num_speculative_tokens" not in known:  # long drafts pay: most tokens are right
        request = replace(request, num_speculative_tokens=MAX_SPECULATIVE_TOKENS)
    return request, notes


def prediction_ids(value: Any, tokenizer: Tokenizer, max_length: int) -> tuple[int, ...]:
    """The ids of the text that a client expects, as they would stand in the answer.

    `value` is a text, or OpenAI's {"type": "content", "content": a text, or parts of type text}.
    Raises RequestError for anything else, and for more tokens than `max_length`.
    """
    is_content = isinstance(value, dict) and value.get("type") == "content"
    text = joined(value.get("content")) if is_content else value
    if not isinstance(text, str):
        what = 'a text, or {"type": "content", "content": a text or a list of parts of type text}'
        raise wrong(_PREDICTION, f"must be {what}")
    if not text:
        return ()
    if not is_text(text):
        raise wrong(_PREDICTION, "holds a lone surrogate")
    ids = tokenize(text, tokenizer, max_length, name="prediction", add_special_tokens=False)
    if len(ids) > max_length:
        what = f"the prediction's {len(ids)} tokens are more than a context of {max_length} holds"
        raise RequestError(what, param="prediction", code="context_length_exceeded")
    return tuple(ids)
