"""The memory of a KV cache, the prompts that were read before, and recurrent states."""

from .prefix import PrefixCache
from .slots import Place, SlotLayer, Slots
from .states import follow_rows

__all__ = ["Place", "PrefixCache", "SlotLayer", "Slots", "follow_rows"]
