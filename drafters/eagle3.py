"""EAGLE-3: a small head, trained for one target, that reads the target's states of three layers.

How a head drafts is told in head.py, what is in it in eagle3_head.py. Train one of your own with
demo_models/train.py, or take one of the public ones: `--eagle3 FOLDER_OR_HUB_ID`.

The head predicts words of a draft vocabulary. Its scores are laid out over the target's vocabulary
before anything is drawn from them, so that q is a distribution over the same tokens as p.

Source: arXiv 2503.01840.
"""

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kernels import library
from kernels.chain import Vocabulary
from kernels.files import check_sizes, own_weights, reading
from kernels.head import eagle_layer, speed_up_head
from messages import Model

from .base import Context
from .eagle3_head import Eagle3Head, HeadConfig, build_head, read_head
from .head import HeadDrafter, spread


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head, batched over requests."""

    name: ClassVar[str] = "eagle3"
    # Of weights in C: they are read once for each token drafted, and proposals need no exactness.
    kept_as: ClassVar[str | None] = "int8"

    def __init__(self, head: Eagle3Head, context: Context) -> None:
        self._head, self._target_ids = head, head.target_ids
        text = context.target.model.config.get_text_config()
        self._vocab_size = context.target.vocab_size
        self.hidden_layers = head.config.layers_of(text.num_hidden_layers)
        weights = [*head.layers.parameters(), *head.lm_head.parameters()]
        self.num_step_weights = sum(weight.numel() for weight in weights)
        super().__init__(context)
        if context.fast:
            length = context.target.max_length
            quantize = self.kept_as if library.is_used else context.quantize
            self._kernels = speed_up_head(head, eagle_layer, length, quantize)
            words = Vocabulary.of(self._vocab_size, self._target_ids)
            self._ends = (head.embed_tokens, head.lm_head, words)
        self._embed = head.embed_tokens

    @classmethod
    def build(cls, context: Context) -> "Eagle3Drafter":
        """Raises ValueError without a head, or with one of another target."""
        name, target = context.eagle3, context.target
        if name is None:
            raise ValueError("the drafter eagle3 needs a head: give --eagle3 DIR_OR_HUB_ID")
        text = target.model.config.get_text_config()
        with reading(f"EAGLE-3 head {name}"):
            config, weights = read_head(name, context.allow_pickle)
            check_target(config, target)
            num_states = len(config.layers_of(text.num_hidden_layers))
            head = build_head(config, weights, target.model.get_input_embeddings(), num_states)
        if not context.mmap:
            own_weights(head)
        return cls(head, context)

    def _run(self, ids: Tensor, hidden: Tensor, place: Any, step: int) -> Tensor:
        """The pair j of a text stands at position j, and in the cache's slot j."""
        embeds, states = self._head.embed_tokens(ids), self._enter(hidden, step)
        mask = place.mask(embeds.dtype)
        return self._head(embeds, states, place.positions, mask, self._cache)

    def _enter(self, hidden: Tensor, step: int) -> Tensor:
        return hidden if step else self._head.enter(hidden)

    def _to_logits(self, outputs: Tensor) -> Tensor:
        return spread(self._head.logits(outputs), self._target_ids, self._vocab_size)


def check_target(config: HeadConfig, target: Model) -> None:
    """Raises ValueError if the head was trained for another target.

    Targets are compared by the last part of their names: a folder may be a copy from the hub.
    """
    if config.verifier and Path(config.verifier).name.lower() not in names_of(target):
        raise ValueError(
            f"it was trained for {config.verifier}, and the target is {target.name} (if that is a "
            f"copy, name its folder {Path(config.verifier).name})"
        )
    check_sizes(config.target_hidden_size, config.layer.vocab_size, target)


def names_of(target: Model) -> set[str]:
    """By what a target may be known: the folders that it lies in, or the name of its file.

    Example: …/models--org--Name/snapshots/0e9e… is the hub's copy of org/Name, and
    Name.Q4_K_M.gguf a file of it.
    """
    path, known = Path(target.name).resolve(), str(target.model.config._name_or_path)
    parts = [part.split("--")[-1].lower() for part in (*path.parts, *Path(known).parts)]
    return {*parts, *(part.partition(".q")[0] for part in parts)}
