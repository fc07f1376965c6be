"""Models and tokenizers from folders or the Hugging Face hub, or one clear line why not."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import cached_file

from runtime import plug
from runtime.values import Json, Model, in_short

from . import StartError, required
from .catalogue import entry_of, likely, resolve_model
from .files import is_gguf, returned_pages, unmap_weights, why_not_loaded
from .prompts import Tokenizer, panics_caught
from .structure import Structure, UnsupportedModel, examine

LOG = logging.getLogger("loading")
PROGRESS = logging.getLogger("progress")

LONGEST_DEFAULT = 8192  # a cache for 128k tokens is for users that ask for it
_WORDS_KEPT = 1000  # by a tokenizer, which then knows their tokens; 8 KiB each where they are long

plug("runtime.models.mimo")  # then transformers knows MiMo


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded. The command line's options, server/options.py, have all this, too."""

    device: str
    allow_pickle: bool
    max_model_len: int | None
    dtype: str = "auto"
    trust_remote_code: bool = False
    is_embedded: bool = False  # whether the target is the one of this repository


@contextmanager
def explained(name: str, part: str, options: ModelOptions) -> Iterator[None]:
    """Turn whatever a part of a model fails with into a StartError."""
    try:
        with panics_caught():
            yield
    except StartError:
        raise
    except Exception as error:  # a broken folder raises any of a dozen kinds
        kind = "" if Path(name).exists() else f" (no such folder; tried as a hub id{likely(name)})"
        reason = why_not_loaded(error)
        # What is refused for safety's sake is said to be.
        if "trust_remote_code" in str(error) and not options.trust_remote_code:
            reason = "it brings code of its own, which is run with --trust-remote-code only"
        elif "file named model.safetensors" in reason and not options.allow_pickle:
            reason += " (other files can run code, and are loaded with --allow-pickle only)"
        raise StartError(f"cannot load {name}{kind}: {part}{reason}") from error


