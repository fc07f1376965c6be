"""A GGUF file's model in transformers, with its matrices as they are in the file: not unpacked.

A matrix goes from the file to the kernels' panels in pieces, on all cores, so it lies in memory
once. Its numbers are gguf's own, bit for bit; only their order changes. What llama.cpp has put into
another order, as Llama's rows of queries and keys, is put back row by row. All that is no matrix is
read as gguf_model.py reads it, in float32. `compare` looks for faults in all this.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.gguf import GGUF_ARCHS
from transformers.pytorch_utils import Conv1D

import kernels
from kernels import LANES, Panels, matrices_of, put_experts, put_panels

from . import StartError
from .gguf_config import config_of, refuse_unread
from .gguf_file import GgufFile, Tensor
from .gguf_model import Tables, all_at_once, assigned, empty_model, open_model, unpacked

LOG = logging.getLogger("loading")

FORMS = {  # the kernels' names for GGUF's types
    "F32": "FLOAT", "F16": "FLOAT16", "BF16": "HALF", "Q8_0": "Q8", "Q4_0": "Q4", "Q4_1": "Q4M",
    "Q5_0": "Q5", "Q5_1": "Q5M", "Q4_K": "Q4K", "Q5_K": "Q5K", "Q6_K": "Q6K",
}  # fmt: skip
_PIECE = 1 << 20  # bytes that are read at once
_NUM_COMPARED = 1 << 19  # weights that are compared in each of three places
_MIXTURES = "qwen2moe", "qwen3moe"  # transformers puts gate and up of an expert in one matrix
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_)(gate|up|down)(_exps)\.weight")


def why_not(file: GgufFile) -> str | None:
    """Why a file's matrices cannot be computed with as they are; None if they can."""
    architecture = file.metadata["general.architecture"]
    if not kernels.are_used():
        return "the kernels are not used"
    if architecture in GGUF_ARCHS:
        return f"transformers rearranges the matrices of {architecture}"
    is_mixture = architecture in _MIXTURES
    for name, tensor in file.tensors.items():
        size = len(tensor.shape)
        if size > 3 or size == 3 and not (is_mixture and _EXPERTS.fullmatch(name)):
            return f"{name} has three dimensions, which no matrix of {architecture} has here"
    return None


