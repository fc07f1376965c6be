"""GET /metrics: counters in Prometheus' text format, under the names that vLLM and llama.cpp share.

Counters are over the server's life, of requests that have ended. prometheus-client writes the
format. The values are the engine's and the worker's own, read whenever somebody asks.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import prometheus_client
from flask import Flask, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from control.statistics import Statistics

CONTENT_TYPE = "text/plain; version=0.0.4"
# Without this every histogram comes with one more gauge, the time when it was made.
prometheus_client.disable_created_metrics()

# In no registry: several servers may live in one process, and each has its own.
Histogram = partial(
    prometheus_client.Histogram,
    "time_to_first_token_seconds",
    "from a request's arrival to its first token",
    registry=None,
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def metrics(engine: Any, worker: Any) -> bytes:
    """The whole page."""
    registry = CollectorRegistry()
    registry.register(_Figures(engine, worker))
    registry.register(worker.first_token_s)
    return prometheus_client.generate_latest(registry)


class _Figures(Collector):
    """Reads what the engine and the worker have counted."""

    def __init__(self, engine: Any, worker: Any) -> None:
        self._engine, self._worker = engine, worker

    def collect(self) -> Iterator[Metric]:
        """Make every figure but the histogram, which collects its own."""
        engine, worker = self._engine, self._worker
        total = sum(dict(engine.totals.by_drafter).values(), Statistics())
        prefixes = engine.panel.prefixes
        for name, meaning, value in (
            ("spec_decode_num_drafts", "cycles with a draft", total.num_spec_steps),
            ("spec_decode_num_draft_tokens", "tokens drafted", total.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "drafted tokens accepted",
             total.num_accepted_draft_tokens),
            ("generation_tokens", "tokens generated", total.completion_tokens),
            ("target_passes", "target forwards after prefill", total.target_passes),
            ("requests", "requests that got a first token, and ended", total.prefills),
            ("drafter_failures", "times that a drafter failed in a request",
             engine.panel.num_failures),
            ("engine_faults", "target forwards that failed and were tried again",
             engine.totals.num_faults),
            ("prefix_cache_queries", "tokens of prompts", prefixes.num_asked if prefixes else 0),
            ("prefix_cache_hits", "tokens of prompts that were known already",
             prefixes.num_found if prefixes else 0),
        ):  # fmt: skip
            yield CounterMetricFamily(name, meaning, value)
        accepted = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "drafted tokens accepted, by position in the draft",
            labels=["position"],
        )
        for position, count in enumerate(total.accepted_at):
            accepted.add_metric([str(position)], count)
        yield accepted
        cache = engine.target.cache
        usage = sum(cache.lengths) / (cache.num_rows * cache.max_length)
        for name, meaning, value in (
            ("num_requests_running", "requests in the batch", worker.num_running),
            ("num_requests_waiting", "requests in the queue", worker.num_waiting),
            ("kv_cache_usage_perc", "share of the KV cache in use, 0 to 1", usage),
        ):
            yield GaugeMetricFamily(name, meaning, value)


def register_metrics(app: Flask, engine: Any, worker: Any) -> None:
    """GET /metrics."""

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(metrics(engine, worker), content_type=CONTENT_TYPE)
