"""The bodies that the server sends: the answer to a request, its stream's events, and /health.

They read the core's sequences and engine, handed in; docs/api.md has examples of all three.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from control.statistics import FORMULAS, PLAIN, Statistics, ratio
from messages import RequestError, engine_failure

from . import story
from .comparison import comparison
from .options import Options
from .parsing import model_id
from .worker import Job, Worker, cancel

LOG = logging.getLogger("serving.answers")
PING = ": ping\n\n"  # a proxy might take silence for an end

_MIN_DRAFTS_TO_JUDGE = 100
_POOR_FIRST_ACCEPTANCE = 0.2


def answer(jobs: list[Job], notes: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """What /generate returns for a finished job of a target in `dtype`.

    Where a comparison was asked for, every second job is the same by plain decoding, with a trace.
    """
    job, *others = jobs
    sequence = job.sequence
    request, statistics = sequence.request, sequence.statistics
    prompt, completion = len(request.prompt), len(sequence.output)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sequence.seat.num_cached},
    }
    counters = statistics.counters(request.num_speculative_tokens if request.drafter else 0)
    notes = notes + sequence.seat.warnings
    body = body_of(sequence, sequence.output, notes, usage, counters, statistics.timings())
    body["metrics"]["controller"] = sequence.seat.decision and sequence.seat.decision.as_dict()
    if request.trace:
        body["trace"] = list(map(public, job.events))
    if others:
        pairs = zip(jobs[::2], jobs[1::2], strict=True)
        runs = [(ours.sequence, plain.sequence) for ours, plain in pairs]
        body["compare"] = comparison(runs, others[0].events, dtype)
    return body


def body_of(
    sequence: Any,
    token_ids: list[int] | None,
    notes: list[str],
    usage: dict[str, Any],
    counters: dict[str, Any],
    timings: dict[str, Any],
) -> dict[str, Any]:
    """The parts of an answer that it has whichever engine ran the finished sequence."""
    request = sequence.request
    drafting = {"drafter": request.drafter or PLAIN} | counters
    body = {
        "text": sequence.text.text,
        "token_ids": token_ids,
        "finish_reason": sequence.finish_reason,
        "seed": request.seed,
        "warnings": notes,
        "usage": usage,
        "metrics": {"speculative_decoding": drafting, "controller": None},
        "timings": timings,
    }
    return body if request.logprobs is None else body | {"logprobs": sequence.logprobs}


def public(event: dict[str, Any]) -> dict[str, Any]:
    """A cycle's event as a trace shows it, without what stands beside it: text and logprobs."""
    return {name: value for name, value in event.items() if name not in ("pieces", "logprobs")}


def brief(event: dict[str, Any]) -> dict[str, Any]:
    """A cycle's event as a stream shows it without a trace: what it committed."""
    tokens = [{"id": token["id"], "kind": token["kind"]} for token in event["tokens"]]
    return {"step": event["step"], "tokens": tokens}


def stream_events(jobs: list[Job], whole: Callable[[], dict[str, Any]]) -> Iterator[str]:
    """Jobs as server-sent events: one per cycle, then the answer that `whole` makes.

    The events of a comparison's plain decoding stand under "plain". It is measured several times,
    and the first time is shown.
    """

    def shown(event: dict[str, Any], number: int) -> str:
        text = {"text": "".join(text for text, _ in event["pieces"])}
        if number > 1:
            return ""
        if number == 1:
            return sse({"plain": brief(event) | text | {"ms": event["ms"]}})
        told = public(event) if jobs[0].request.trace else brief(event)
        if "logprobs" in event:
            told["logprobs"] = event["logprobs"]
        return sse(told | text)

    return stream(jobs, shown, lambda: [sse(whole())])


