"""A model from a GGUF file, and its tokenizer."""

from functools import partial

import torch

from . import StartError
from .gguf_config import config_of
from .gguf_file import GgufFile
from .gguf_model import load_model, open_model, pack_copy, why_not_packed
from .gguf_tokenizer import tokenizer_of
from .loading import LOG, Loaded, ModelOptions, explained

opened: dict[str, GgufFile] = {}  # until they are read, so that headers are parsed once


def read_file(name: str, dtype: str, options: ModelOptions) -> Loaded:
    """Read a GGUF file, in a dtype of torch or packed."""
    with opened.pop(name, None) or open_model(name) as file:
        config = config_of(file)
        with explained(name, "its tokenizer: ", options):
            tokenizer = tokenizer_of(file)
        reason = why_not_packed(file)
        if dtype == "packed" and reason:
            if options.dtype == "packed":
                raise StartError(f"{name} cannot be served as it is: {reason} (give --dtype auto)")
            LOG.info("%s is unpacked to bfloat16: %s", name, reason)
            dtype = "bfloat16"
        is_packed = dtype == "packed"
        model, report = load_model(
            file, config, None if is_packed else getattr(torch, dtype), options.dtype == "packed"
        )
        copy = None if is_packed or reason else partial(pack_copy, file.name)
        return Loaded(model, tokenizer, report, file.fingerprint if is_packed else None, copy)