@dataclass
class Loaded:
    """What a file or a folder holds; with a length and a structure it can be served."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    report: dict[str, Any]  # what transformers tells of the weights
    fingerprint: str | None = None  # of a GGUF file that is served as it is
    # For an unpacked file: makes a copy of the model compute with the blocks of the file.
    pack_copy: Callable[[PreTrainedModel], None] | None = None
    more_ends: frozenset[int] = frozenset()  # of a text that fills a gap
    length: int = field(init=False)  # of the context
    structure: Structure = field(init=False)

    @property
    def eos_ids(self) -> set[int]:
        """The tokens that end a text."""
        ends = [self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id]
        ends += getattr(self.tokenizer, "turn_ends", ())  # of a GGUF file
        ends += self.more_ends
        return {i for end in ends for i in (end if isinstance(end, list) else [end])} - {None}


def load_pretrained(name: str, options: ModelOptions) -> Loaded:
    """The model of a name in the catalogue, a folder, a GGUF file or a hub id.

    Raises StartError if it is missing, broken or of a kind that the KV cache cannot serve.
    """
    place = resolve_model(name)
    PROGRESS.info("reading the weights of %s", Path(place).name)
    device, dtype = options.device, options.dtype if options.dtype != "int8" else "auto"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    is_known, is_file = entry_of(name) is not None, is_gguf(place)
    if dtype == "auto" and is_file and not is_known:
        dtype = "bfloat16" if device != "cpu" or options.dtype == "int8" else "packed"
    # In bf16 a verify of K + 1 rows and a step of one row round apart, so near-ties may flip.
    if dtype == "auto" and (device == "cpu" or options.is_embedded or is_known):
        dtype = "float32"
    if device == "meta":  # torch's device of tensors without numbers
        raise StartError("--device meta computes nothing")
    if dtype == "packed" and not is_file:
        raise StartError(f"--dtype packed is for GGUF files, and {name} is none")
    with explained(place, "", options):
        read = required("runtime.models.gguf_model", name).read_file if is_file else _read_folder
        loaded = read(place, dtype, options)
        check_weights(place, loaded.report)
        loaded.model = loaded.model.to(device).eval()
        # Else they change with their file. transformers' disable_mmap holds them twice for a while.
        unmap_weights(loaded.model)
    _bound_cache(loaded.tokenizer)
    if chat := plug("runtime.models.chat"):
        named = explained(place, "its chat_template: ", options)
        chat.prepare(loaded.tokenizer, named)
    if (fim := plug("runtime.models.fim")) and (tokens := fim.fim_of(loaded.tokenizer)):
        loaded.more_ends = tokens.ends
    loaded.structure = _fit(loaded.model, name, options)
    loaded.length = loaded.structure.length
    return loaded


@returned_pages()
def _read_folder(name: str, dtype: str, options: ModelOptions) -> Loaded:
    """Read a folder or a hub id. The weights come last, once all else is checked."""
    check_folder(name)
    if not Path(name).exists():
        logging.getLogger("progress.once").info("asking the Hugging Face hub for %s", name)
    trust = {"trust_remote_code": options.trust_remote_code}
    # First: a wrong id fails here, after one small file.
    content = json_of(name, "config.json", options)
    checks = plug("runtime.models.folder_checks")
    folder = checks and checks.Folder(name, content, options)
    AutoConfig.from_pretrained(name, **trust)
    if folder:
        folder.check_files()
    with explained(name, "its tokenizer: ", options):
        tokenizer = AutoTokenizer.from_pretrained(name, **trust)
    with folder.bounds() if folder else nullcontext():
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            **trust,
            dtype=dtype,
            use_safetensors=None if options.allow_pickle else True,  # None: what there is
            ignore_mismatched_sizes=True,  # the report has them, and check_weights reads it
            output_loading_info=True,
        )
    if folder:
        folder.check_types(model)
    return Loaded(model, tokenizer, report)


def check_folder(name: str) -> None:
    """Raises StartError for no model's folder, and what is not named as the hub names models."""
    if not name:
        raise StartError("the name of a model is empty")
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    if not Path(name).exists() and not is_hub_id:
        raise StartError(f"model folder {name} not found")
    if Path(name).is_file():
        raise StartError(f"{name} is a file, and no .gguf: give a model's folder")
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise StartError(f"model folder {name} has no config.json")


def json_of(name: str, file: str, options: ModelOptions) -> Json:
    """What a file of the model says; {} if there is none."""
    with explained(name, f"{file}: ", options):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        content = json.loads(Path(path).read_text("utf-8")) if path else {}
        if not isinstance(content, dict):
            raise ValueError("it must hold an object")
        return content


def check_weights(name: str, report: dict[str, Any]) -> None:
    """Raises StartError if transformers had to invent weights; says if it left some unread.

    `report` is what from_pretrained tells. Tied weights and weights for other heads, such as MTP
    layers, are not in it.
    """
    kinds = "missing_keys", "mismatched_keys", "unexpected_keys"
    missing, sizes, unread = (sorted(report[kind]) for kind in kinds)
    source, hint = ("header", " (fetch it again)") if is_gguf(name) else ("config.json", "")
    # A file that is cut off has been refused by now.
    other = " (its model is of a kind that is not read: give another file)" if hint else ""
    if missing:
        renamed = f" (not used: {len(unread)} in the file, first {unread[0]})" if unread else ""
        raise StartError(
            f"{name} lacks {len(missing)} of the weights that its {source} asks for, "
            f"first {missing[0]}{renamed}{other}"
        )
    if sizes:
        key, held, wanted = sizes[0]
        raise StartError(
            f"{name} has another size than its {source} asks for in {len(sizes)} of its weights, "
            f"first {key}: {list(held)} instead of {list(wanted)}{hint}"
        )
    if unread:
        LOG.warning("%s: not used: %d weights, first %s", name, len(unread), unread[0])


