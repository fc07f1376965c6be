"""The bodies that the server sends: the answer to a request, its stream's events, and /health.

They read the core's sequences and engine, handed in; docs/api.md says what their fields mean.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch

from runtime.models.catalogue import entry_of
from runtime.statistics import FORMULAS, Statistics, ratio
from runtime.values import PLAIN, Engine, Json, Model, RequestError, TextSequence, engine_failure

from .events import brief, public, trace
from .fields import IDS
from .options import Options
from .parsing import comparison, formats, model_id
from .worker import LOG, LONGEST_POLL_S, Job, Run, Worker

PING = ": ping\n\n"  # a proxy might take silence for an end
_MIN_DRAFTS_TO_JUDGE = 100
_POOR_FIRST_ACCEPTANCE = 0.2


def answer(runs: list[Run], notes: list[str], dtype: torch.dtype) -> Json:
    """What /generate returns for the runs of a finished job of a target in `dtype`.

    Several are choices, for each of the prompts: the body is the first one's, with all of them in
    `choices`. Where a comparison was asked for, every second run decodes the request plainly, the
    first of these with a trace. `notes` are warnings; there may be more.
    """
    request = runs[0].sequence.request  # as it was admitted
    texts = runs[: request.texts]
    bodies = [_of_text(run) for run in texts]
    warnings = [note for run in texts for note in _warnings_of(run.sequence)]
    body = bodies[0] | {
        "warnings": list(dict.fromkeys(notes + warnings)),
        "usage": _usage([run.sequence for run in texts], request.n),
    }
    if len(texts) > 1:
        body["choices"] = [{"index": i} | each for i, each in enumerate(bodies)]
    elif len(runs) > 1:
        sequences = [run.sequence for run in runs]
        pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
        body["compare"] = comparison.comparison(pairs, runs[1].events, dtype)
    return body


def _of_text(run: Run) -> Json:
    """What an answer says of one text."""
    s, request, statistics = run.sequence, run.sequence.request, run.sequence.statistics
    counters = statistics.counters(request.num_speculative_tokens if request.drafter else 0)
    decision = s.drafting.task.decision
    body = {
        "text": s.text.text,
        "token_ids": s.output,
        "finish_reason": s.finish_reason,
        "stop_reason": s.text.stopped_by,
        "seed": request.seed,
        "metrics": _times(run)
        | {"speculative_decoding": {"drafter": request.drafter or PLAIN} | counters}
        | {"controller": decision and decision.as_dict()},
        "timings": _timings(s),
    }
    if request.logprobs is not None:
        body["logprobs"] = s.logprobs
    if IDS in request.returns:
        body["prompt_token_ids"] = list(request.prompt)
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = trace.prompt_logprobs(s)
    if request.trace:
        body["trace"] = list(map(public, run.events))
    return body


def _warnings_of(s: TextSequence) -> list[str]:
    """What went wrong with a text."""
    if s.matcher is None or s.matcher.may_end:
        return s.warnings
    limit = "a stop string" if s.text.stopped_by is not None else "a stop token"
    limit = "max_tokens" if s.finish_reason == "length" else limit
    return [*s.warnings, f"{limit} cut the text, so it is not a whole one of its grammar"]


def _usage(sequences: list[TextSequence], n: int) -> Json:
    """How many tokens a request's texts have; a prompt, which has `n` of them, is counted once."""
    prompt = sum(len(s.request.prompt) for s in sequences[::n])
    cached = sum(s.drafting.num_cached for s in sequences[::n])
    completion = sum(len(s.output) for s in sequences)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details: Counter[str] = Counter()
    for s in sequences:
        details.update(formats.reasoning_tokens(s) if formats else {})
        if s.request.prediction:
            for fate in ("accepted", "rejected"):
                details[f"{fate}_prediction_tokens"] += s.drafting.predicted[fate]
    return usage | ({"completion_tokens_details": dict(details)} if details else {})


def _times(run: Run) -> Json:
    """Its times in ms as vLLM names them; where there is nothing to divide by, one is left out.

    A mean is over the tokens after the first; tokens a second are from the place on.
    """
    if run.first_token is None or run.ended is None:
        return {}
    num_tokens = len(run.sequence.output)
    decoding, computing = run.ended - run.first_token, run.ended - run.began
    spans = {
        "time_to_first_token_ms": run.first_token - run.submitted,
        "generation_time_ms": decoding,
        "queue_time_ms": run.began - run.submitted,
    }
    if num_tokens > 1:
        spans["mean_itl_ms"] = decoding / (num_tokens - 1)
    times = {name: round(span * 1e3, 3) for name, span in spans.items()}
    return times | {"tokens_per_second": round(num_tokens / computing, 3) if computing else 0}


