"""A packed model's matrices are compared with what gguf unpacks of the file, bit by bit.

So a fault of gguf_tensors.py or of the kernels shows up, in the order of rows or in a block's bits,
before the model is served.
"""

import re
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from runtime.kernels import matrices_of

from . import StartError
from .gguf_config import config_of
from .gguf_file import Tensor
from .gguf_model import empty_model, open_model
from .gguf_tensors import Tables, unpacked

_NUM_COMPARED = 1 << 19  # weights that are compared in each of three places


def compare(model: PreTrainedModel) -> None:
    """Compare a packed model's matrices with what gguf unpacks. Raises StartError if a bit differs.

    Of each name and type, such as keys in Q4_K, the smallest matrix is taken: its first rows, some
    in the middle and the last ones. Where transformers' table moves rows, all are.
    """
    with open_model(model.path) as file, np.errstate(all="ignore"):  # numbers may be none
        empty = empty_model(file, config_of(file), torch.float32)
        tables, kinds = Tables(file, empty), dict[Any, Tensor]()
        for tensor in sorted(file.tensors.values(), key=lambda tensor: -tensor.num_bytes):
            if tables.reads(tensor.name) and len(tensor.shape) > 1:
                kinds[re.sub(r"\d+", "", tensor.name), tensor.type] = tensor
        for tensor in kinds.values():
            count, *sizes = tensor.shape
            some = max(1, min(count, _NUM_COMPARED // prod(sizes)))  # rows, or experts
            numbers = np.arange(count, dtype=np.float32)[:, None]
            if len(sizes) == 1 and not np.array_equal(tables.convert(tensor, numbers)[1], numbers):
                some = count
            for first in {0, (count - some) // 2, count - some}:
                offset = tensor.offset + tensor.num_bytes // count * first
                piece = replace(tensor, shape=(some, *sizes), offset=offset)
                weights = unpacked(file, piece, torch.float32).numpy()
                name, weights = tables.convert(tensor, weights)
                if not _is_held(model, empty, first, name, torch.from_numpy(weights)):
                    what = f"{file.name} cannot be served as it is: {tensor.name} in memory is not"
                    hint = "use --dtype bfloat16, for a draft model --no-kernels, and report this"
                    raise StartError(f"{what} what gguf unpacks ({hint})")


def _is_held(
    model: PreTrainedModel, empty: PreTrainedModel, first: int, name: str, weights: torch.Tensor
) -> bool:
    """Whether panels hold these rows, or experts, from `first` on; True if there are none."""
    owner, _, kind = name.rpartition(".")
    module = model.get_submodule(owner)
    if weights.dim() > 2:
        packed = module.matrices[matrices_of(module).index(kind)][first : first + len(weights)]
        held = torch.stack([panels.unpacked() for panels in packed])
        # Gate and up come one by one, each with zeros for the other.
        weights = weights.where(weights.any(-1, keepdim=True), held)
    elif not hasattr(module, "panels"):
        return True
    else:
        packed = [module.panels]
        weights = weights.T if isinstance(empty.get_submodule(owner), Conv1D) else weights
        held = module.panels.rows(torch.arange(first, first + len(weights)))
    weights = weights.bfloat16().float() if packed[0].form == "HALF" else weights
    return torch.equal(held.nan_to_num().view(torch.int32), weights.nan_to_num().view(torch.int32))
