"""GET /metrics: counters in Prometheus' text format, under the names that vLLM and llama.cpp share.

Counters are over the server's life, of requests that have ended.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response

from control.statistics import Statistics

CONTENT_TYPE = "text/plain; version=0.0.4"
_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Seconds, counted by how many were at most each bound."""

    def __init__(self, bounds: tuple[float, ...] = _BOUNDS_S) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._total_s = 0.0

    def observe(self, value_s: float) -> None:
        """One more; from one thread only."""
        self._counts[bisect_left(self._bounds, value_s)] += 1
        self._total_s += value_s

    def samples(self, name: str) -> Iterator[str]:
        """Lines of the text format."""
        counts, count = list(self._counts), 0
        for bound, more in zip((*self._bounds, "+Inf"), counts, strict=True):
            count += more
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._total_s}"
        yield f"{name}_count {count}"


def metrics(engine: Any, worker: Any) -> str:
    """The whole page."""
    total = sum(dict(engine.totals.by_drafter).values(), Statistics())
    cache = engine.target.cache
    usage = sum(cache.lengths) / (cache.num_rows * cache.max_length)
    counters = {
        "spec_decode_num_drafts_total": ("cycles with a draft", total.num_spec_steps),
        "spec_decode_num_draft_tokens_total": ("tokens drafted", total.num_draft_tokens),
        "spec_decode_num_accepted_tokens_total": (
            "drafted tokens accepted",
            total.num_accepted_draft_tokens,
        ),
        "generation_tokens_total": ("tokens generated", total.completion_tokens),
        "target_passes_total": ("target forwards after prefill", total.target_passes),
        "requests_total": ("requests that got a first token, and ended", total.prefills),
        "drafter_failures_total": (
            "requests that lost their drafter to an error",
            engine.panel.num_failures,
        ),
        "engine_faults_total": (
            "target forwards that failed and were tried again",
            engine.totals.num_faults,
        ),
    }
    gauges = {
        "num_requests_running": ("requests in the batch", worker.num_running),
        "num_requests_waiting": ("requests in the queue", worker.num_waiting),
        "kv_cache_usage_perc": ("share of the KV cache in use, 0 to 1", usage),
    }
    lines: list[str] = []
    for kind, group in {"counter": counters, "gauge": gauges}.items():
        for name, (meaning, value) in group.items():
            lines += [*_head(name, meaning, kind), f"{name} {value}"]
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    lines += _head(name, "drafted tokens accepted, by position in the draft", "counter")
    lines += [
        f'{name}{{position="{position}"}} {count}'
        for position, count in enumerate(total.accepted_at)
    ]
    name = "time_to_first_token_seconds"
    lines += _head(name, "from a request's arrival to its first token", "histogram")
    lines += worker.first_token_s.samples(name)
    return "\n".join(lines) + "\n"


def _head(name: str, meaning: str, kind: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def register_metrics(app: Flask, engine: Any, worker: Any) -> None:
    """GET /metrics."""

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(metrics(engine, worker), content_type=CONTENT_TYPE)
