"""GET /metrics: counters in Prometheus' text format, under the names that vLLM and llama.cpp share.

Counters are over the server's life, of requests that have ended. prometheus-client writes the
format. The values are read from the engine and the worker at each request.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import prometheus_client
from flask import Flask, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from control.statistics import Statistics
from messages import Engine

_COUNTERS = {
    "spec_decode_num_drafts": "drafts that were verified",
    "spec_decode_num_draft_tokens": "tokens drafted",
    "spec_decode_num_accepted_tokens": "drafted tokens accepted",
    "generation_tokens": "tokens generated",
    "target_passes": "target forwards after prefill",
    "requests": "requests that got a first token, and ended",
    "drafter_failures": "times that a drafter failed in a request",
    "engine_faults": "target forwards that failed and were tried again",
    "prefix_cache_queries": "tokens of prompts",
    "prefix_cache_hits": "tokens of prompts that were known already",
}
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_GAUGES = {
    "num_requests_running": "requests that run",
    "num_requests_waiting": "requests in the queue",
    "kv_cache_usage_perc": "share of the KV cache in use, 0 to 1",
}
# Without this every histogram comes with one more gauge, the time when it was made.
prometheus_client.disable_created_metrics()

# In no global registry: several servers may live in one process, each with a histogram.
Histogram = partial(
    prometheus_client.Histogram,
    "time_to_first_token_seconds",
    "from a request's arrival to its first token",
    registry=None,
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Figures(NamedTuple):
    """What an engine has counted. What it does not count is None or left out."""

    values: dict[str, float | None]  # by the names in _COUNTERS and _GAUGES
    accepted_at: Sequence[float]  # drafted tokens, by position in the draft


def figures_of(engine: Engine) -> Figures:
    """What an Engine of the core has counted."""
    total = sum(dict(engine.totals.by_drafter).values(), Statistics())
    prefixes, cache = engine.pool.prefixes, engine.target.cache
    values: dict[str, float | None] = {
        "spec_decode_num_drafts": total.num_spec_steps,
        "spec_decode_num_draft_tokens": total.num_draft_tokens,
        "spec_decode_num_accepted_tokens": total.num_accepted_draft_tokens,
        "generation_tokens": total.completion_tokens,
        "target_passes": total.target_passes,
        "requests": total.prefills,
        "drafter_failures": engine.pool.failures.total(),
        "engine_faults": engine.totals.num_faults,
        "prefix_cache_queries": prefixes.num_asked if prefixes else 0,
        "prefix_cache_hits": prefixes.num_hits if prefixes else 0,
        "kv_cache_usage_perc": sum(cache.lengths) / (cache.num_rows * cache.max_length),
    }
    return Figures(values, total.accepted_at)


class _Collector(Collector):
    """Asks for the figures, and gives them to prometheus-client."""

    def __init__(self, read: Callable[[], Figures], worker: Any) -> None:
        self._read, self._worker = read, worker

    def collect(self) -> Iterator[Metric]:
        """Make every metric but the histogram, which is a collector itself."""
        values, accepted_at = self._read()
        values["num_requests_running"] = self._worker.num_running
        values["num_requests_waiting"] = self._worker.num_waiting
        for family, meanings in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, meaning in meanings.items():
                if (value := values.get(name)) is not None:
                    yield family(name, meaning, value)
        meaning = "drafted tokens accepted, by position in the draft"
        accepted = CounterMetricFamily(PER_POSITION, meaning, labels=["position"])
        for position, count in enumerate(accepted_at):
            accepted.add_metric([str(position)], count)
        yield accepted


def register_metrics(app: Flask, read: Callable[[], Figures], worker: Any) -> None:
    """GET /metrics: what `read` gives, and what the worker knows of its requests."""

    @app.get("/metrics")
    def get_metrics() -> Response:
        registry = CollectorRegistry()
        registry.register(_Collector(read, worker))
        registry.register(worker.first_token_s)
        page = prometheus_client.generate_latest(registry)
        return Response(page, content_type="text/plain; version=0.0.4")
