"""A GGUF file's model in transformers: its config, and its weights unpacked to floats.

What a family calls its numbers and tensors, and which rows llama.cpp has put into another order, is
read from transformers' tables. transformers' own loader would parse the file three times for them,
5 s each where the vocabulary is large, and unpack on one core, with a second copy of every tensor.

Weights are the numbers of gguf's own `dequantize`, rounded once to the dtype asked for.
"""

import re
import threading
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from math import prod
from typing import Any

import gguf
import numpy as np
import torch
from tqdm.contrib.concurrent import thread_map
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.integrations.gguf import GGUF_ARCHS
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from .files import own_pages
from .gguf_config import refuse_unread
from .gguf_file import BadFile, GgufFile, Tensor, Texts

# transformers asks for a table of names anew for each of a model's modules: 15 ms, 397 times.
gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)

_PIECE = 1 << 18  # weights that a thread unpacks at once: what numpy makes of them stays in caches
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(nextn\.)?")
Weights = dict[str, torch.Tensor]


def open_model(path: str) -> GgufFile:
    """A GGUF file that has a family, a vocabulary and weights. Raises BadFile."""
    file = GgufFile(path)
    if lacking := _what_it_lacks(file):
        file.close()
        raise BadFile(f"{path} {lacking}")
    return file


def _what_it_lacks(file: GgufFile) -> str | None:
    vocabulary = {"tokenizer.ggml.model": str, "tokenizer.ggml.tokens": Texts}
    for key, kind in {"general.architecture": str, **vocabulary}.items():
        if not isinstance(file.metadata.get(key), kind):
            return f"holds no language model: it has no {key}"
    if not file.tensors:
        return "has no weights"
    architecture = file.metadata["general.architecture"]
    sizes = "embedding_length", "attention.head_count", "attention.head_count_kv"
    for name in () if architecture.startswith(("mamba", "rwkv")) else sizes:  # those have no heads
        value = file.metadata.get(key := f"{architecture}.{name}")
        if type(value) is int and value < 1:
            return f"says that {key!r:.80} is {value} (fetch it again)"
    key = f"{architecture}.block_count"
    layers = file.metadata.get(key, len(file.tensors))
    if type(layers) is not int or not 0 < layers <= len(file.tensors):
        return f"has {len(file.tensors)} tensors, and {key!r:.80} is {layers!r:.80}"
    blocks = [block for block in map(_BLOCK.match, file.tensors) if block]
    heads = {int(block[1]) for block in blocks if block[2]}  # for MTP, behind the layers
    last = max({int(block[1]) for block in blocks} - heads, default=0)
    if last >= layers:  # what no layer takes would be left out without a word
        return f"has weights of block {last}, and {key!r:.80} is {layers} (fetch it again)"
    return None


def load_model(
    file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in `dtype`, and what transformers tells of its weights (see check_weights)."""
    empty = empty_model(file, config, dtype)
    collect = _by_transforms if file.metadata["general.architecture"] in GGUF_ARCHS else _by_tables
    weights, was_read = collect(file, empty, dtype)
    refuse_unread(file, was_read, config.num_hidden_layers)
    return filled(empty, weights)


def empty_model(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights. Raises BadFile if it has many more than the file."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
    asked = sum(weight.numel() for weight in empty.parameters())
    held = sum(prod(tensor.shape) for tensor in file.tensors.values())
    if asked > 2 * held:  # transformers would make the others up, and take memory for them
        raise BadFile(f"{file.name} has {held} weights, and its header asks for {asked}")
    return empty


def filled(empty: PreTrainedModel, weights: Weights) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model like the empty one with these weights, and what transformers tells of them."""
    name, dtype = empty.config._name_or_path, empty.dtype
    model, report = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict=weights,
        dtype=dtype,
        ignore_mismatched_sizes=True,  # the report has them
        output_loading_info=True,
    )
    model.config._name_or_path = name
    return model, report


