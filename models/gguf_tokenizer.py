"""The tokenizer of a GGUF file, made by transformers of the texts that models/gguf_file.py finds.

A byte-level tokenizer first splits a text into words, and a GGUF file has only the name of the rule
for that. With another rule the model is given other tokens than it was trained on, and nothing else
tells. So the rules that transformers does not know are here, and one that nobody knows is told of.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer, reader
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from .gguf_file import BadFile, GgufFile, Texts
from .gguf_model import read_by

LOG = logging.getLogger("loading")

# Rules beside those that transformers has. GPT-2's is the one that a byte-level tokenizer has at
# first; SmolLM's splits digits off one by one before.
_AS_GPT2 = {"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
_DIGITS_ALONE = {
    "smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b",
}  # fmt: skip
_last: list[tuple[dict[str, Any], Tokenizer]] = []  # what the last one was made of, and it


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer of an opened model: transformers', but for the rules above.

    A draft's file mostly has its target's vocabulary. Then both share what was made of it. Raises
    BadFile, or what transformers and tokenizers raise for a vocabulary without sense.
    """
    given = {key: value for key, value in file.metadata.items() if key.startswith("token")}
    for name in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        index = given.get(key, 0)
        if type(index) is not int or not 0 <= index < len(given["tokenizer.ggml.tokens"]):
            raise BadFile(f"{file.name}: {key} is {index!r:.80}, which is no token's id")
    with read_by(reader, "read_gguf_metadata", lambda *_: (file.metadata, ())):
        architecture, parts, options = get_gguf_tokenizer(file.name)
    made_of = {key: _packed(value) for key, value in given.items() if "template" not in key}
    made_of["general.architecture"] = architecture
    if not _last or _last[0][0] != made_of:
        backend, _ = convert_gguf_tokenizer(
            architecture, {name: _plain(value) for name, value in parts.items()}
        )
        if parts["tokenizer_type"] == "gpt2":  # sentencepiece has no such rule
            _split_words(backend, parts.get("pre_tokenizer_type", "none"), Path(file.name).name)
        _last[:] = [(made_of, backend)]
    # As `tokenizer_object` it would be copied, by way of JSON, in 0.5 s.
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = _last[0][1]
    tokenizer.__init__(**{name: _plain(value) for name, value in options.items()})
    return tokenizer


def _packed(value: Any) -> Any:
    """What is quickly compared, and takes little memory."""
    return value.tobytes() if isinstance(value, Texts | np.ndarray) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Texts):
        return list(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _split_words(backend: Tokenizer, rule: str, name: str) -> None:
    """Have texts split by the rule that a file names, unless transformers has seen to it."""
    if rule in _DIGITS_ALONE:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif rule not in _AS_GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        LOG.warning(
            "%s: unknown pre-tokenizer %r: texts are split as GPT-2 does, which may give other "
            "tokens than the model knows",
            name, rule,
        )  # fmt: skip
