"""The bodies that the server sends: the answer to a request, its stream's events, and /health.

They read the core's sequences and engine, handed in; docs/api.md says what their fields mean.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

import torch

from drafters.auto import Costs
from runtime.grammars import OPEN
from runtime.models.catalogue import entry_of
from runtime.statistics import FORMULAS, Statistics, ratio
from runtime.values import (
    PLAIN,
    Engine,
    Json,
    Model,
    Request,
    RequestError,
    TextSequence,
    engine_failure,
)

from . import trace
from .comparison import comparison
from .formats import reasoning_of
from .options import Options
from .parsing import model_id
from .worker import LOG, Job, Worker, cancel, read

PING = ": ping\n\n"  # a proxy might take silence for an end
_MIN_DRAFTS_TO_JUDGE = 100
_FEW = 5  # drafted tokens, whose mean time is told
_POOR_FIRST_ACCEPTANCE = 0.2


def answer(jobs: list[Job], notes: list[str], dtype: torch.dtype) -> Json:
    """What /generate returns for a finished job of a target in `dtype`.

    Several jobs are choices, for each of the prompts. Where a comparison was asked for, every
    second one decodes the request plainly, with a trace.
    """
    job, *others = jobs
    request = job.sequence.request
    if request.texts > 1:
        return of_choices([_answer(job, notes) for job in jobs], request.n)
    body = _answer(job, notes)
    if others:
        sequences = [job.sequence for job in jobs]
        runs = list(zip(sequences[::2], sequences[1::2], strict=True))
        body["compare"] = comparison(runs, others[0].events, dtype)
    return body


def _answer(job: Job, notes: list[str]) -> Json:
    """What /generate returns for one finished job."""
    sequence = job.sequence
    request, statistics = sequence.request, sequence.statistics
    prompt, completion = len(request.prompt), len(sequence.output)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sequence.drafting.num_cached},
    }
    details = _reasoning_tokens(sequence)
    if request.prediction:
        details["accepted_prediction_tokens"] = sequence.drafting.accepted["prediction"]
        details["rejected_prediction_tokens"] = sequence.drafting.rejected["prediction"]
    if details:
        usage["completion_tokens_details"] = details
    counters = statistics.counters(request.num_speculative_tokens if request.drafter else 0)
    notes = notes + sequence.warnings
    if sequence.matcher and not sequence.matcher.may_end:
        limit = "max_tokens" if sequence.finish_reason == "length" else "a stop string"
        notes.append(f"{limit} cut the text, so it is not a whole one of its grammar")
    read = {"cache_n": job.num_cached, "prompt_n": prompt - job.num_cached}
    body = body_of(job, sequence.output, notes, usage, counters, read | statistics.timings())
    decision = sequence.drafting.task.decision
    body["metrics"]["controller"] = decision and decision.as_dict()
    if trace.IDS in request.returns:
        body["prompt_token_ids"] = list(request.prompt)
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = trace.prompt_logprobs(sequence)
    if request.trace:
        body["trace"] = list(map(public, job.events))
    return body


def _reasoning_tokens(sequence: TextSequence) -> Json:
    """How many tokens of a chat's answer are reasoning, with its tags, where there may be any."""
    prompt, tokenizer, output = sequence.request.prompt, sequence.tokenizer, sequence.output
    reasoning = reasoning_of(tokenizer, prompt)
    begin, end = map(tokenizer.added_tokens_encoder.get, ("<think>", "</think>"))
    if not reasoning or end is None:
        return {}
    has_begun = reasoning == OPEN or output[:1] == [begin]
    count = output.index(end) + 1 if end in output else len(output)
    return {"reasoning_tokens": count if has_begun else 0}


