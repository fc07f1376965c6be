"""The memory of a KV cache, recurrent states, prompts that are read and that were read before."""

from .prefix import PrefixCache
from .reading import Reading
from .slots import Placement, SlotLayer, Slots, run_modules
from .states import follow_rows

__all__ = [
    "Placement", "PrefixCache", "Reading", "SlotLayer", "Slots", "follow_rows", "run_modules",
]  # fmt: skip