def load_packed(
    file: GgufFile, config: PreTrainedConfig, is_strict: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and what transformers tells of its weights.

    Raises BadFile, and StartError where it `is_strict` and a matrix would be unpacked.
    """
    empty = empty_model(file, config, torch.float32)
    tables, modules = Tables(file, empty), dict(empty.named_modules())
    plans: dict[str, _Plan | _Experts] = {
        name: _Experts(tensor, tables, file)
        if len(tensor.shape) > 2
        else _Plan(tensor, tables, modules)
        for name, tensor in file.tensors.items()
    }
    shapes = {plan.target: plan.shape for plan in plans.values() if plan.target}
    wanted = {name: weight.shape for name, weight in empty.state_dict().items()}
    missing = wanted.keys() - shapes.keys() - empty.all_tied_weights_keys.keys()
    sizes = {(n, shapes[n], wanted[n]) for n in wanted if shapes.get(n, wanted[n]) != wanted[n]}
    unread = {n for n, p in plans.items() if p.target not in wanted and not tables.reads(n)}
    report = {"missing_keys": missing, "mismatched_keys": sizes, "unexpected_keys": unread}
    if missing or sizes:
        return empty, report
    refuse_unread(file, file.tensors.keys() - unread, config.num_hidden_layers)
    report["unexpected_keys"] = ()
    # A matrix's place is held by one zero, which looks as large: memory is for what is there.
    weights = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    _tell_of([p for p in plans.values() if p.owner and not p.form], file, is_strict)
    packed: dict[str, Panels] = {}
    experts: dict[str, list[Panels]] = {}  # by the parameter that they stand for

    def read(tensor: Tensor) -> None:
        plan = plans[tensor.name]
        if isinstance(plan, _Experts):
            if plan.target in wanted:
                experts[plan.target] = plan.panels(file)
        elif plan.owner:
            packed[plan.owner] = plan.panels(file)
        elif plan.target in wanted:
            weights[plan.target] = torch.from_numpy(plan.floats(file)).contiguous()

    all_at_once(read, file)
    model = assigned(empty, weights)
    _put(model, packed)
    for name in {name.rpartition(".")[0] for name in experts}:
        part = model.get_submodule(name)
        put_experts(part, [experts[f"{name}.{matrix}"] for matrix in matrices_of(part)])
    model.fingerprint, model.path = file.fingerprint, file.name
    return model, report


def _tell_of(unpacked: "list[_Plan | _Experts]", file: GgufFile, is_strict: bool) -> None:
    """Say which types are unpacked. Raises StartError where it `is_strict`."""
    types = ", ".join(sorted({plan.tensor.type.name for plan in unpacked}))
    if types and is_strict:
        why = f"weights of type {types} would be unpacked (give --dtype auto)"
        raise StartError(f"{file.name} cannot be served as it is: {why}")
    if types:
        LOG.info("%s: weights of type %s are unpacked to bfloat16", file.name, types)


def compare(model: PreTrainedModel) -> None:
    """Compare a packed model's matrices with what gguf unpacks. Raises StartError if a bit differs.

    Of each name and type, such as keys in Q4_K, the smallest matrix is taken: its first rows, some
    in the middle and the last ones. Where transformers' own table moves rows, all are.
    """
    with open_model(model.path) as file, np.errstate(all="ignore"):  # numbers may be none
        empty = empty_model(file, config_of(file), torch.float32)
        tables, kinds = Tables(file, empty), dict[Any, Tensor]()
        for tensor in sorted(file.tensors.values(), key=lambda tensor: -tensor.num_bytes):
            names = {tensor.name, tensor.name.removesuffix(".weight")} & tables.names.keys()
            if names and len(tensor.shape) > 1:
                kinds[re.sub(r"\d+", "", tensor.name), tensor.type] = tensor
        for tensor in kinds.values():
            count, *sizes = tensor.shape
            some = max(1, min(count, _NUM_COMPARED // prod(sizes)))  # rows, or experts
            numbers = np.arange(count, dtype=np.float32)[:, None]
            if len(sizes) == 1 and not np.array_equal(tables.alone(tensor, numbers)[1], numbers):
                some = count
            for first in {0, (count - some) // 2, count - some}:
                offset = tensor.offset + tensor.num_bytes // count * first
                piece = replace(tensor, shape=(some, *sizes), offset=offset)
                found = tables.alone(tensor, unpacked(file, piece, torch.float32).numpy())
                if not _is_held(model, empty, first, *found):
                    what = f"{file.name} cannot be served as it is: {tensor.name} in memory is not"
                    hint = "use --dtype bfloat16, for a draft model --no-kernels, and report this"
                    raise StartError(f"{what} what gguf unpacks ({hint})")


def _is_held(
    model: PreTrainedModel, empty: PreTrainedModel, first: int, name: str, weights: np.ndarray
) -> bool:
    """Whether panels hold these rows, or experts, from `first` on; True if there are none."""
    (owner, _, kind), found = name.rpartition("."), torch.from_numpy(weights)
    module = model.get_submodule(owner)
    if found.dim() > 2:
        packed = module.matrices[matrices_of(module).index(kind)][first : first + len(found)]
        held = torch.stack([panels.unpacked() for panels in packed])
        found = found.where(found.any(-1, keepdim=True), held)  # gate and up come one by one
    elif not hasattr(module, "panels"):
        return True
    else:
        packed = [module.panels]
        found = found.T if isinstance(empty.get_submodule(owner), Conv1D) else found
        held = module.panels.rows(torch.arange(first, first + len(found)))
    found = found.bfloat16().float() if packed[0].form == "HALF" else found
    return torch.equal(held.nan_to_num().view(torch.int32), found.nan_to_num().view(torch.int32))


def pack_copy(path: str, model: PreTrainedModel) -> None:
    """Have a copy of a model compute with the blocks of the file that was unpacked for the model.

    Their numbers are the model's own, and only inputs are rounded, so the copy drafts well. Raises
    BadFile.
    """
    with open_model(path) as file:
        packed, _ = load_packed(file, config_of(file))
    parts = packed.named_modules()
    _put(model, {name: part.panels for name, part in parts if hasattr(part, "panels")})


class _Plan:
    """What becomes of a tensor."""

    def __init__(self, tensor: Tensor, tables: Tables, modules: dict[str, nn.Module]) -> None:
        self.tensor, self._tables = tensor, tables
        self.owner: str | None = None  # the module whose matrix it is, if it is one
        self.form: str | None = None  # of panels; None: it is unpacked
        self._order: np.ndarray | None = None  # of the file's rows, if it changes
        # transformers' code for a family is asked what it makes of the numbers of rows.
        numbers = np.arange(tensor.shape[0], dtype=np.float32)
        if len(tensor.shape) == 2:
            numbers = numbers[:, None]
        self.target, found = tables.alone(tensor, numbers)
        owner, _, kind = (self.target or "").rpartition(".")
        module = modules.get(owner)
        is_linear = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        is_matrix = kind == "weight" and is_linear and len(tensor.shape) == 2
        self.is_transposed = is_matrix and isinstance(module, Conv1D)
        shape = tensor.shape if len(tensor.shape) == 2 else found.shape
        self.shape = shape[::-1] if self.is_transposed else shape
        if not is_matrix:
            return
        self.owner, rows = owner, found.ravel()
        if found.size == tensor.shape[0] and np.array_equal(np.sort(rows), numbers.ravel()):
            self.form = FORMS.get(tensor.type.name)
            if not np.array_equal(rows, numbers.ravel()):
                self._order = rows.astype(np.int64)

    def floats(self, file: GgufFile) -> np.ndarray:
        """Its weights in float32."""
        weights = unpacked(file, self.tensor, torch.float32).numpy()
        return self._tables.alone(self.tensor, weights)[1]

    def panels(self, file: GgufFile) -> Panels:
        """Its weights [outputs, inputs] in panels."""
        if self.form:
            return Panels(self.form, self.tensor.shape, self._pieces(file))
        floats = torch.from_numpy(self.floats(file))
        return Panels.of((floats.T if self.is_transposed else floats).to(torch.bfloat16))

    def _pieces(self, file: GgufFile) -> Iterator[np.ndarray]:
        """Rows as they are in the file, in transformers' order."""
        tensor, count = self.tensor, self.tensor.shape[0]
        if self._order is not None:
            yield file.read(tensor).reshape(count, -1)[self._order]
            return
        step = max(1, _PIECE // (tensor.row_bytes * LANES)) * LANES
        for begin in range(0, count, step):
            rows = min(step, count - begin)
            piece = file.read(tensor, begin * tensor.row_bytes, rows * tensor.row_bytes)
            yield piece.reshape(rows, -1)


class _Experts:
    """What becomes of a layer's tensors [experts, outputs, inputs]: a matrix for each expert.

    An expert's gate and up are one matrix. Both are read when it is the gate's turn.
    """

    def __init__(self, tensor: Tensor, tables: Tables, file: GgufFile) -> None:
        layer, kind, rest = _EXPERTS.fullmatch(tensor.name).groups()
        self.tensor, self._parts, self.shape = tensor, [tensor], tensor.shape
        up = file.tensors.get(f"{layer}up{rest}.weight")
        if kind == "gate" and up and up.shape == tensor.shape:
            count, outputs, inputs = tensor.shape
            self._parts, self.shape = [tensor, up], (count, 2 * outputs, inputs)
        forms = {FORMS.get(part.type.name) for part in self._parts}
        self.form = forms.pop() if len(forms) == 1 else None  # None: it is unpacked
        name = tables.names.get(f"{layer}{kind}{rest}")
        self.owner = self.target = None if kind == "up" else name

    def panels(self, file: GgufFile) -> list[Panels]:
        """A matrix for each expert."""
        count, outputs, inputs = self.shape
        if not self.form:
            floats = [unpacked(file, part, torch.bfloat16) for part in self._parts]
            return [Panels.of(own) for own in torch.cat(floats, 1)]
        sizes, found = [part.num_bytes // count for part in self._parts], list[Panels]()
        for i in range(count):
            parts = zip(self._parts, sizes, strict=True)
            rows = np.concatenate([file.read(part, i * size, size) for part, size in parts])
            found.append(Panels(self.form, (outputs, inputs), [rows.reshape(outputs, -1)]))
        return found


@torch.no_grad()
def _put(model: PreTrainedModel, packed: dict[str, Panels]) -> None:
    """Have the modules compute with panels, biases included."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding.weight
    for name, panels in packed.items():
        module = model.get_submodule(name)
        bias = getattr(module, "bias", None)
        if bias is not None:
            panels.set_bias(bias)
        scale = getattr(module, "embed_scale", torch.ones(()))
        put_panels(module, panels, float(scale))
    if is_tied:
        put_panels(output, embedding.panels)
        output.weight = embedding.weight
