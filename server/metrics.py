"""GET /metrics: counters in Prometheus' text format, under vLLM's names.

Counters are over the server's life; those of texts, tokens, drafts and passes cover requests that
have ended. prometheus-client writes the format, everything twice: plain, and with vLLM's prefix.
"""

import re
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from runtime.statistics import Statistics
from runtime.values import Engine

from .worker import Run, Worker

# Without this every histogram comes with one more gauge, the time when it was made.
disable_created_metrics()

_SPANS = {  # of a request's first text: between which moments
    "time_to_first_token_seconds": ("submitted", "first_token"),
    "request_queue_time_seconds": ("submitted", "began"),
    "request_prefill_time_seconds": ("began", "first_token"),
    "request_decode_time_seconds": ("first_token", "ended"),
    "request_inference_time_seconds": ("began", "ended"),
    "e2e_request_latency_seconds": ("submitted", "ended"),
}
_WORDS = {"submitted": "arrival", "began": "place", "first_token": "first token", "ended": "end"}
_BUCKETS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0  # seconds


class Meter(Collector):
    """Counts what becomes of a worker's runs, and tells that beside what its engine counts.

    The registry is its own: several servers may live in one process.
    """

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self._engine, self._worker, self.registry = engine, worker, CollectorRegistry()
        self.registry.register(self)
        mine, labels = {"registry": self.registry}, ["finished_reason"]
        self._finished = Counter(
            "request_success", "texts that ended, several of some requests", labels, **mine
        )
        self._read = Counter("prompt_tokens", "tokens of the prompts of texts that ended", **mine)
        meaning = "those of them that were known already"
        self._cached = Counter("prompt_tokens_cached", meaning, **mine)
        self._histograms = dict[str, Histogram]()
        for name, (begin, end) in _SPANS.items():
            meaning = f"of a request's first text: from its {_WORDS[begin]} to its {_WORDS[end]}"
            self._histograms[name] = Histogram(name, meaning, buckets=_BUCKETS, **mine)
        worker.count = self.count

    def count(self, run: Run, finish: str) -> None:
        """Count a run that has ended so. The times of a request are those of its first run."""
        self._finished.labels(finish).inc()
        if run.first_token or finish in ("stop", "length"):  # its prompt was read
            self._read.inc(len(run.request.prompt))
            self._cached.inc(run.sequence.drafting.num_cached)
        for name, span in _SPANS.items() if run.number == 0 else ():
            begin, end = (getattr(run, moment) for moment in span)
            if begin and end:  # not of one that ended before
                self._histograms[name].observe(end - begin)

    def collect(self) -> Iterator[Metric]:
        """What the engine has counted so far, and how busy it is."""
        total = sum(dict(self._engine.totals.by_drafter).values(), Statistics())
        cache, worker = self._engine.target.cache, self._worker
        usage = sum(cache.lengths) / (cache.num_rows * cache.max_length)
        gauges = {
            "num_requests_running": (worker.num_running, "texts that run"),
            "num_requests_waiting": (worker.num_waiting, "requests in the queue"),
            "kv_cache_usage_perc": (usage, "share of the KV cache in use, 0 to 1"),
        }
        counters = _counters(self._engine, total)
        for family, values in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (value, meaning) in values.items():
                yield family(name, meaning, value)
        name = "spec_decode_num_accepted_tokens_per_pos"
        meaning = "drafted tokens accepted, by position in the draft"
        accepted = CounterMetricFamily(name, meaning, labels=["position"])
        for position, count in enumerate(total.accepted_at):
            accepted.add_metric([str(position)], count)
        yield accepted


def _counters(engine: Engine, total: Statistics) -> dict[str, tuple[int, str]]:
    """Values and meanings of what an engine has counted; `total` is of all drafters."""
    pool, num_faults, known = engine.pool, engine.totals.num_faults, engine.pool.prefixes
    asked, hits = (known.num_asked, known.num_hits) if known else (0, 0)
    return {
        "spec_decode_num_drafts": (total.num_spec_steps, "drafts that were verified"),
        "spec_decode_num_draft_tokens": (total.num_draft_tokens, "tokens drafted"),
        "spec_decode_num_accepted_tokens": (total.num_accepted_draft_tokens, "of them accepted"),
        "generation_tokens": (total.completion_tokens, "tokens generated"),
        "target_passes": (total.target_passes, "target forwards after prefill, each text's own"),
        "requests": (total.prefills, "texts that got a first token; those of comparisons, too"),
        "drafter_failures": (pool.failures.total(), "times that a drafter failed in a request"),
        "cycles_without_masks": (pool.num_late, "cycles that a text sat out for its grammar"),
        "engine_faults": (num_faults, "target forwards that failed"),
        "prefix_cache_queries": (asked, "tokens of prompts that were looked up, for each text"),
        "prefix_cache_hits": (hits, "of them known already"),
    }


def register(app: Flask, service: Any) -> None:
    """GET /metrics: what the engine counts, and what the worker knows of its requests."""
    meter = Meter(service.engine, service.worker)

    @app.get("/metrics")
    def get_metrics() -> Response:
        """The counters, as a scraper reads them."""
        page = generate_latest(meter.registry).decode()
        page += re.sub("(?m)^(# (?:HELP|TYPE) )?(?=[a-z])", r"\1vllm:", page)
        return Response(page, content_type="text/plain; version=0.0.4")
