"""Computes models in C, with equal bits by construction: a row's depend on that row alone.

This is the room's face: all that other rooms may use. The docstrings stand where the names are
defined, in the files below.
"""

from importlib import import_module
from typing import Any

_FILES = {
    # Before a model is loaded: whether to compute in C. Afterwards: `model.compiled`, its forward.
    "start": ("setup", "speed_up", "report_of"),
    "forward": ("KernelForward", "Report"),
    "library": ("are_used", "exclusive"),  # exclusive: torch leaves the cores to the kernels
    # Heads of drafters in C, and a draft of several tokens in one call.
    "head": (
        "KernelHead", "speed_up_head", "speed_up_blocks", "eagle_layer", "mtp_layer",
        "run_mtp_layer",
    ),
    "chain": ("draft_chain", "can_chain", "vocabulary_of"),
    # What sampling.py does, with the same bits.
    "sampling": ("can_choose", "choose", "survivors", "leaders", "confidence"),
    # Matrices in the kernels' layout, of floats or of a GGUF file's bytes.
    "weights": ("Panels", "LANES", "why_not_int8"),
    "patches": ("put_panels", "num_weights", "with_globals"),
    "experts": ("matrices_of", "put_experts"),
    # What recurrent layers do to their states.
    "recurrent": ("Rule", "convolve", "convolve_in_python", "step", "step_in_python"),
    "decoder": ("DeltaNet", "DeltaStates"),
    "reading": ("can_tabulate",),
    "rowwise": ("softplus",),
    # What transformers' modules consist of.
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
