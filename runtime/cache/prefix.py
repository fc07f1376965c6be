"""Prefix caching: a prompt that begins like an earlier one is not read from the beginning again.

Every turn of a chat repeats the ones before it, and a system prompt stands before every question.
The keys and values of texts are stored here, a block of tokens at a time:

    [block 0][block 1][block 2] the rest          a block is found by a hash of all tokens up to
                                                  its end, as its keys depend on all of them

A new prompt takes over the blocks that it shares with earlier texts, and the rest is read. Only
whole blocks are stored. Their bits are those that reading would give; where a token has the same
bits read and written (docs/exactness.md), what was generated is stored, too. So are hidden states
of the target that a drafter wants: a head drafts as if it had read the prompt along.

Rows of the KV cache are contiguous, so a hit is a copy. It takes a hundredth of the time of
reading.

Sources: vLLM's automatic prefix caching; SGLang's radix attention, arXiv 2312.07104.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from runtime.values import KeyCache, Model

_SIZE = 64  # tokens of a block


@dataclass
class _Block:
    """The keys, values and hidden states of some successive tokens."""

    buffers: list[Tensor]  # keys and values [heads, tokens, width] of each layer
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [tokens, D] by layer

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.buffers, *self.hidden.values()))


class PrefixCache:
    """Blocks of the texts that went through one KV cache; the least recently used ones go."""

    def __init__(self, cache: KeyCache, capacity_mb: int) -> None:
        """`cache` is the core's SlotCache."""
        self._cache = cache
        self.capacity_bytes, self.num_bytes = capacity_mb << 20, 0
        self.num_asked = self.num_hits = 0  # tokens of prompts
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # the next to go first

    @classmethod
    def of(cls, model: Model, capacity_mb: int) -> "PrefixCache | None":
        """For a cached model of the core; None without capacity, and where layers keep states."""
        can_keep = capacity_mb and not model.cache.recurrent
        return cls(model.cache, capacity_mb) if can_keep else None

    def length(self, row: int) -> int:
        """How many tokens the row holds."""
        return self._cache.lengths[row]

    def _keys(self, prompt: list[int]) -> list[bytes]:
        """Keys of the whole blocks of a prompt, but for that with its last token, if it is whole.

        That token has to be fed: what is wanted of a prompt is the choice behind it.
        """
        keys, digest = [], sha256()
        for end in range(_SIZE, len(prompt), _SIZE):
            digest.update(torch.tensor(prompt[end - _SIZE : end]).numpy().tobytes())
            keys.append(digest.digest())
        return keys

    @torch.inference_mode()
    def restore(
        self, row: int, prompt: list[int], layers: tuple[int, ...] = ()
    ) -> dict[int, Tensor]:
        """Let an empty row hold what is known of its prompt.

        Returns the hidden states [tokens, D] of `layers` of the tokens that the row holds now.
        Blocks that lack one of them do not count.
        """
        keys, blocks = self._keys(prompt), list[_Block]()
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.hidden.keys() >= set(layers):
                break
            blocks.append(block)
        self._touch(keys[: len(blocks)])
        self.num_asked += len(prompt)
        if not blocks:
            return {}
        count = len(blocks) * _SIZE
        place, slot = self._cache.place([row], [count]), self._cache.slot(row)
        for i, buffer in enumerate(self._cache.buffers()):
            torch.cat([block.buffers[i] for block in blocks], 1, out=buffer[slot, :, :count])
        self._cache.advance(place)
        self.num_hits += count
        return {layer: torch.cat([block.hidden[layer] for block in blocks]) for layer in layers}

    @torch.inference_mode()
    def remember(self, row: int, text: list[int], hidden: dict[int, Tensor] | None = None) -> None:
        """Copy the blocks of a text that the row holds; hidden [all of them, D] by layer."""
        slot, held = self._cache.slot(row), self._cache.lengths[row]
        assert all(len(states) == held for states in (hidden or {}).values())
        keys = self._keys(text)[: held // _SIZE]
        for i, key in enumerate(keys):
            begin, end = i * _SIZE, (i + 1) * _SIZE
            block = self._blocks.get(key)
            if block is None:
                block = _Block([b[slot, :, begin:end].clone() for b in self._cache.buffers()])
                if (i + 1) * block.num_bytes > self.capacity_bytes:
                    break
                self._blocks[key] = block
                self.num_bytes += block.num_bytes
            for layer, states in (hidden or {}).items():
                if layer not in block.hidden:
                    block.hidden[layer] = states[begin:end].clone()
                    self.num_bytes += block.hidden[layer].nbytes
        self._touch(keys)
        while self.num_bytes > self.capacity_bytes:
            _, gone = self._blocks.popitem(last=False)
            self.num_bytes -= gone.num_bytes

    def _touch(self, keys: list[bytes]) -> None:
        """Mark blocks as used. The first ones go last: without them the others are unreachable."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def as_dict(self) -> dict[str, int]:
        """For /health."""
        return {
            "num_blocks": len(self._blocks),
            "num_bytes": self.num_bytes,
            "capacity_bytes": self.capacity_bytes,
            "queried_tokens": self.num_asked,
            "hit_tokens": self.num_hits,
        }
