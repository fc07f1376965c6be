"""Models and tokenizers from folders or the Hugging Face hub, or one clear line why not."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .options import Options
from .parsing import in_short

LONGEST_DEFAULT = 8192  # a cache for 128k tokens is for those who ask for it


class StartError(Exception):
    """What the command line asks for cannot be had; one line that says what to do."""


def _reason(error: Exception, options: Options) -> str:
    """Why a model could not be loaded; what is refused for safety's sake is said to be."""
    reason = in_short(error)
    if "trust_remote_code" in str(error) and not options.trust_remote_code:
        return "it brings code of its own, which is run with --trust-remote-code only"
    if "safetensors" in reason and not options.allow_pickle:
        reason += " (other files can run code, and are loaded with --allow-pickle only)"
    return reason


def load_pretrained(name: str, options: Options) -> tuple[Any, Any, int]:
    """(model, tokenizer, context length) of a folder or a hub id.

    Raises StartError if it is missing, broken or of a kind that the KV cache cannot serve.
    """
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    # In bf16 a verify of K + 1 rows and a step of one row round apart, so near-ties may flip.
    if dtype == "auto" and (device == "cpu" or options.is_embedded):
        dtype = "float32"
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    if not Path(name).exists() and not is_hub_id:
        raise StartError(f"model folder {name} not found")
    try:
        # First: a wrong id fails here, after one small file.
        AutoConfig.from_pretrained(name, trust_remote_code=options.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=options.trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            trust_remote_code=options.trust_remote_code,
            use_safetensors=None if options.allow_pickle else True,  # None: what there is
        )
        model = model.to(device).eval()
    except Exception as error:  # a broken folder raises any of a dozen kinds
        kind = "" if Path(name).exists() else " (no such folder; tried as a hub id)"
        raise StartError(f"cannot load {name}{kind}: {_reason(error, options)}") from error
    config = model.config.get_text_config()
    if model._is_stateful:
        raise StartError(f"{name} ({config.model_type}) has recurrent layers, not supported yet")
    # ALiBi's position bias cannot be given as a 4-D mask.
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise StartError(f"{name} ({config.model_type}) uses ALiBi, which is not supported")
    longest = getattr(config, "max_position_embeddings", None) or LONGEST_DEFAULT
    length = options.max_model_len or min(longest, LONGEST_DEFAULT)
    if not 2 <= length <= longest:
        raise StartError(f"--max-model-len must be from 2 to {longest} for {name}")
    return model, tokenizer, length