def of_choices(bodies: list[Json], n: int | None = None) -> Json:
    """One answer from those of a request's choices: the first, and all of them in `choices`.

    They are `n` for each prompt, or all are for one. In `usage` each prompt is counted once, and
    `warnings` has those of all.
    """
    usage, of_all = dict(bodies[0]["usage"]), ("usage", "warnings")
    if len(firsts := [body["usage"] for body in bodies[:: n or len(bodies)]]) > 1:
        usage["prompt_tokens"] = sum(first["prompt_tokens"] for first in firsts)
        cached = (first["prompt_tokens_details"]["cached_tokens"] for first in firsts)
        usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    usage["completion_tokens"] = sum(body["usage"]["completion_tokens"] for body in bodies)
    if "completion_tokens_details" in usage:
        every = [body["usage"]["completion_tokens_details"] for body in bodies]
        usage["completion_tokens_details"] = {n: sum(one[n] for one in every) for n in every[0]}
    if usage["prompt_tokens"] is not None:
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    choices = [
        {"index": i} | {name: body[name] for name in body if name not in of_all}
        for i, body in enumerate(bodies)
    ]
    warnings = list(dict.fromkeys(note for body in bodies for note in body["warnings"]))
    return bodies[0] | {"usage": usage, "warnings": warnings, "choices": choices}


def body_of(
    job: Any, token_ids: list[int] | None, notes: list[str],
    usage: Json, counters: Json, timings: Json,
) -> Json:  # fmt: skip
    """The parts of an answer that it has whichever engine ran the finished job."""
    sequence, request = job.sequence, job.sequence.request  # as it was admitted
    drafting = {"drafter": request.drafter or PLAIN} | counters
    body = {
        "text": sequence.text.text,
        "token_ids": token_ids,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.text.stopped_by,
        "seed": request.seed,
        "warnings": notes,
        "usage": usage,
        "metrics": job.times(timings["predicted_n"])
        | {"speculative_decoding": drafting, "controller": None},
        "timings": timings | _rates(timings),
    }
    return body if request.logprobs is None else body | {"logprobs": sequence.logprobs}


def _rates(timings: Json) -> Json:
    """llama.cpp's rates of both parts; the first token comes with the prompt's. None: unknown."""
    rates: Json = {}
    for part, free in (("prompt", 0), ("predicted", 1)):
        ms, count = timings[f"{part}_ms"], timings[f"{part}_n"]
        is_known, count = None not in (ms, count), (count or 0) - free
        can_divide = is_known and count > 0 and ms > 0
        unknown = 0.0 if is_known else None
        rates[f"{part}_per_token_ms"] = ms / count if can_divide else unknown
        rates[f"{part}_per_second"] = 1e3 / ms * count if can_divide else unknown
    return rates


def public(event: Json) -> Json:
    """A cycle's event as a trace shows it, without what stands beside it: text and logprobs."""
    return {name: value for name, value in event.items() if name not in ("pieces", "logprobs")}


def brief(event: Json) -> Json:
    """A cycle's event as a stream shows it without a trace: what it committed."""
    tokens = [{"id": token["id"], "kind": token["kind"]} for token in event["tokens"]]
    return {"step": event["step"], "tokens": tokens}


class Shape:
    """How /generate writes an answer: whole, or as a stream of an event for each cycle.

    Of several choices an event has the `index`. The events of a comparison's plain decoding stand
    under "plain". It is measured several times, and the first time is shown.
    """

    opening, closing = "", "data: [DONE]\n\n"  # what a stream begins and ends with
    num_prompts = 1  # in the request's list

    def __init__(self, fields: Json) -> None:
        """`fields` are the request's, which may be wrong until a job has begun."""
        self._fields = fields
        self.requests: list[Request] = []  # of the jobs, once they have begun

    @property
    def per_prompt(self) -> int:
        """How many texts the request wants of each prompt."""
        return self._fields.get("n") or 1

    @property
    def num_choices(self) -> int:
        """How many texts the request wants."""
        return self.num_prompts * self.per_prompt

    def whole(self, body: Json) -> Json:
        """The body of a request that is answered at once; `body` is the service's answer."""
        return body

    def note(self, event: Json, number: int) -> None:
        """See an event of the request's job of this number, before it is shown."""

    def shown(self, event: Json, number: int) -> str:
        """What a stream shows of an event of the request's job of this number; "" is nothing."""
        has_choices = self.num_choices > 1
        if number > 1 and not has_choices:
            return ""
        text = {"text": "".join(text for text, _ in event["pieces"])}
        if number == 1 and not has_choices:
            return sse({"plain": brief(event) | text | {"ms": event["ms"]}})
        shown = public(event) if self._fields.get("trace") else brief(event)
        if "logprobs" in event:
            shown["logprobs"] = event["logprobs"]
        return sse(({"index": number} if has_choices else {}) | shown | text)

    def head(self, number: int, scores: Callable[[], list[Json | None]]) -> str:
        """What a stream shows of a job before its first event; `scores` gives the prompt's."""
        return ""

    def last(self, body: Json) -> Iterable[str]:
        """What a stream says when all is done."""
        return [sse(body)]

    def failed(self, error: RequestError) -> str:
        """What a stream says of an error: the status line is out."""
        return sse(error.body())


