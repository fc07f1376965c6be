"""GET /metrics: counters in Prometheus' text format, under vLLM's names.

Counters are over the server's life, of requests that have ended. prometheus-client writes the
format. The values are read from the engine and the worker at each request. Everything comes twice,
plain and with the prefix of vLLM.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from flask import Flask, Response
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.statistics import Statistics
from runtime.values import Engine

_COUNTERS = {
    "spec_decode_num_drafts": "drafts that were verified",
    "spec_decode_num_draft_tokens": "tokens drafted",
    "spec_decode_num_accepted_tokens": "drafted tokens accepted",
    "prompt_tokens": "tokens of prompts of requests that ended",
    "prompt_tokens_cached": "those of them that were known already",
    "generation_tokens": "tokens generated",
    "target_passes": "target forwards after prefill, each text's own",
    "requests": "texts that got a first token, and ended; those of comparisons, too",
    "drafter_failures": "times that a drafter failed in a request",
    "cycles_without_masks": "cycles that a text sat out, until its grammar had said what may come",
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
disable_created_metrics()

_SPANS = {  # of a request: between which of its job's moments
    "time_to_first_token_seconds": ("submitted", "first_token"),
    "request_queue_time_seconds": ("submitted", "began"),
    "request_prefill_time_seconds": ("began", "first_token"),
    "request_decode_time_seconds": ("first_token", "left"),
    "request_inference_time_seconds": ("began", "left"),
    "e2e_request_latency_seconds": ("submitted", "left"),
}
_WORDS = {"submitted": "arrival", "began": "place", "first_token": "first token", "left": "end"}
_BUCKETS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0  # seconds
# In no global registry: several servers may live in one process, each with its histograms.
_Histogram = partial(Histogram, registry=None, buckets=_BUCKETS)


class Meter:
    """Counts jobs of a worker that have ended; each is counted once."""

    def __init__(self) -> None:
        read = "prompt_tokens", "prompt_tokens_cached"
        self.values, self.finished = Counter(dict.fromkeys(read, 0)), Counter[str]()
        self.histograms = {
            name: _Histogram(name, f"from a request's {_WORDS[begin]} to its {_WORDS[end]}")
            for name, (begin, end) in _SPANS.items()
        }

    def count(self, job: Any) -> None:
        """Count a Job. Those that belong to the first of a request have no times of their own."""
        self.finished[job.finish] += 1
        if job.first_token or job.finish in ("stop", "length"):  # its prompt was read
            self.values["prompt_tokens"] += job.num_prompt_tokens or 0
            self.values["prompt_tokens_cached"] += job.num_cached or 0
        for name, span in _SPANS.items() if job.after is None else ():
            begin, end = (getattr(job, moment) for moment in span)
            if begin and end:  # not of one that ended before
                self.histograms[name].observe(end - begin)


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
        "cycles_without_masks": engine.pool.num_late,
        "engine_faults": engine.totals.num_faults,
        "prefix_cache_queries": prefixes.num_asked if prefixes else 0,
        "prefix_cache_hits": prefixes.num_hits if prefixes else 0,
        "kv_cache_usage_perc": sum(cache.lengths) / (cache.num_rows * cache.max_length),
    }
    return Figures(values, total.accepted_at)


class _Collector(Collector):
    """Gives figures to prometheus-client."""

    def __init__(self, figures: Figures, meter: Meter) -> None:
        self._figures, self._meter = figures, meter

    def collect(self) -> Iterator[Metric]:
        """Every metric."""
        figures, meter = self._figures, self._meter
        meaning = "requests that ended"
        ended = CounterMetricFamily("request_success", meaning, labels=["finished_reason"])
        for reason, count in sorted(meter.finished.items()):
            ended.add_metric([reason], count)
        yield ended
        for family, meanings in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, meaning in meanings.items():
                if (value := figures.values.get(name)) is not None:
                    yield family(name, meaning, value)
        meaning = "drafted tokens accepted, by position in the draft"
        accepted = CounterMetricFamily(PER_POSITION, meaning, labels=["position"])
        for position, count in enumerate(figures.accepted_at):
            accepted.add_metric([str(position)], count)
        yield accepted
        for histogram in meter.histograms.values():
            yield from histogram.collect()


def register_metrics(app: Flask, read: Callable[[], Figures], worker: Any) -> None:
    """GET /metrics: what `read` gives, and what the worker knows of its requests."""

    @app.get("/metrics")
    def get_metrics() -> Response:
        """The counters, as a scraper reads them."""
        figures = read()
        values = dict(worker.meter.values) | figures.values
        values["num_requests_running"] = worker.num_running
        values["num_requests_waiting"] = worker.num_waiting
        registry = CollectorRegistry()
        registry.register(_Collector(figures._replace(values=values), worker.meter))
        page = generate_latest(registry).decode()
        page += re.sub("(?m)^(# (?:HELP|TYPE) )?(?=[a-z])", r"\1vllm:", page)
        return Response(page, content_type="text/plain; version=0.0.4")
