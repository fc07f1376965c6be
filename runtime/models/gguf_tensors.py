"""What becomes of a GGUF file's tensors: their names in transformers, their numbers, their order.

    blk.0.attn_q.weight in Q4_K  ->  model.layers.0.self_attn.q_proj.weight: floats, or panels

Names, and the rows that llama.cpp has put into another order, are read from transformers' tables.
Floats are the numbers of gguf's `dequantize`, rounded once to the dtype asked for. Panels hold
a file's blocks as they are: only their order changes, and a matrix lies in memory once.

A new type of blocks goes into gguf_file.py's FORMS, once the kernels multiply it; gguf unpacks it
without that.
"""

import re
from collections.abc import Callable
from functools import cache

import gguf
import numpy as np
import torch
from torch import nn
from tqdm.contrib.concurrent import thread_map
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.pytorch_utils import Conv1D

from runtime.kernels import PackedMatrix

from .files import returned_pages
from .gguf_file import FORMS, BadFile, GgufFile, Tensor

# transformers asks for a table of names anew for each of a model's modules: 15 ms, 397 times.
gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)

MIXTURES = "qwen2moe", "qwen3moe"  # families whose experts' matrices Experts puts together
EXPERTS = re.compile(r"(blk\.\d+\.ffn_)(gate|up|down)(_exps)\.weight")
_PIECE = 1 << 18  # weights that a thread unpacks at once: what numpy makes of them stays in caches
Weights = dict[str, torch.Tensor]


