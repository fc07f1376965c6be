"""A GGUF file's model in transformers: unpacked to floats, or with its matrices as they are.

    open_model  ->  config_of (gguf_config.py)  ->  load_model  ->  compare (gguf_compare.py)

`read_file` does all but the last, and reads the tokenizer, too.

transformers' loader would parse the file three times, 5 s each where the vocabulary is large,
and unpack on one core, with a second copy of every tensor. Here a tensor goes from the file to its
place in pieces, on all cores. Where matrices stay as they are, all else is float32.
"""

import re
import sys
from copy import deepcopy
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.initialization import no_init_weights
from transformers.integrations.gguf import GGUF_ARCHS

from runtime import kernels
from runtime.kernels import PackedMatrix, matrices_of, put_experts, put_panels

from . import StartError
from .gguf_config import config_of, refuse_unread
from .gguf_file import BadFile, GgufFile, Tensor, Texts
from .gguf_tensors import Tables, Weights, for_all_tensors, unpacked
from .gguf_tokenizer import tokenizer_of
from .loading import LOG, Loaded, ModelOptions, explained

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(nextn\.)?")
Matrices = dict[str, PackedMatrix | list[PackedMatrix]]  # by the parameter's name
Report = dict[str, Any]  # what transformers tells of the weights: missing_keys and so on
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


def open_model(path: str) -> GgufFile:
    """A GGUF file that has a family, a vocabulary and weights. Raises BadFile."""
    ahead = sys.modules.get("runtime.models.ahead")  # else nothing was read ahead
    file = ahead.open_file(path) if ahead else GgufFile(path)
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


def why_not_packed(file: GgufFile) -> str | None:
    """Why a file's matrices cannot be computed with as they are; None if they can."""
    architecture = file.metadata["general.architecture"]
    if not kernels.are_used():
        return "the kernels are not used"
    if architecture in GGUF_ARCHS:
        return f"transformers rearranges the matrices of {architecture}"
    return None


def load_model(
    file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype | None, is_strict: bool = False
) -> tuple[PreTrainedModel, Report]:
    """The model in `dtype`, or with matrices as the file has them where that is None.

    Where the report (see check_weights) has missing or mismatched weights the model is empty.
    Raises BadFile, and StartError where it `is_strict` and one of the matrices would be unpacked.
    """
    if dtype is not None:
        file.stop()
    empty = empty_model(file, config, dtype or torch.float32)
    if file.metadata["general.architecture"] in GGUF_ARCHS:
        weights, unread = _transformed(file, empty)
        report = _report(file, empty, {n: weight.shape for n, weight in weights.items()}, unread)
        return (empty if any(report.values()) else _filled(empty, weights)), report
    tables = Tables(file, empty)
    conversions = tables.conversions(file, empty)
    shapes = {each.target: each.shape for each in conversions.values() if each.target}
    unread = {n for n, each in conversions.items() if not each.target and not tables.reads(n)}
    report = _report(file, empty, shapes, unread)
    if any(report.values()):
        return empty, report
    if dtype is None:
        without_form = [each for each in conversions.values() if each.is_matrix and not each.form]
        _note_unpacked({each.tensor.type.name for each in without_form}, file, is_strict)
    # A matrix's place is held by one zero, which looks as large: memory is for what is there.
    weights = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    matrices: Matrices = {}

    def read(tensor: Tensor) -> None:
        conversion = conversions[tensor.name]
        if conversion.target and conversion.is_matrix and dtype is None:
            matrices[conversion.target] = conversion.panels(file)
        elif conversion.target:
            weights[conversion.target] = conversion.floats(file, empty.dtype)

    for_all_tensors(read, file)
    model = _filled(empty, weights)
    if dtype is None:
        _use_panels(model, matrices)
        model.path = file.name  # compare opens it again
    return model, report


class _Meta(DeviceContext):
    """The device "meta", but for what has numbers: torch would import sympy there, for 0.2 s."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        if function in (torch.arange, torch.tensor):  # of rotations, which `_filled` computes anew
            return function(*args, **(options or {}))
        return super().__torch_function__(function, types, args, options)


def empty_model(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights. Raises BadFile if it has many more than the file."""
    _refuse_more(file, config.vocab_size * config.hidden_size)  # before rotations are made of it
    with _Meta(torch.device("meta")), no_init_weights():
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _refuse_more(file, sum(weight.numel() for weight in empty.parameters()))
    return empty


