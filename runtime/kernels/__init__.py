"""Computes models in C, with equal bits by construction: a row's depend on that row alone.

This is the room's face: all that other rooms may use. README.md tells how a pass runs.

    setup                        before weights are read: whether models are computed in C
    speed_up                     sets `model.compiled`, the forward of a CachedModel in C
    report_of                    whether a model's bits depend on how it is computed: a Report
    are_used, exclusive          whether kernels compute; within `exclusive` torch leaves the cores
    instructions                 the CPU instructions that the kernels are compiled for
    KernelForward                what `model.compiled` is: a call, and what it says of itself
    speed_up_head                a head's layers in C (KernelHead), by mtp_layer or eagle_layer
    speed_up_blocks              a DFlash head's layers, which look ahead
    can_chain, draft_chain       a draft of several tokens in one call, and where that can be
    vocabulary_of, FrequentWords the tokens that such a draft chooses among
    can_choose, choose, survivors, leaders
                                 what runtime/sampling.py and trees compute, with the same bits
    confidence, score_rows       probabilities, with about the bits of torch; no text hangs on them
    PackedMatrix                 a matrix in panels of so many outputs: floats, or a file's bytes
    lay_out_file, load           how a file's rows come to lie so; the compiled kernels
    put_panels, put_experts      let a module compute with panels; matrices_of names the experts'
    num_weights, why_not_int8    of a model, packed or not; why a device has no int8
    Rule, convolve, step         what recurrent layers do to their states, in C and …_in_python
    DeltaNet, DeltaStates        a gated delta net that C computes, and what a pass leaves of it
    can_tabulate, norm_of, parts_of, softplus, with_globals
                                 how transformers' modules are read, and what is put in their place

Each name's docstring, with shapes and errors, stands where it is defined.
"""

from importlib import import_module
from typing import Any

_FILES = {
    "start": ("setup", "speed_up", "report_of"),
    "forward": ("KernelForward", "Report"),
    "library": (
        "are_used", "exclusive", "instructions", "load", "lay_out_file",
    ),
    "head": (
        "KernelHead", "speed_up_head", "speed_up_blocks", "eagle_layer", "mtp_layer",
    ),
    "chain": ("draft_chain", "can_chain", "vocabulary_of"),
    "sampling": ("can_choose", "choose", "survivors", "leaders", "confidence", "score_rows"),
    "words": ("FrequentWords",),
    "weights": ("PackedMatrix", "why_not_int8"),
    "patches": ("put_panels", "num_weights", "with_globals"),
    "experts": ("matrices_of", "put_experts"),
    "recurrent": ("Rule", "convolve", "convolve_in_python", "step", "step_in_python"),
    "decoder": ("DeltaNet", "DeltaStates"),
    "reading": ("can_tabulate",),
    "rowwise": ("softplus",),
    "parts": ("norm_of", "parts_of"),
}  # fmt: skip
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}
__all__ = list(_FILE_OF)


def __getattr__(name: str) -> Any:
    """Import a name's file when the name is first asked for.

    The hub has a package of this name, too. transformers looks here for the version of that one
    while it is itself imported, and the files below need transformers.
    """
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
    return value
