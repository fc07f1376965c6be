"""First passes are slow, so each model makes its first one before anybody waits for it."""

import logging
from collections import Counter
from contextlib import suppress
from copy import copy

import drafters
from runtime.models.loading import PROGRESS
from runtime.statistics import Totals
from runtime.values import Engine, Request


def uncounted(engine: Engine) -> Engine:
    """A copy of the engine whose runs no statistics count and no controller learns from.

    It logs none of its drafters' failures.
    """
    twin = copy(engine)
    twin.pool, twin.planner = copy(engine.pool), drafters.FixedK()
    twin.totals, twin.pool.failures = Totals(engine.pool.choices), Counter()
    twin.pool.log = logging.Logger("nobody's", logging.CRITICAL + 1)
    return twin


def warm_up(engine: Engine) -> None:
    """Let the target and each model that drafts run once, before a measurement counts.

    First calls are slow: buffers are allocated. Each is asked for a whole draft, so the target runs
    at K + 1 rows. Statistics are dropped. A fault is ignored: it comes again at run time.
    """
    PROGRESS.info("warming up: each model runs once, as its first pass is slow")
    prompt = [i % engine.target.vocab_size for i in (1, 2, 3, 1, 2, 3)]
    models = [name for name, model in engine.pool.drafters.items() if not model.can_guess]
    for name in models or [None]:
        with suppress(Exception):
            request = Request(prompt, 16, name, isolated=True)
            for _, cycle in uncounted(engine).generate(request):
                if cycle.number:
                    break
