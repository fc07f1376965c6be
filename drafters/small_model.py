"""A small model for a drafter of one's own: with a KV cache, compiled code and translation.

    drafter.small = small_drafter("demo_models/draft", context)     in the class method build

What one's own drafter is asked, it may hand on to this one, with fewer tokens to draft.
"""

from dataclasses import replace

from runtime import kernels
from runtime.models.loading import (
    LONGEST_DEFAULT,
    ModelOptions,
    check,
    load_pretrained,
    prepare,
    refusal,
)

from .base import MANY_WEIGHTS, Context, ModelDrafter
from .draft_model import DraftModelDrafter


def small_drafter(name: str, context: Context) -> ModelDrafter:
    """The drafter that runs the model `name`: a folder, a .gguf file or a Hugging Face name.

    It serves as many texts at once as the target, in the same compiled code as --draft-model. The
    tokenizer may be another one than the target's. Raises ValueError if the model cannot be loaded,
    or does not fit the target.
    """
    target = context.target
    length = target.max_length if target.max_length > LONGEST_DEFAULT else None
    options = ModelOptions(str(target.cache.device), context.allow_pickle, length)
    loaded = load_pretrained(name, options)
    model = type(target)(loaded, name, target.cache.num_rows)
    prepare(model, loaded.structure)
    drafter = DraftModelDrafter.build(replace(context, draft=model))
    is_rounded = model.num_weights >= MANY_WEIGHTS  # which changes guesses, and no text
    with refusal(model, is_fast=True):
        quantize = "int4" if is_rounded else None
        kernels.speed_up(model, quantize, check, keeps_embedding=is_rounded)
    check(model)
    return drafter