def stream(jobs: list[Job], shape: Shape, answer: Callable[[], Json]) -> Iterator[str]:
    """Jobs as server-sent events in this shape, then the `answer` or an error, and its closing.

    A stream that merely ended would look like a success. The jobs do not outlive it.
    """
    silent = set(range(len(jobs)))  # jobs without an event so far

    def head(number: int) -> str:
        silent.remove(number)
        return shape.head(number, partial(_scores_before, jobs, number))

    try:
        if opening := shape.opening:
            yield opening
        for number, events in read(jobs):
            text = head(number) if events and number in silent else ""
            for event in events:
                shape.note(event, number)
                text += shape.shown(event, number)
            if text or not events:
                yield text or PING
        if not any(job.cancelled for job in jobs):
            yield from filter(None, map(head, sorted(silent)))
            yield from shape.last(answer())
    except RequestError as error:
        yield shape.failed(error)
    except Exception as error:
        LOG.exception("the engine failed")
        yield shape.failed(engine_failure(error))
    finally:
        cancel(jobs)  # the client may have left
    if shape.closing:
        yield shape.closing


def _scores_before(jobs: list[Job], number: int) -> list[Json | None]:
    """The scores of the prompt of the job with this number, which the first of its choices has."""
    return trace.prompt_logprobs(jobs[number - number % jobs[number].request.n].sequence)


def sse(data: Json) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def setting(engine: Engine, options: Options) -> str:
    """One sentence: what the target is computed with on this machine, and whether that is exact."""
    model, fast, report = engine.target.model, engine.target.compiled, engine.target.report
    kind = weights_of(engine.target)["dtype"]
    backend = fast.description if fast else "in transformers' modules"
    count, device = torch.get_num_threads(), model.device.type
    where = f"{count} thread{'s' * (count > 1)}" if device == "cpu" else device
    kind = "the file's packed weights" if kind == "packed" else f"weights in {kind}"
    bits = "the same bits (checked) as" if report and report.is_exact else "other last bits than"
    drafted = f"where a draft is verified, logits have {bits} without it"
    return f"the target runs {backend} on {where}, with {kind}; {drafted}"


def weights_of(model: Model) -> Json:
    """A model in numbers: what a pass reads, and how much a text may hold."""
    config, fast = model.model.config.get_text_config(), model.compiled
    size = 1 if model.quantize == "int8" else model.model.dtype.itemsize
    kind, num_bytes = str(model.model.dtype).removeprefix("torch."), model.num_weights * size
    if model.fingerprint:  # a file as it is
        kind = "packed"
    if model.fingerprint or model.quantize == "int4":
        num_bytes = fast.num_bytes
    return {
        "parameters": model.num_weights,
        "layers": config.num_hidden_layers,
        "dtype": model.quantize or kind,
        "forms": sorted({panels.form for panels in fast.panels}) if fast else [],
        "weight_bytes": num_bytes,
        "vocabulary": model.vocab_size,
        "context": model.max_length,
    }


