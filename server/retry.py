"""Retries after a failed forward of the target: other requests' answers do not depend on it.

    all together ── fails → each by itself ── fails → without its drafters ── fails → an error

Cycles that a step has completed before it fails stay. The caches of the other sequences are
truncated to their lengths before the step, and their drafts are verified again.
"""

import logging

from runtime.values import Cycle, Engine, TextSequence, in_short

LOG = logging.getLogger("engine")


def step(engine: Engine, sequences: list[TextSequence]) -> dict[TextSequence, Cycle]:
    """Run engine.step, and after a fault the sequences one by one.

    A sequence that cannot go on ends with a `failure`, and has no cycle.
    """
    held = {s: engine.target.cache.lengths[s.row] for s in sequences}
    cycles: dict[TextSequence, Cycle] = {}
    try:
        return engine.step(sequences, cycles)
    except Exception as error:
        engine.totals.num_faults += 1
        LOG.warning("a pass of the target failed and is tried again: %s", in_short(error))
    for s in sequences:
        if s not in cycles and not s.finish_reason:
            cycles |= _step_alone(engine, s, held[s])
    return cycles


def _step_alone(engine: Engine, s: TextSequence, held: int) -> dict[TextSequence, Cycle]:
    """Retry one sequence, in case another caused the fault; then without its drafters."""
    while True:
        engine.target.cache.truncate(s.row, held)
        cycles: dict[TextSequence, Cycle] = {}
        try:
            return engine.step([s], cycles)
        except Exception as error:
            if cycles or s.finish_reason:
                return cycles
            failure = error
            engine.totals.num_faults += 1
        if not s.drafting.states:
            s.fail(failure)
            return {}
        engine.pool.drop_all_drafters(s.drafting, f"a forward failed ({in_short(failure)})")
