"""The memory of a KV cache, recurrent states, prompts that are read and that were read before."""

from .reading import Reading
from .slots import Placement, SlotLayer, Slots, run_modules

__all__ = [
    "Placement", "Reading", "SlotLayer", "Slots", "run_modules",
]  # fmt: skip
