"""The target drafts for itself, with smaller weights: a draft model that every target has.

    KV cache (the target's)    The cat │ sat
    the copy drafts            The cat │ sat on a        reads the target's keys, writes after them
    truncated again            The cat │
    the target verifies        The cat │ sat on the      its pass writes its keys there

Linear layers of the copy have weights of eight bits (kernels/weights.py): a quarter of float32's
bytes, or half of bfloat16's. It mostly chooses as the target does. Where a GGUF file was unpacked
for the target, the copy has the blocks of the file: the target's numbers in fewer bytes still. All
else is shared with the target: embedding, norms and KV cache. So the copy reads no prompt.

Not covered: mixtures of experts, whose experts would stay floats.
"""

from copy import copy, deepcopy
from typing import ClassVar

import torch

from runtime.kernels import speed_up, why_not_int8
from runtime.sampling import Noise
from runtime.values import Draft, Model, Sampling, Verdict

from .base import MANY_WEIGHTS, Context, ModelState
from .draft_model import DraftModelDrafter
from .plan import DraftedText


class SelfInt8Drafter(DraftModelDrafter):
    """Runs a smaller copy of the target on the KV cache of the target."""

    name: ClassVar[str] = "self_int8"
    rank = 3
    is_costly = True
    is_copy = True

    @classmethod
    def build(cls, context: Context) -> "SelfInt8Drafter":
        """Raises ValueError where int8 cannot be had, or gains nothing and was not asked for."""
        target = context.target
        if reason := why_not_int8(target.model.device.type):
            raise ValueError(f"the drafter self_int8 {reason}")
        unfit = {
            "an int8 target": context.quantize,
            "a mixture of experts": target.has_experts,
            "packed weights, which are as small as its own (--dtype bfloat16 unpacks them)":
                target.fingerprint,
            "recurrent layers": target.cache.recurrent,
        }  # fmt: skip
        for what, is_so in unfit.items():
            if is_so:
                raise ValueError(f"the drafter self_int8 does not go with {what}")
        if context.wanted != cls.name and target.num_weights < MANY_WEIGHTS:
            raise ValueError(f"{target.name} is too small to gain by self_int8")
        return cls(context)

    def __init__(self, context: Context) -> None:
        super().__init__(context, smaller_copy(context.target))
        self._target = context.target
        # A step reads fewer bytes: that part of what a pass reads (drafters/auto/estimates.py).
        num_bytes = fast.num_bytes if (fast := self._draft.compiled) else self.num_step_weights
        self.num_step_weights = num_bytes // context.target.model.dtype.itemsize

    def open(self, prompt: list[int], sampling: Sampling, noise: Noise) -> ModelState:
        ours, theirs = self._draft.compiled, self._target.compiled
        if ours.is_compiled and theirs.is_compiled:  # as the target is by now
            ours.decoder.share_embedding(theirs.decoder)
        return ModelState(text=list(prompt), sampling=sampling, noise=noise)

    def attach(self, state: ModelState, text: DraftedText) -> None:
        state.row = text.row

    def propose_batch(self, states: list[ModelState], max_tokens: list[int]) -> list[Draft]:
        """A draft for each state; afterwards the rows of the target's cache are as before."""
        cache = self._draft.cache
        lengths = [cache.lengths[state.row] for state in states]
        try:
            return super().propose_batch(states, max_tokens)
        except Exception:
            for state, length in zip(states, lengths, strict=True):
                self._clear(state.row, length, length + max(max_tokens))
            raise
        finally:
            for state, length in zip(states, lengths, strict=True):
                cache.truncate(state.row, length)

    @torch.inference_mode()
    def _clear(self, row: int, begin: int, end: int) -> None:
        """Zero what a draft that failed has written: a NaN would spoil the target's attention."""
        cache, slot = self._draft.cache, self._draft.cache.slot(row)
        for buffer in cache.buffers():
            buffer[slot, :, begin:end] = 0

    def observe(self, state: ModelState, verdict: Verdict) -> None:
        """The engine truncates."""
        state.text.extend(verdict.tokens)

    def close(self, state: ModelState) -> None:
        """The row is the engine's."""


def smaller_copy(target: Model) -> Model:
    """A copy of a cached model with smaller linear layers; all else is shared with the target."""
    twin, model = copy(target), target.model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin.model, twin.reference = deepcopy(model, shared), None
    if target.pack_copy:
        target.pack_copy(twin.model)
    speed_up(twin, None if target.pack_copy else "int8", keeps_embedding=True)
    if twin.compiled:
        twin.compiled.recompute_rope_tables()
    return twin
