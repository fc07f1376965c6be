"""Tokens of texts and back, as vLLM and llama.cpp have it on the same paths.

    POST /tokenize         vLLM: prompt or messages → count, max_model_len, tokens, token_strs
                           llama.cpp: content → tokens, or with_pieces {id, piece} of each
    POST /detokenize       tokens → the text, under both names: content and prompt
    GET /tokenizer_info    the special tokens and the chat template

A text may be longer than the context: evaluation splits documents by it.
"""

from typing import Any

from flask import Flask

from messages import Json, RequestError
from models.prompts import Tokenizer, is_text, long_texts, tokenize, tokenize_plain
from serving.fields import wrong
from serving.service import Service, read_body

from .chat import errors_name, read_chat
from .shapes import bytes_of

_FLAGS = "add_special", "parse_special", "with_pieces", "add_special_tokens", "return_token_strs"


def register_routes(app: Flask, service: Service) -> None:
    """Add the routes for the service's tokenizer."""

    @app.post("/tokenize")
    def to_tokens() -> Json:
        fields = read_body(takes_place=False)
        for name in _FLAGS:
            if not isinstance(fields.get(name), bool | None):
                raise RequestError(f"{name} must be true or false", param=name)
        tokenizer = tokenizer_of(service)
        return _for_llama_cpp(fields, tokenizer) if "content" in fields else _for_vllm(fields)

    def _for_vllm(fields: Json) -> Json:
        tokenizer, wants_texts = tokenizer_of(service), fields.pop("return_token_strs", None)
        if "messages" in fields:
            ids = ids_of_chat(service, fields)
        else:
            special = fields.get("add_special_tokens") is not False
            ids = ids_of(fields.get("prompt"), tokenizer, "prompt", has_special=special)
        texts = tokenizer.convert_ids_to_tokens(ids) if wants_texts else None
        answer = {"count": len(ids), "max_model_len": service.max_length, "tokens": ids}
        return answer | {"token_strs": texts}

    @app.post("/detokenize")
    def to_text() -> Json:
        tokenizer, ids = tokenizer_of(service), read_body(takes_place=False).get("tokens")
        text = text_of(tokenizer, check_ids(ids, len(tokenizer)))
        return {"content": text, "prompt": text}

    @app.get("/tokenizer_info")
    def tokenizer_info() -> Json:
        tokenizer = tokenizer_of(service)
        names = "bos_token", "eos_token", "unk_token", "pad_token"
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **{name: getattr(tokenizer, name, None) for name in names},
            "additional_special_tokens": list(tokenizer.all_special_tokens),
            "model_max_length": service.max_length,
            "vocab_size": len(tokenizer),
            "chat_template": tokenizer.chat_template,
        }


def tokenizer_of(service: Service) -> Tokenizer:
    """The service's tokenizer. Raises RequestError where another engine tokenises."""
    if service.tokenizer is None:
        raise RequestError("another engine tokenises here: ask it under its own address")
    return service.tokenizer


def ids_of_chat(service: Service, fields: Json) -> list[int]:
    """The prompt's ids of a request with messages, which `fields` are. Raises RequestError."""
    tokenizer_of(service)  # another engine has none
    sent = dict[str, str]()
    with errors_name(sent):
        read_chat(service, fields, sent)
    return list(fields["prompt"])


def check_ids(ids: Any, vocabulary: int) -> list[int]:
    """A list of token ids as it is. Raises RequestError for anything else, naming the first."""
    if not isinstance(ids, list):
        raise wrong("tokens", "must be a list of token ids")
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise wrong(f"tokens[{i}]", f"must be a token id from 0 to {vocabulary - 1}")
    return ids


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids, with that of special tokens."""
    with long_texts.take(len(ids)):
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def ids_of(
    text: Any, tokenizer: Tokenizer, name: str, *, has_special: bool, is_plain: bool = False
) -> list[int]:
    """The ids of a text of any length, `has_special` with those that begin a text.

    With `is_plain` texts of special tokens are text. Raises RequestError for what is no text.
    """
    if not isinstance(text, str) or (text and not is_text(text)):
        raise RequestError(f"{name} must be a text", param=name)
    if is_plain:
        begin = tokenizer("", verbose=False)["input_ids"] if has_special else []
        return begin + tokenize_plain(text, tokenizer, len(text), name)
    options = {"add_special_tokens": has_special}
    return tokenize(text, tokenizer, len(text), name, **options) if text else []


def _for_llama_cpp(fields: Json, tokenizer: Tokenizer) -> Json:
    is_plain, special = fields.get("parse_special") is False, bool(fields.get("add_special"))
    ids = ids_of(fields["content"], tokenizer, "content", has_special=special, is_plain=is_plain)
    if not fields.get("with_pieces"):
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(i, tokenizer)} for i in ids]}


def _piece(token: int, tokenizer: Tokenizer) -> str | list[int]:
    """A token's text, or the bytes of a part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return list(bytes_of(token, tokenizer)) if "\ufffd" in text else text
