"""Puts an engine together: a target, a draft model, drafters, a controller and a prefix cache."""

from dataclasses import replace

import drafters
from runtime import kernels, plug
from runtime.models import StartError
from runtime.models.files import is_gguf
from runtime.models.loading import check, refusal
from runtime.models.startup import end_ahead
from runtime.values import Engine, Model
from server import core

from . import answers
from .options import Options
from .worker import LOG


def load_draft(options: Options) -> Model | None:
    """The draft model, or None. Raises StartError only for a model that --draft-model names.

    --dtype unpacks the target's file alone: a draft model from a GGUF file is faster as it is, and
    its guesses change no text.
    """
    name = options.model_of("draft_model")
    if is_gguf(name or "") and options.dtype not in ("packed", "int8"):
        options = replace(options, dtype="auto")
    try:
        return None if name is None else core.load_model(name, options)
    except StartError as error:
        if options.draft_model is not None:
            raise
        drafters.LOG.warning("going on without draft_model: %s", error)
        return None


def assemble_engine(options: Options) -> Engine:
    """The target with all drafters that fit it. Raises ValueError if one asked for does not."""
    drafters.check_name(options.drafter)  # before anything is loaded
    if options.draft_model and (pair := plug("runtime.models.pair")):
        pair.check_pair(options.model, options.draft_model, options, drafters.have_same_words)
    target = core.load_model(options.model, options)
    draft = load_draft(options)
    end_ahead()
    context = drafters.Context(target, draft, **options.for_drafters)
    loaded, default = drafters.load_all(options.drafter, context, not options.fixed_k)
    for model in filter(None, (target, draft)):  # after the heads have read its weights
        # A draft model's roundings change no text, and each of its steps reads all its weights.
        is_rounded = model is draft and draft.num_weights >= drafters.MANY_WEIGHTS
        quantize = "int4" if is_rounded else options.quantize
        with refusal(model, is_fast=True):
            kernels.speed_up(model, quantize, check, keeps_embedding=is_rounded)
    auto, prefix = plug("drafters.auto"), plug("runtime.cache.prefix")
    return core.Engine(
        target, loaded, default,
        controller=auto.Controller.of(target, loaded) if auto and not options.fixed_k else None,
        draft_model=draft, is_strict=options.strict,
        prefixes=prefix and prefix.PrefixCache.of(target, options.prefix_cache_mb),
    )  # fmt: skip


def load_engine(options: Options) -> Engine:
    """An engine that is ready to run in this thread: it was checked and has run once."""
    engine = assemble_engine(options)
    with refusal(engine.target):
        engine.target.report = kernels.report_of(engine.target)
    for model in filter(None, (engine.target, engine.draft_model)):
        check(model)
    if trial := plug("server.trial"):
        trial.judge(engine, options)
    LOG.info(answers.setting(engine, options))
    if warming := plug("server.warming"):  # else the first requests are slow
        warming.warm_up(engine)
    return engine
