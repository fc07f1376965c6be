"""The bodies that the server sends: the answer to a request, its stream's events, and /health.

They read the core's sequences and engine, handed in; see README.md for examples of all three.
"""

import json
from typing import Any

from .statistics import FORMULAS, Statistics, ratio
from .worker import Worker

PLAIN = "none"  # the name under which requests without a drafter are counted
_MIN_DRAFTS_TO_JUDGE = 100
_POOR_FIRST_ACCEPTANCE = 0.2


def answer(sequence: Any, notes: list[str], events: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What /generate returns for a finished sequence; `events` only where a trace was asked for."""
    request, statistics = sequence.request, sequence.statistics
    prompt, completion = len(request.prompt), len(sequence.output)
    counters = statistics.counters(request.num_speculative_tokens if request.drafter else 0)
    body = {
        "text": sequence.text.text,
        "token_ids": sequence.output,
        "finish_reason": sequence.finish_reason,
        "warnings": notes + sequence.warnings,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "metrics": {"speculative_decoding": {"drafter": request.drafter or PLAIN} | counters},
        "timings": statistics.timings(),
    }
    return body if events is None else body | {"trace": events}


def public(event: dict[str, Any]) -> dict[str, Any]:
    """A cycle's event as a trace shows it, without the text (which the answer has)."""
    return {name: value for name, value in event.items() if name != "pieces"}


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def health(engine: Any, worker: Worker, num_spec_tokens: int, uptime_s: float) -> dict[str, Any]:
    """The body of GET /health: state, load, and acceptance over the server's life."""
    totals = dict(engine.totals)
    total = sum(totals.values(), Statistics())
    recent = list(engine.recent)
    cache = engine.target.cache
    per_drafter = {
        name: s.counters(num_spec_tokens) | s.per_position() for name, s in totals.items()
    }
    return {
        "status": "ok" if worker.alive and not worker.draining else "unavailable",
        "model": engine.target.name,
        "drafter": engine.default_drafter,
        "drafters": list(engine.drafters),
        "uptime_s": round(uptime_s, 3),
        "num_requests_running": worker.num_running,
        "num_requests_waiting": worker.num_waiting,
        "kv_cache_usage_perc": round(sum(cache.lengths) / (cache.num_rows * cache.max_length), 4),
        "speculative_decoding": total.counters(num_spec_tokens)
        | {"recent_acceptance_rate": ratio(sum(a for _, a in recent), sum(d for d, _ in recent))}
        | total.per_position()
        | {"per_drafter": per_drafter, "formulas": FORMULAS},
        "warnings": _warnings(engine),
    }


def _warnings(engine: Any) -> list[str]:
    warnings = []
    if engine.num_drafter_failures:
        warnings.append(f"{engine.num_drafter_failures} requests lost their drafter to an error")
    for name, statistics in engine.totals.items():
        rates = statistics.per_position()["acceptance_rate_per_position"]
        if (
            rates
            and statistics.drafted_at[0] >= _MIN_DRAFTS_TO_JUDGE
            and rates[0] < _POOR_FIRST_ACCEPTANCE
        ):
            warnings.append(f"{name}: only {rates[0]:.0%} of first draft tokens are accepted")
    return warnings
