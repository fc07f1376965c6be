"""What a stranger's folder may make transformers do is bounded before it is done.

transformers takes memory for whatever a config asks for, fills what the files lack with random
numbers, converts integers to floats, and goes on without a file that it cannot read.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import get_fast_tokenizer_file
from transformers.utils import WEIGHTS_INDEX_NAME, cached_file

from runtime.values import Json

from . import StartError
from .loading import ModelOptions, explained, json_of
from .tokenizer_bounds import check_steps
from .weights import weight_files

_SOME_LAYERS, _SOME_NUMBERS = 1000, 1 << 26  # may be asked for, however few a model's files hold


class Folder:
    """A folder or a hub id of a model, with the headers of its files."""

    def __init__(self, name: str, content: Json, options: ModelOptions) -> None:
        """`content` is its config.json. Raises StartError, ValueError or OSError."""
        self._name, self._options = name, options
        files = weight_files(name, content.get("transformers_weights"))
        if options.allow_pickle and not files:
            weight_files(name, WEIGHTS_INDEX_NAME)  # which transformers would open, whatever it is
        self._tensors = headers_of(name, files, options)
        self._is_packed = "quantization_config" in content
        check_layers(name, content, max(len(self._tensors), _SOME_LAYERS))

    def check_files(self) -> None:
        """Raises StartError for a wrong generation_config.json, and for steps of its tokenizer."""
        name, options = self._name, self._options
        with explained(name, "its generation_config.json: ", options):
            check_generation_config(name)
        with explained(name, "its tokenizer: ", options):
            facts = json_of(name, "tokenizer_config.json", options)
            steps = get_fast_tokenizer_file(facts.get("fast_tokenizer_files", []))
            check_steps(json_of(name, steps, options))

    def bounds(self) -> AbstractContextManager[None]:
        """Within it transformers builds no model of many more numbers than the files hold."""
        held = sum(count for _, count in self._tensors.values())
        held = held or 1 << 60  # other files are not looked into
        return bounded(self._name, held * (16 if self._is_packed else 2) + _SOME_NUMBERS)

    def check_types(self, model: PreTrainedModel) -> None:
        """Raises StartError if files hold integers for floats: transformers would convert them."""
        if self._is_packed:
            return
        floats = {key for key, weight in model.state_dict().items() if weight.is_floating_point()}
        for key, (kind, _) in self._tensors.items():
            is_float = kind.startswith(("F", "BF"))
            if not is_float and (key in floats or key.endswith(".weight")):
                raise StartError(f"{self._name} has {kind} numbers in {key}, which must be floats")


def headers_of(name: str, files: list[str], options: ModelOptions) -> dict[str, tuple[str, int]]:
    """The tensors of a model's safetensors files, by name: their type and how many numbers.

    Raises StartError, which names the file that is broken.
    """
    tensors = dict[str, tuple[str, int]]()
    for file in files:
        with explained(name, f"{Path(file).name}: ", options), safe_open(file, "pt") as part:
            for key in part.keys():  # noqa: SIM118 (it is no dict)
                tensor = part.get_slice(key)
                tensors[key] = tensor.get_dtype(), prod(tensor.get_shape())
    return tensors


def check_layers(name: str, content: Any, most: int) -> None:
    """Raises StartError if a config asks for more layers than `most`, which transformers lists."""
    for key, value in content.items() if isinstance(content, dict) else ():
        check_layers(name, value, most)
        if key.endswith(("layer", "layers")) and isinstance(value, int) and value > most:
            raise StartError(f"{name} has too few tensors: its {key} is {value!s:.20}")


@contextmanager
def bounded(name: str, most: int) -> Iterator[None]:
    """Within it transformers builds no model of more than so many numbers. Raises StartError.

    What a file lacks it would fill with random numbers, and only then say so.
    """
    count = 0

    def note(module: nn.Module, key: str, weight: Tensor | None) -> None:
        nonlocal count
        if weight is not None and weight.is_meta:  # as it is built; those that are read come later
            count += weight.numel()
            if count > most:
                raise StartError(f"{name} has far fewer weights than its config.json asks for")

    hooks = nn.modules.module
    with hooks.register_module_parameter_registration_hook(note):
        with hooks.register_module_buffer_registration_hook(note):
            yield


def check_generation_config(name: str) -> None:
    """Raises an error if generation_config.json, which names the ends of texts, is unreadable.

    transformers would silently go on without it.
    """
    file = "generation_config.json"
    if cached_file(name, file, _raise_exceptions_for_missing_entries=False):
        end = GenerationConfig.from_pretrained(name).eos_token_id
        ends = end if isinstance(end, list) else [] if end is None else [end]
        if not all(type(token) is int for token in ends):
            raise ValueError(f"eos_token_id must be a token id or a list of them, not {end}")
