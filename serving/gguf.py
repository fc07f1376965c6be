"""GGUF files (llama.cpp's format) as models: transformers reads them, weights dequantised.

What is added here: one line for a file that cannot be read, and the splits of texts that
transformers does not know. A byte-level tokenizer first splits a text into words, and a GGUF file
has only the name of the rule for that. With another rule the model is given other tokens than it
was trained on, and nothing else tells.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from tqdm import tqdm
from transformers import GgufConfig, modeling_gguf_pytorch_utils
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from messages import in_short

# transformers shows a bar while it unpacks, also where nobody watches; None: on a terminal only.
modeling_gguf_pytorch_utils.tqdm = partial(tqdm, disable=None)

LOG = logging.getLogger("serving.loading")

# Rules beside those that transformers has. GPT-2's is the one that a byte-level tokenizer has at
# first; SmolLM's splits digits off one by one before.
_AS_GPT2 = {"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
_DIGITS_ALONE = {
    "smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b",
}  # fmt: skip


class BadFile(ValueError):
    """A GGUF file cannot be read; one line that says why."""


def is_gguf(name: str) -> bool:
    """Whether --model names a GGUF file."""
    return name.lower().endswith(".gguf")


@contextmanager
def alone(name: str) -> Iterator[dict[str, Any]]:
    """How transformers' from_pretrained is told of a file, a folder or a hub id.

    It looks for a GGUF file's bare name in the working directory first, and takes a tokenizer.json
    that lies beside it for the file's own. So it is shown a folder with nothing but a link.
    """
    if not is_gguf(name):
        yield {"pretrained_model_name_or_path": name}
        return
    with TemporaryDirectory(prefix="gguf-") as folder:
        link = Path(folder) / f"{Path(folder).name}.gguf"  # a name that is nowhere else
        link.symlink_to(Path(name).resolve())
        yield {"pretrained_model_name_or_path": folder, "gguf_file": link.name}


def check(name: str) -> None:
    """Raises BadFile if there is no such file, or it is cut off or no GGUF file."""
    path = Path(name)
    if not path.is_file():
        raise BadFile(f"model file {name} not found")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise BadFile(f"{name} is not a GGUF file (those begin with GGUF)")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever numpy says of bytes that are not there
        if "GGMLQuantizationType" in str(error):
            raise BadFile(f"{name} has weights of an unknown type: {in_short(error)}") from error
        if "reshape" in str(error):
            raise BadFile(f"{name} is damaged or cut off: a weight is not whole") from error
        raise BadFile(f"{name} is damaged or cut off: {in_short(error)}") from error
    for field in ("general.architecture", "tokenizer.ggml.model"):
        if field not in reader.fields:
            raise BadFile(f"{name} holds no language model: it has no {field}")
    if not reader.tensors:
        raise BadFile(f"{name} has no weights")


def fix_tokenizer(tokenizer: Any, name: str) -> None:
    """Give a file's tokenizer the rule that the file names; warn of a rule that is unknown."""
    fields = GGUFReader(name).fields
    if _text(fields["tokenizer.ggml.model"]) != "gpt2":
        return  # sentencepiece has no such rule
    named = fields.get("tokenizer.ggml.pre")
    rule = "none" if named is None else _text(named)
    if rule in _DIGITS_ALONE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif rule not in _AS_GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        LOG.warning(
            "%s: unknown pre-tokenizer %r: texts are split as GPT-2 does, which may give other "
            "tokens than the model knows",
            Path(name).name, rule,
        )  # fmt: skip


def as_floats(name: str) -> dict[str, Any]:
    """What makes from_pretrained unpack a GGUF file's weights; of other models nothing.

    Where it finds kernels of its own it would leave them packed, and their sums are not ours.
    """
    return {"quantization_config": GgufConfig(dequantize=True)} if is_gguf(name) else {}


def settle(model: Any, name: str) -> None:
    """Let a model whose weights were unpacked forget that they came from a GGUF file."""
    if is_gguf(name):
        model.hf_quantizer = None
        model.config._name_or_path = Path(name).stem
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config


def _text(field: Any) -> str:
    return bytes(field.parts[field.data[0]]).decode("utf-8", "replace")
