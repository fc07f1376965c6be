"""An engine is put together of a target, a draft model, drafters, a controller and a prefix cache.

The core's classes and functions come as arguments: no file can import the main program.
"""

from collections.abc import Callable

import drafters
import kernels
from cache import PrefixCache
from control import Controller
from drafters.base import Sample
from messages import Engine, Model
from models import StartError, ahead, loading
from models.reference import check, refusal

from . import answers
from .options import Options
from .worker import LOG, warm_up

LoadModel = Callable[[str, Options], Model]


def load_draft(options: Options, load_model: LoadModel) -> Model | None:
    """The draft model, or None. Raises StartError only for a model that --draft-model names."""
    try:
        name = options.model_of("draft_model")
        return load_model(name, options.for_draft) if name else None
    except StartError as error:
        if options.draft_model:
            raise
        drafters.LOG.warning("going on without draft_model: %s", error)
        return None


def assemble_engine(
    options: Options, load_model: LoadModel, engine_class: Callable[..., Engine], sample: Sample
) -> Engine:
    """The target with all drafters that fit it. Raises ValueError if one asked for does not."""
    drafters.check_name(options.drafter)  # before anything is loaded
    loading.check_pair_early(options.model, options.draft_model, options, drafters.check_words)
    target = load_model(options.model, options)
    draft = load_draft(options, load_model)
    ahead.end()
    context = drafters.Context(target, sample, draft, **options.for_drafters)
    loaded, default = drafters.load_all(options.drafter, context, not options.fixed_k)
    for model in filter(None, (target, draft)):  # after the heads have read its weights
        # A draft model's roundings change no text, and each of its steps reads all its weights.
        is_rounded = model is draft and draft.num_weights >= drafters.MANY_WEIGHTS
        quantize = "int4" if is_rounded else options.quantize
        with refusal(model, is_fast=True):
            kernels.speed_up(model, quantize, check, keeps_embedding=is_rounded)
    return engine_class(
        target, loaded, default, prefill_chunk=options.prefill_chunk,
        controller=None if options.fixed_k else Controller.of(target, loaded),
        draft_model=draft, is_strict=options.strict,
        prefixes=PrefixCache.of(target, options.prefix_cache_mb),
    )  # fmt: skip


def load_engine(
    options: Options, load_model: LoadModel, engine_class: Callable[..., Engine], sample: Sample
) -> Engine:
    """An engine that is ready to run in this thread: it was checked and has run once."""
    engine = assemble_engine(options, load_model, engine_class, sample)
    with refusal(engine.target):
        engine.target.report = kernels.report_of(engine.target)
    for model in filter(None, (engine.target, engine.draft_model)):
        check(model)
    LOG.info(answers.setting(engine, options))
    warm_up(engine)
    return engine