def _timings(s: TextSequence) -> Json:
    """The block `timings` of llama.cpp: of both parts tokens, times and rates.

    The first token comes with the prompt.
    """
    num_cached, timings = s.drafting.num_cached, s.statistics.timings()
    counts = {"cache_n": num_cached, "prompt_n": len(s.request.prompt) - num_cached}
    rates: Json = {}
    parts = {"prompt": counts["prompt_n"], "predicted": timings["predicted_n"] - 1}
    for part, count in parts.items():
        ms = timings[f"{part}_ms"] if count > 0 else 0.0
        rates[f"{part}_per_token_ms"] = ms / count if ms else 0.0
        rates[f"{part}_per_second"] = 1e3 / ms * count if ms else 0.0
    return counts | timings | rates


class Shape:
    """How /generate writes an answer: whole, or as a stream of an event for each cycle.

    Numbers are those of the job's runs. Of several choices an event has the `index`. The events of
    a comparison's plain decoding stand under "plain". It is measured several times, and the first
    time is shown.
    """

    opening, closing = "", "data: [DONE]\n\n"  # what a stream begins and ends with
    job: Job  # once it has begun

    def whole(self, body: Json) -> Json:
        """The body of a request that is answered at once; `body` is the service's answer."""
        return body

    def shown(self, event: Json, number: int) -> str:
        """What a stream shows of an event of the run of this number; "" is nothing."""
        has_choices = self.job.request.texts > 1
        if number > 1 and not has_choices:
            return ""
        text = {"text": "".join(text for text, _ in event["pieces"])}
        if number == 1 and not has_choices:
            return sse({"plain": brief(event) | text | {"ms": event["ms"]}})
        shown = public(event) if self.job.request.trace else brief(event)
        if "logprobs" in event:
            shown["logprobs"] = event["logprobs"]
        return sse(({"index": number} if has_choices else {}) | shown | text)

    def last(self, body: Json) -> Iterable[str]:
        """What a stream says when all is done."""
        return [sse(body)]

    def failed(self, error: RequestError) -> str:
        """What a stream says of an error: the status line is out."""
        return sse(error.body())


def stream(job: Job, shape: Shape, answer: Callable[[], Json]) -> Iterator[str]:
    """A job as server-sent events in this shape, then the `answer` or an error, and its closing.

    A stream that merely ended would look like a success. The job does not outlive it.
    """
    try:
        if opening := shape.opening:
            yield opening
        said_at = time.monotonic()
        for news in job.read():
            text = "".join(shape.shown(event, number) for number, event in news)
            if text or not news or time.monotonic() - said_at > LONGEST_POLL_S:
                said_at = time.monotonic()
                yield text or PING
        if not job.cancelled:
            yield from shape.last(answer())
    except RequestError as error:
        yield shape.failed(error)
    except Exception as error:
        LOG.exception("the engine failed")
        yield shape.failed(engine_failure(error))
    finally:
        job.cancel()  # the client may have left
    if shape.closing:
        yield shape.closing


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
    """A model in numbers: what a pass reads at most, and how much a text may hold."""
    config, fast = model.model.config.get_text_config(), model.compiled
    dtype, is_int8 = model.model.dtype, model.quantize == "int8"
    kind = "packed" if model.fingerprint else str(dtype).removeprefix("torch.")  # a file as it is
    num_bytes = fast.num_bytes if fast else model.num_weights * (1 if is_int8 else dtype.itemsize)
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
    """The body of GET /health: state, load, and acceptance in all texts that have ended."""
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
        "uptime_s": round(time.monotonic() - worker.began, 3),
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
            "costs_by_batch": controller.costs.by_batch(),
            "curve": worker.measurement and worker.measurement.curve.pass_ms,
            "last": {n: str(decision) for n, decision in dict(engine.planner.decisions).items()},
        },
        "warnings": _warnings(engine),
    }


def _warnings(engine: Engine) -> list[str]:
    warnings, num_faults = [], engine.totals.num_faults
    fate = "these requests failed: --strict" if engine.pool.is_strict else "no answer was lost"
    for name, count in dict(engine.pool.failures).items():
        warnings.append(f"failures of {name}: {count}; {fate}")
    if num_faults:
        warnings.append(f"failed forwards of the target: {num_faults}")
    for name, statistics in engine.totals.by_drafter.items():
        num_drafts = sum(statistics.drafted_at[:1])
        share = ratio(sum(statistics.accepted_at[:1]), num_drafts)
        if num_drafts >= _MIN_DRAFTS_TO_JUDGE and share < _POOR_FIRST_ACCEPTANCE:
            warnings.append(f"{name}: only {share:.0%} of first draft tokens are accepted")
    return warnings