def _bound_cache(tokenizer: Tokenizer) -> None:
    """Bound the cache of a tokenizer: it keeps the first 10 000 words that it reads, for ever."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if hasattr(model, "_resize_cache"):  # tokenizers of other kinds have none
        model._resize_cache(_WORDS_KEPT)


def _fit(model: PreTrainedModel, name: str, options: ModelOptions) -> Structure:
    """What the KV cache must know of the model, for a context that suits it.

    Raises StartError if the KV cache cannot serve it.
    """
    config = model.config.get_text_config()
    title = f"{name} ({config.model_type})"
    longest = getattr(config, "max_position_embeddings", None)
    longest = LONGEST_DEFAULT if longest in (None, -1) else longest  # XLNet says -1
    if type(longest) is not int or longest < 2:
        raise StartError(f"{title}: max_position_embeddings must be 2 or more, not {longest!r:.50}")
    rope = required("runtime.models.rope", title) if _depends_on_length(model) else None
    shortest, longest = rope.contexts(model, longest) if rope else (longest, longest)
    length = options.max_model_len or min(shortest, LONGEST_DEFAULT)
    if not 2 <= length <= longest:
        raise StartError(f"--max-model-len must be from 2 to {longest} for {name}")
    try:
        structure = examine(model, length)
    except UnsupportedModel as error:
        reason = in_short(error)
        if model._is_stateful:
            reason = "has recurrent layers of a kind that is not supported yet"
        raise StartError(f"{title} {reason}") from error
    if structure.length < length and options.max_model_len:
        raise StartError(
            f"{title} attends in chunks, which is supported within the first one only: "
            f"give --max-model-len {structure.length} or less"
        )
    if rope:
        rope.fix_rotations(model, structure.length)
    return structure


def _depends_on_length(model: PreTrainedModel) -> bool:
    """Whether rotations, or scales of queries, depend on the longest text of a batch."""
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    is_scaled = any(getattr(m, "attn_temperature_tuning", False) for m in model.modules())
    return is_scaled or any("dynamic" in kind or "longrope" in kind for kind in kinds)


def prepare(model: Model, structure: Structure) -> None:
    """Get a CachedModel ready, whose modules are those of transformers.

    Raises StartError if transformers cannot run it, or a file that it needs is missing.
    """
    if reference := plug("runtime.models.reference"):
        model.reference = reference.Reference.of(model)  # before runtime/kernels/ take the weights
    kinds = {type(module).__name__ for module in model.model.modules()}
    if "GPTNeoSelfAttention" in kinds:  # which has masks of its own
        gpt_neo = required("runtime.models.gpt_neo", title_of(model))
        gpt_neo.follow_masks(model.model, model.max_length)
    if structure.is_recurrent:
        required("runtime.cache.states", title_of(model))
    if states := plug("runtime.cache.states"):
        states.follow_rows(model)  # recurrent layers have a state for each row


def check(cached: Model) -> None:
    """Compare a CachedModel with its reference, once; StartError if its logits are others.

    Then its rotations may be more exact than those of the reference.
    """
    reference, cached.reference = cached.reference, None  # it is large
    if reference:
        PROGRESS.info("checking the model: its logits are compared with those of transformers")
        reference.check(cached)
    if cached.compiled:
        cached.compiled.recompute_rope_tables()


@contextmanager
def refusal(cached: Model, is_fast: bool = False) -> Iterator[None]:
    """Turn whatever a CachedModel, which may be getting fast, fails with into a StartError."""
    try:
        yield
    except StartError:  # a sentence already
        raise
    except Exception as error:
        reason = in_short(error, has_kind=True)
        # The module may compute with a weight that lies in panels.
        hint = " (--no-kernels may help)" if is_fast or cached.compiled else ""
        raise StartError(
            f"{title_of(cached)} cannot be run with this KV cache: {reason}{hint}"
        ) from error


def title_of(cached: Model) -> str:
    """A CachedModel's name and family."""
    return f"{cached.name} ({cached.model.config.get_text_config().model_type})"
