"""Choose what a cached model computes in C. The model and this machine decide.

plain blocks                       whole forwards in C (forward.py, decoder.py)
other families on a CPU            transformers' modules, their sums in C (modules.py)
attention by special code          transformers' modules and masks, linear layers in C
no compiler, another device        transformers' modules
"""

from collections.abc import Callable

import torch

from runtime.values import Model

from . import library, sampling
from .experts import pack_experts
from .forward import KernelForward, ModuleForward, Report
from .modules import Modules, attend_in_c
from .patches import pack, quantise_embedding
from .reading import decoder_of, release
from .weights import why_not_int8


def setup(quantize: str | None, device: str, is_wanted: bool) -> None:
    """Call this before weights are read. Raises ValueError where int8 is not possible.

    `is_wanted`: whether to compute in C where that is possible.
    """
    on_cpu = device == "cpu" or device == "auto" and not torch.cuda.is_available()
    library.use(on_cpu and is_wanted)
    sampling.is_wanted = is_wanted
    if quantize and (reason := why_not_int8("cpu" if on_cpu else device)):
        raise ValueError(f"--dtype int8 {reason}")


def speed_up(
    model: Model,
    quantize: str | None = None,
    check: Callable[[Model], None] | None = None,
    keeps_embedding: bool = False,
) -> None:
    """Set `compiled` of a CachedModel, if C can compute its forwards: the same results, faster.

    `quantize`: None, or "int8" or "int4", which make another model of a quarter of the bytes, or
    of an eighth. `check` compares the whole model before: after quantising, a rounding may be a
    jump, and an error would hide among the jumps. With `keeps_embedding` the embedding is not
    quantised, unless it is the output layer, too: few of its rows are read, or others share it.
    """
    if not library.is_used:
        return
    model.quantize = quantize
    if decoder := decoder_of(model.model, model.cache.max_length, model.windows, model.is_known):
        model.compiled = KernelForward(model, decoder)
        release(decoder, model.model)
        if quantize:
            if check:
                check(model)
            decoder.quantise(quantize, keeps_embedding)
        return
    early = None if check else quantize  # without a check, quantise at once
    pack(model.model, early)
    pack_experts(model.model, early)
    _run_flat(model)
    if quantize:
        if check:
            check(model)
            pack(model.model, quantize)
            pack_experts(model.model, quantize)
        if not keeps_embedding:
            quantise_embedding(model.model)


def report_of(model: Model) -> Report:
    """Report how exact a CachedModel is."""
    if model.compiled:
        return model.compiled.report()
    doubt = (
        "its layers attend by code of their own, whose sums depend on the batch"
        if library.is_used
        else "the sums of transformers' modules depend on the batch"
    )
    return Report(doubt, torch.get_num_threads(), 0.0, None, None)


def _run_flat(model: Model) -> None:
    """Let the model's texts stand side by side, if its modules do not mix them."""
    usual, forward = model.model.config._attn_implementation, ModuleForward(model, Modules(model))
    attend_in_c(model.model)
    rows = [model.cache.open_row() for _ in range(min(2, model.cache.num_rows))]
    try:
        if forward.shares(rows):
            model.compiled = forward
            return
    except (IndexError, RuntimeError, TypeError, ValueError):
        pass  # special code for attention, or another form of a batch
    finally:
        for row in rows:
            model.cache.close_row(row)
    model.model.set_attn_implementation(usual)
