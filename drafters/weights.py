"""Weights from files: what loading a model and loading its MTP head have in common."""

import traceback

from torch import Tensor, nn

from messages import in_short


def why_not_loaded(error: Exception) -> str:
    """What an error of transformers' says, with the weight that it names in its (silent) log only.

    Example: "lm_head.weight: [95, 64] instead of [96, 64]".
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    report = frame.f_locals.get("loading_info")
    for weight, lines in sorted(getattr(report, "conversion_errors", {}).items()):
        return f"{weight}: {lines.splitlines()[-2:][0][:300]}"
    for weight, found, wanted in sorted(getattr(report, "mismatched_keys", ())):
        return f"{weight}: {list(found)} instead of {list(wanted)}"
    return in_short(error)


def own_weights(module: nn.Module) -> None:
    """Copy the weights that lie in a mapped file into memory of our own, one by one.

    Tied weights stay tied, as each parameter stays the same object.
    """

    def own(weight: Tensor) -> Tensor:
        """The weight, or its copy: only what torch allocated can be resized."""
        return weight if weight.untyped_storage().resizable() else weight.clone()

    module._apply(own)  # the way of `to`
