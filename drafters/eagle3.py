"""EAGLE-3: a small head, trained for one target, that reads the target's states of three layers.

How a head drafts is told in head.py, what is in it in eagle3_head.py. Train one of your own with
demo_models/train.py, or take one of the public ones: `--eagle3 FOLDER_OR_HUB_ID`.

The head predicts words of a draft vocabulary. Its scores are laid out over the target's vocabulary
before anything is drawn from them, so that q is a distribution over the same tokens as p.

Source: arXiv 2503.01840.
"""

from typing import Any, ClassVar

from torch import Tensor

from kernels.head import KernelHead, speed_up_eagle
from messages import Model

from .base import Context
from .eagle3_head import Eagle3Head, build_head
from .head import HeadDrafter


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head, batched over requests."""

    name: ClassVar[str] = "eagle3"
    title, make_head, output = "EAGLE-3", staticmethod(build_head), "lm_head"

    def __init__(self, head: Eagle3Head, context: Context) -> None:
        text = context.target.model.config.get_text_config()
        self.hidden_layers = head.config.layers_of(text.num_hidden_layers)
        super().__init__(head, context, head.target_ids)

    def _speed_up(self, target: Model, quantize: str | None) -> list[KernelHead]:
        return speed_up_eagle(self._head, target.max_length, quantize)

    def _run(self, embeds: Tensor, hidden: Tensor, place: Any, layer: int) -> Tensor:
        """The pair j of a text stands at position j, and in the cache's slot j."""
        mask = place.mask(embeds.dtype)
        return self._head(embeds, hidden, place.positions, mask, self._caches[layer])

    def _enter(self, hidden: Tensor, step: int) -> Tensor:
        return hidden if step else self._head.enter(hidden)

    def _scores(self, outputs: Tensor) -> Tensor:
        return self._head.logits(outputs)