def unpacked(file: GgufFile, tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's weights as floats. Raises BadFile for a type that gguf cannot unpack."""
    with returned_pages():
        weights = torch.empty(tensor.shape, dtype=dtype)
    rows = weights.view(-1, tensor.shape[-1])
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
    return weights


def for_all_tensors(work: Callable[[Tensor], None], file: GgufFile) -> None:
    """Have all cores work on a file's tensors, the largest first."""
    tensors = sorted(file.tensors.values(), key=lambda tensor: -tensor.num_bytes)
    progress = {"disable": None, "desc": "Reading weights"}
    thread_map(work, tensors, max_workers=torch.get_num_threads(), **progress)


class Tables:
    """transformers' older tables: a model's names for a file's tensors, and what changes them."""

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        kind = TENSOR_PROCESSORS.get(file.metadata["general.architecture"], TensorProcessor)
        self._processor = kind(model.config.to_dict())
        self.changes_nothing = kind is TensorProcessor
        self.names = get_gguf_hf_weights_map(model, self._processor)

    def convert(self, tensor: Tensor, weights: np.ndarray) -> tuple[str | None, np.ndarray]:
        """A tensor's name and its weights in the model; None for a tensor that it does not have.

        The gate or up of experts comes as their common matrix, of which the other half is zero.
        """
        if tensor.name.endswith("ffn_gate_inp_shexp.weight"):  # transformers adds a dimension
            weights = weights.reshape(-1)
        stored: Weights = {}  # what transformers does not return but puts here
        places = {"tensor_key_mapping": self.names, "parsed_parameters": {"tensors": stored}}
        result = self._processor.process(weights, tensor.name, **places)
        for name, values in stored.items():
            return name, values.numpy()
        return self.names.get(result.name), result.weights

    def reads(self, name: str) -> bool:
        """Whether the model has a place for a tensor, or for one expert's part of it."""
        return bool({name, name.removesuffix(".weight")} & self.names.keys())

    def conversions(
        self, file: GgufFile, model: PreTrainedModel
    ) -> "dict[str, Conversion | Experts]":
        """What becomes of each tensor in a model, by the tensor's name."""
        modules = dict(model.named_modules())
        is_mixture = file.metadata["general.architecture"] in MIXTURES
        return {
            name: Experts(tensor, self, file)
            if is_mixture and EXPERTS.fullmatch(name) and len(tensor.shape) == 3
            else Conversion(tensor, self, modules)
            for name, tensor in file.tensors.items()
        }


class Conversion:
    """What a tensor becomes: the parameter `target`, of `shape`; None for one that is not read."""

    def __init__(self, tensor: Tensor, tables: Tables, modules: dict[str, nn.Module]) -> None:
        self.tensor, self._tables = tensor, tables
        self.form: str | None = None  # of panels; None: it is unpacked
        self._order: np.ndarray | None = None  # of the file's rows, if it changes
        # transformers' code for a family is asked what it makes of the numbers of rows.
        is_flat = len(tensor.shape) == 1
        numbers = np.arange(tensor.shape[0], dtype=np.float32)
        self.target, rows = tables.convert(tensor, numbers if is_flat else numbers[:, None])
        owner, _, kind = (self.target or "").rpartition(".")
        module = modules.get(owner)
        is_linear = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        self.is_matrix = kind == "weight" and is_linear and len(tensor.shape) == 2
        self.is_transposed = self.is_matrix and isinstance(module, Conv1D)
        shape = rows.shape if is_flat else tensor.shape
        self.shape = shape[::-1] if self.is_transposed else shape
        if self.is_matrix and np.array_equal(np.sort(rows, axis=None), numbers):
            self.form = FORMS.get(tensor.type.name)
            if not np.array_equal(rows.ravel(), numbers):
                self._order = rows.ravel().astype(np.int64)

    def floats(self, file: GgufFile, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's weights as the model has them."""
        if self._tables.changes_nothing:
            return unpacked(file, self.tensor, dtype)
        # The family's code may calculate with the weights, so they are rounded thereafter.
        weights = unpacked(file, self.tensor, torch.float32).numpy()
        _, weights = self._tables.convert(self.tensor, weights)
        with returned_pages():
            return torch.tensor(weights, dtype=dtype)

    def panels(self, file: GgufFile) -> PackedMatrix:
        """The tensor's weights [outputs, inputs] in panels."""
        if self.form and self._order is not None:
            file.ahead.pop(self.tensor.name, None)  # whose order is the file's
            rows = file.read(self.tensor).reshape(len(self._order), -1)[self._order]
            return PackedMatrix(self.form, self.tensor.shape, [rows])
        if self.form:
            return PackedMatrix(self.form, self.tensor.shape, file.panels(self.tensor))
        floats = self.floats(file, torch.bfloat16)
        return PackedMatrix.of(floats.T if self.is_transposed else floats)


class Experts:
    """What a layer's tensors [experts, outputs, inputs] become: a matrix for each expert.

    An expert's gate and up are one matrix. Both are read when it is the gate's turn.
    """

    is_matrix = True

    def __init__(self, tensor: Tensor, tables: Tables, file: GgufFile) -> None:
        layer, kind, rest = EXPERTS.fullmatch(tensor.name).groups()
        self.tensor, self._parts, self.shape = tensor, [tensor], tensor.shape
        up = file.tensors.get(f"{layer}up{rest}.weight")
        if kind == "gate" and up and up.shape == tensor.shape:
            count, outputs, inputs = tensor.shape
            self._parts, self.shape = [tensor, up], (count, 2 * outputs, inputs)
        forms = {FORMS.get(part.type.name) for part in self._parts}
        self.form = forms.pop() if len(forms) == 1 else None  # None: it is unpacked
        self.target = None if kind == "up" else tables.names.get(f"{layer}{kind}{rest}")

    def floats(self, file: GgufFile, dtype: torch.dtype) -> torch.Tensor:
        """The weights of all experts [experts, outputs, inputs]."""
        parts = [unpacked(file, part, dtype) for part in self._parts]
        with returned_pages():
            return torch.cat(parts, 1)

    def panels(self, file: GgufFile) -> list[PackedMatrix]:
        """A matrix for each expert."""
        count, outputs, inputs = self.shape
        if not self.form:
            return [PackedMatrix.of(weight) for weight in self.floats(file, torch.bfloat16)]
        sizes, matrices = [part.num_bytes // count for part in self._parts], list[PackedMatrix]()
        for i in range(count):
            parts = zip(self._parts, sizes, strict=True)
            rows = np.concatenate([file.read(part, i * size, size) for part, size in parts])
            matrices.append(PackedMatrix(self.form, (outputs, inputs), [rows.reshape(outputs, -1)]))
        return matrices