def stream(
    jobs: list[Job],
    shown: Callable[[dict[str, Any], int], str],
    last: Callable[[], Iterable[str]],
    opening: str = "",
) -> Iterator[str]:
    """Jobs as a stream: `opening`, what is shown of each event, `last` or an error, and [DONE].

    `shown` gets an event and its job's number; `last` is called when all is done. A stream that
    merely ended would look like a success. The jobs do not outlive it.
    """
    try:
        if opening:
            yield opening
        for number, job in enumerate(jobs):
            for events in job:
                yield "".join(shown(event, number) for event in events) or PING
        if not any(job.cancelled for job in jobs):
            yield from last()
    except RequestError as error:
        yield sse(error.body())
    except Exception as error:  # the status line is out: an event is all that can be said
        LOG.exception("the engine failed")
        yield sse(engine_failure(error).body())
    finally:
        cancel(jobs)  # the client may have left
    yield "data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def setting(engine: Any, options: Options) -> str:
    """One line: what the target is computed with on this machine, and whether that is exact."""
    model, fast, report = engine.target.model, engine.target.fast, engine.target.report
    kind = story.weights_of(engine, options)["dtype"]
    way = fast.way if fast else "transformers' modules"
    exact = "with equal bits, checked" if report and report.is_exact else "without equal bits"
    count, device = torch.get_num_threads(), model.device.type
    where = f"{count} thread{'s' * (count > 1)}" if device == "cpu" else f"on {device}"
    kind = "with packed weights" if kind == "packed" else f"in {kind}"
    return f"the target runs {kind}: {way}, {where}, {exact}"


def health(engine: Any, worker: Worker, options: Options) -> dict[str, Any]:
    """The body of GET /health: state, load, and acceptance over the server's life."""
    num_spec_tokens = options.num_speculative_tokens
    totals = dict(engine.totals.by_drafter)
    total = sum(totals.values(), Statistics())
    recent = list(engine.totals.recent)
    cache, report = engine.target.cache, engine.target.report
    per_drafter = {
        name: s.counters(num_spec_tokens) | s.per_position() for name, s in totals.items()
    }
    return {
        "status": worker.status,
        "engine": None,  # another one than this server's own
        "model": model_id(engine.target.name),  # not where its folder is
        "quantization": options.quantize,
        "compiled": bool(engine.target.fast and engine.target.fast.is_compiled),
        "trees": engine.panel.can_branch,
        "model_card": options.card,
        "target": story.weights_of(engine, options),
        "chat_template": options.is_chat(engine.target.tokenizer),  # the page asks for it
        "drafter": engine.default_drafter,
        "drafters": list(engine.panel.choices),
        "num_speculative_tokens": options.num_speculative_tokens,
        "uptime_s": round(worker.uptime_s, 3),
        "num_requests_running": worker.num_running,
        "num_requests_waiting": worker.num_waiting,
        "bitwise_lossless": bool(report and report.is_exact),
        "exactness": report and report.as_dict(),
        "kv_cache_capacity_tokens": cache.num_rows * cache.max_length,
        "kv_cache_usage_perc": round(sum(cache.lengths) / (cache.num_rows * cache.max_length), 4),
        "prefix_cache": engine.panel.prefixes and engine.panel.prefixes.as_dict(),
        "speculative_decoding": total.counters(num_spec_tokens)
        | {"recent_acceptance_rate": ratio(sum(a for _, a in recent), sum(d for d, _ in recent))}
        | total.per_position()
        | {
            "per_drafter": per_drafter,
            "per_rule": {
                rule: s.counters(num_spec_tokens) for rule, s in dict(engine.totals.by_rule).items()
            },
            "formulas": FORMULAS,
        },
        "controller": controller_state(engine),
        "warnings": _warnings(engine),
    }


def controller_state(engine: Any) -> dict[str, Any] | None:
    """What the controller has measured, and the last thing it said of each drafter."""
    if engine.controller is None:
        return None
    return {
        "costs_by_batch": engine.controller.costs.as_dict(),
        "last": {name: str(decision) for name, decision in dict(engine.planner.decisions).items()},
    }


def _warnings(engine: Any) -> list[str]:
    warnings = []
    if count := engine.panel.num_failures:
        warnings.append(f"{count} times a drafter failed, and its request went on without it")
    if engine.totals.num_faults:
        warnings.append(
            f"{engine.totals.num_faults} forwards of the target failed and were tried again"
        )
    for name, statistics in engine.totals.by_drafter.items():
        rates = statistics.per_position()["acceptance_rate_per_position"]
        if (
            rates
            and statistics.drafted_at[0] >= _MIN_DRAFTS_TO_JUDGE
            and rates[0] < _POOR_FIRST_ACCEPTANCE
        ):
            warnings.append(f"{name}: only {rates[0]:.0%} of first draft tokens are accepted")
    return warnings