def _refuse_more(file: GgufFile, asked: int) -> None:
    """Raises BadFile if its header asks for many more weights than it has."""
    held = sum(prod(tensor.shape) for tensor in file.tensors.values())
    if asked > 2 * held:  # it would take memory for them
        raise BadFile(f"{file.name} has {held} weights, and its header asks for {asked}")


def _report(
    file: GgufFile, empty: PreTrainedModel, shapes: dict[str, tuple[int, ...]], unread: set[str]
) -> Report:
    """What from_pretrained tells of weights of these shapes by name, and of tensors not read.

    Raises BadFile if all weights are there, and tensors besides.
    """
    wanted = {name: weight.shape for name, weight in empty.state_dict().items()}
    missing = wanted.keys() - shapes.keys() - empty.all_tied_weights_keys.keys()
    sizes = {(n, shapes[n], wanted[n]) for n in wanted if shapes.get(n, wanted[n]) != wanted[n]}
    if not missing and not sizes:
        refuse_unread(file, file.tensors.keys() - unread, empty.config.num_hidden_layers)
        unread = set()
    return {"missing_keys": missing, "mismatched_keys": sizes, "unexpected_keys": unread}


@torch.no_grad()
def _filled(empty: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """The empty model itself with these weights: all that it asks for, by its names and sizes.

    transformers would look for names to convert, which takes a tenth of a start.
    """
    for module in empty.modules():
        if buffers := dict(module.named_buffers(recurse=False)):  # such as tables of rotations
            for name, buffer in buffers.items():
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
            empty._init_weights(module)
    empty.load_state_dict(weights, strict=False, assign=True)
    empty.tie_weights()
    return empty.eval()


def _transformed(file: GgufFile, empty: PreTrainedModel) -> tuple[Weights, set[str]]:
    """Weights of a family that transformers describes by transforms; names of tensors not read."""
    transforms = GGUF_ARCHS[file.metadata["general.architecture"]](empty.config)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    by_source = {source: each for each in converters for source in each.source_patterns}
    wanted, unread = empty.state_dict().keys(), set[str]()
    floats, weights = Weights(), Weights()
    converted: dict[str, WeightConverter] = {}
    for_all_tensors(lambda t: floats.update({t.name: unpacked(file, t, torch.float32)}), file)
    for name in file.tensors:
        key, source = rename_source_key(name, renamings, converters)
        if source is not None:
            converter = converted.setdefault(key, deepcopy(by_source[source]))
            converter.add_tensor(key, name, source, floats.pop(name))
        elif key in wanted:
            weights[key] = floats.pop(name).to(empty.dtype)
        else:
            unread.add(name)
    for key, converter in converted.items():
        for name, weight in converter.convert(key, model=empty, config=empty.config).items():
            weight = weight[0] if isinstance(weight, list) else weight
            weights[name] = weight.to(empty.dtype)
    return weights, unread


def _note_unpacked(types: set[str], file: GgufFile, is_strict: bool) -> None:
    """Log that weights of these types are unpacked. Raises StartError where it `is_strict`."""
    names = ", ".join(sorted(types))
    if names and is_strict:
        why = f"weights of type {names} would be unpacked (give --dtype auto)"
        raise StartError(f"{file.name} cannot be served as it is: {why}")
    if names:
        LOG.info("%s: weights of type %s are unpacked to bfloat16", file.name, names)


@torch.no_grad()
def _use_panels(model: PreTrainedModel, matrices: Matrices) -> None:
    """Have the modules compute with these in the place of their parameters, biases included."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding.weight
    mixtures = set[nn.Module]()
    for name, panels in matrices.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(panels, list):
            mixtures.add(module)
            continue
        if (bias := getattr(module, "bias", None)) is not None:
            panels.set_bias(bias)
        scale = getattr(module, "embed_scale", torch.ones(()))
        put_panels(module, panels, float(scale))
    names = {module: name for name, module in model.named_modules()}
    for module in mixtures:
        put_experts(module, [matrices[f"{names[module]}.{part}"] for part in matrices_of(module)])
    if is_tied:
        put_panels(output, embedding.panels)
        output.weight = embedding.weight


def pack_copy(path: str, model: PreTrainedModel) -> None:
    """Have a copy of a model compute with the blocks of the file that was unpacked for the model.

    Their numbers are the model's, and only inputs are rounded, so the copy drafts well. Raises
    BadFile.
    """
    with open_model(path) as file:
        packed, _ = load_model(file, config_of(file), dtype=None)
    parts = packed.named_modules()
    _use_panels(model, {f"{n}.weight": m.panels for n, m in parts if hasattr(m, "panels")})