def health(engine: Engine, worker: Worker, options: Options) -> Json:
    """The body of GET /health: state, load, and acceptance over the server's life."""
    k, cache, report = options.num_speculative_tokens, engine.target.cache, engine.target.report
    by_drafter, by_rule = dict(engine.totals.by_drafter), dict(engine.totals.by_rule)
    controller, prefixes = engine.controller, engine.pool.prefixes
    entry = entry_of(options.title)
    total, recent = sum(by_drafter.values(), Statistics()), list(engine.totals.recent)
    return {
        "status": worker.status,
        "engine": None,  # the name of an engine that runs elsewhere
        "model": model_id(engine.target.name),  # not where its folder is
        "quantization": options.quantize,
        "compiled": bool(engine.target.compiled and engine.target.compiled.is_compiled),
        "trees": engine.pool.can_branch,
        "model_card": entry and entry.card,  # where a model of the catalogue comes from
        "target": weights_of(engine.target),
        "draft_model": engine.draft_model and weights_of(engine.draft_model),
        "chat_template": options.is_chat(engine.target.tokenizer),  # the page asks for it
        "drafter": engine.default_drafter,
        "drafters": list(engine.pool.choices),
        "num_speculative_tokens": k,
        "uptime_s": round(worker.uptime_s, 3),
        "num_requests_running": worker.num_running,
        "num_requests_waiting": worker.num_waiting,
        "bitwise_lossless": bool(report and report.is_exact),
        "exactness": report and report.as_dict(),
        "kv_cache_capacity_tokens": cache.num_rows * cache.max_length,
        "kv_cache_usage_perc": round(sum(cache.lengths) / (cache.num_rows * cache.max_length), 4),
        "prefix_cache": prefixes and prefixes.as_dict(),
        "num_cycles_without_masks": engine.pool.num_late,  # that a text sat out, for its grammar
        "speculative_decoding": total.counters(k)
        | {"recent_acceptance_rate": ratio(sum(a for _, a in recent), sum(d for d, _ in recent))}
        | total.per_position()
        | {
            "per_drafter": {n: s.counters(k) | s.per_position() for n, s in by_drafter.items()},
            "per_rule": {rule: s.counters(k) for rule, s in by_rule.items()},
            "formulas": FORMULAS,
        },
        "controller": controller
        and {  # what it has measured, and last said of each drafter
            "costs_by_batch": _costs_by_batch(controller.costs),
            "curve": worker.measurement and worker.measurement.curve.pass_ms,
            "last": {n: str(decision) for n, decision in dict(engine.planner.decisions).items()},
        },
        "warnings": _warnings(engine),
    }


def _costs_by_batch(costs: Costs) -> Json:
    """What passes and drafts take, by class of batches, as of the smallest batch of each."""
    classes = {}
    measured = sorted({name for name, _ in list(costs.drafts)})
    for size in sorted(costs.passes):
        batch = 1 << size - 1
        prices = costs.prices(batch, batch)
        classes["1" if batch == 1 else f"{batch} to {2 * batch - 1}"] = {
            "pass_ms": round(prices.plain_ms, 4),
            "token_ms": round(fmean(prices.rows_ms[:_FEW]), 4),
            "draft_step_ms": {n: round(prices.drafts[n].first_ms, 4) for n in measured},
        }
    return classes


def _warnings(engine: Engine) -> list[str]:
    warnings, num_faults = [], engine.totals.num_faults
    fate = "failed: --strict" if engine.pool.is_strict else "went on without it"
    for name, count in dict(engine.pool.failures).items():
        warnings.append(f"failures of {name}: {count}; these requests {fate}")
    if num_faults:
        warnings.append(f"failed forwards of the target: {num_faults}; they were tried again")
    for name, statistics in engine.totals.by_drafter.items():
        num_drafts = sum(statistics.drafted_at[:1])
        share = ratio(sum(statistics.accepted_at[:1]), num_drafts)
        if num_drafts >= _MIN_DRAFTS_TO_JUDGE and share < _POOR_FIRST_ACCEPTANCE:
            warnings.append(f"{name}: only {share:.0%} of first draft tokens are accepted")
    return warnings