def assigned(empty: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """The empty model itself with these weights: all that it asks for, by its names and sizes.

    transformers would look for names to convert, which takes a tenth of a start.
    """
    decoder = empty.get_decoder()
    if rotary := getattr(decoder, "rotary_emb", None):
        decoder.rotary_emb = type(rotary)(empty.config)  # its tables are no weights
    if any(buffer.is_meta for buffer in empty.buffers()):
        return filled(empty, weights)[0]
    empty.load_state_dict(weights, strict=False, assign=True)
    empty.tie_weights()
    return empty.eval()


class Tables:
    """transformers' older tables: a model's names for a file's tensors, and what changes them."""

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        kind = TENSOR_PROCESSORS.get(file.metadata["general.architecture"], TensorProcessor)
        self._processor = kind(model.config.to_dict())
        self.changes_nothing = kind is TensorProcessor
        self.names = get_gguf_hf_weights_map(model, self._processor)

    def process(
        self, tensor: Tensor, weights: np.ndarray, collected: Weights
    ) -> tuple[str | None, np.ndarray]:
        """The model's name and weights for a tensor; None for one that it has not, or `collected`.

        Experts' tensors are put together in there.
        """
        if tensor.name.endswith("ffn_gate_inp_shexp.weight"):  # transformers adds a dimension
            weights = weights.reshape(-1)
        given = {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": collected}}
        found = self._processor.process(weights, tensor.name, **given)
        return self.names.get(found.name), found.weights

    def reads(self, name: str) -> bool:
        """Whether the model has a place for a tensor, or for one expert's part of it."""
        return bool({name, name.removesuffix(".weight")} & self.names.keys())

    def alone(self, tensor: Tensor, weights: np.ndarray) -> tuple[str | None, np.ndarray]:
        """The same of one tensor: experts' lie in what is zero else."""
        kept: dict[str, torch.Tensor] = {}
        found = self.process(tensor, weights, kept)
        return next(((name, own.numpy()) for name, own in kept.items()), found)


def _by_tables(
    file: GgufFile, model: PreTrainedModel, dtype: torch.dtype
) -> tuple[Weights, list[str]]:
    """Weights under the model's names, by transformers' older tables; names of tensors read."""
    tables, turn = Tables(file, model), threading.Lock()
    collected: Weights = {}

    def collect(tensor: Tensor) -> None:
        if tables.changes_nothing:
            if tensor.name in tables.names:
                collected[tables.names[tensor.name]] = unpacked(file, tensor, dtype)
            return
        # Others may calculate with the weights, so they are rounded thereafter.
        weights = unpacked(file, tensor, torch.float32).numpy()
        with turn:
            name, weights = tables.process(tensor, weights, collected)
        if name:
            with own_pages():
                collected[name] = torch.tensor(weights, dtype=dtype)

    all_at_once(collect, file)
    return collected, [name for name in file.tensors if tables.reads(name)]


def _by_transforms(
    file: GgufFile, model: PreTrainedModel, dtype: torch.dtype
) -> tuple[Weights, list[str]]:
    """What `_by_tables` returns, for families that transformers describes by transforms."""
    transforms = GGUF_ARCHS[file.metadata["general.architecture"]](model.config)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    by_source = {source: each for each in converters for source in each.source_patterns}
    collected: Weights = {}
    converted: dict[str, WeightConverter] = {}
    wanted, was_read = model.state_dict().keys(), list[str]()
    floats: Weights = {}
    all_at_once(lambda t: floats.update({t.name: unpacked(file, t, torch.float32)}), file)
    for name in file.tensors:
        key, source = rename_source_key(name, renamings, converters)
        if source is not None or key in wanted:
            was_read.append(name)
        if source is None:
            collected[key] = floats.pop(name).to(dtype)
        else:
            converter = converted.setdefault(key, deepcopy(by_source[source]))
            converter.add_tensor(key, name, source, floats.pop(name))
    for key, converter in converted.items():
        for name, given in converter.convert(key, model=model, config=model.config).items():
            collected[name] = (given[0] if isinstance(given, list) else given).to(dtype)
    return collected, was_read


def unpacked(file: GgufFile, tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's weights as floats. Raises BadFile for a type that gguf cannot unpack."""
    with own_pages():
        given = torch.empty(tensor.shape, dtype=dtype)
    rows = given.view(-1, tensor.shape[-1])
    step = max(1, _PIECE // tensor.shape[-1])
    for begin in range(0, len(rows), step):
        piece = rows[begin : begin + step]
        packed = file.read(tensor, begin * tensor.row_bytes, len(piece) * tensor.row_bytes)
        try:
            # As one row of many blocks: gguf takes only 16 rows at a time.
            floats = gguf.dequantize(packed[None], tensor.type)
        except NotImplementedError as error:
            why = f"weights that cannot be unpacked: {tensor.type.name} (give another file)"
            raise BadFile(f"{file.name} has {why}") from error
        piece.copy_(torch.from_numpy(floats).view(piece.shape))
    return given


def all_at_once(work: Callable[[Tensor], None], file: GgufFile) -> None:
    """Have all cores work on a file's tensors, the largest first."""
    tensors = sorted(file.tensors.values(), key=lambda tensor: -tensor.num_bytes)
    told = {"disable": None, "desc": "Reading weights"}
    thread_map(work, tensors, max_workers=torch.get_num_threads(), **told)
