"""The routes of this server with another engine behind them.

    create_app(engine, options) → Flask: POST /generate, /v1, GET /health, /metrics and the page

Requests are checked as ever. What the engine cannot do is refused in a sentence, and what it cannot
tell is null.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Flask, Response, g, request

import demo
from control.statistics import FORMULAS, Statistics
from drafters.pool import PLAIN
from messages import Json, RequestError
from models.prompts import read_turns
from page import register_page
from serving.answers import body_of
from serving.connection import CLIENT_BEHIND
from serving.http import base_app, cancel_if_left, read_body, respond, with_status
from serving.metrics import Figures, register_metrics
from serving.openai import register_routes
from serving.options import Options
from serving.parsing import parse_fields

from .client import Engine, positions_in
from .relay import Relay, RemoteJob, Told, Wanted

_QUESTION_S = 2.0  # for the engine to say how it is
_BY_POSITION = "the engine does not count drafts by position"
_FORMULAS = FORMULAS | {
    "num_draft_tokens": "drafted tokens, as the engine counts them",
    "acceptance_rate_per_position": f"position i accepted / drafts; {_BY_POSITION}",
    "conditional_acceptance_rate_per_position": f"i accepted / i - 1 accepted; {_BY_POSITION}",
}


# ------------------------------------------------------------------------------------ requests


def refuse_what_it_cannot(body: Json, engine: Engine) -> None:
    """Raises RequestError for what only this server's own engine can do."""
    does_draft, who = engine.drafter is not None, f"the engine ({engine.kind})"
    always = "drafts for every request, or for none"
    for name, is_asked, why in (
        ("trace", body.get("trace") is True, "does not tell p, q, u or its cache"),
        ("compare", body.get("compare") is True, "cannot decode plainly beside its drafter"),
        ("verification", body.get("verification") == "coupled", "has a rule of its own"),
        ("speculative", does_draft and body.get("speculative") is False, always),
        ("drafter", does_draft and body.get("drafter") == PLAIN, always),
        ("num_speculative_tokens",
         body.get("num_speculative_tokens") not in (None, engine.num_spec_tokens),
         f"drafts {engine.num_spec_tokens or 'its own number of'} tokens in every cycle"),
    ):  # fmt: skip
        if is_asked:
            raise RequestError(f"{name}: {who} {why}", param=name)


def parse(body: Json, engine: Engine, options: Options) -> tuple[Wanted, bool, list[str]]:
    """A request's fields, defaults filled in: (request, stream, warnings). Raises RequestError."""
    defaults = options.for_requests | {"drafter": engine.drafter}
    is_seeded = body.get("seed", options.seed) is not None
    is_open = options.max_tokens is None and request.path == "/v1/chat/completions"
    known = engine.name, engine.max_length, engine.vocab_size
    given, notes = parse_fields(body, None, engine.choices, defaults, *known)
    prompt, room = given["prompt"], engine.max_length
    if isinstance(prompt[0], int):  # a text's tokens only the engine can count
        room -= len(prompt)
    refuse_what_it_cannot(body, engine)
    stream, _ = given.pop("stream"), given.pop("compare")
    if is_open and body.get("max_tokens") is None:
        given["max_tokens"] = None
    elif given["max_tokens"] > room:
        notes.append(
            f"max_tokens was lowered from {given['max_tokens']} to {room}: the context holds "
            f"{engine.max_length} tokens"
        )
        given["max_tokens"] = room
    if not is_seeded:
        given["seed"] = None  # the engine's own noise: one seed a request would slow it down
    is_chat = body.get("chat") is True
    limit = given["max_tokens"] or room
    return Wanted(**given, is_chat=is_chat, is_streamed=stream, limit=limit), stream, notes


# ------------------------------------------------------------------------------------- answers


def answer(jobs: list[RemoteJob], notes: list[str]) -> Json:
    """What /generate returns for a finished job."""
    job = jobs[0]
    told: Told = job.sequence
    names = "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"
    usage = {name: told.usage.get(name) for name in names} | {"completion_tokens": told.num_tokens}
    ids = told.output if told.has_ids else None
    return body_of(told, ids, notes, usage, rates(told.speculation), timings(job))


_COUNTS = {  # by the names that vLLM's metrics have for them
    "num_spec_steps": "drafts", "num_draft_tokens": "draft_tokens",
    "num_accepted_draft_tokens": "accepted_tokens",
}  # fmt: skip


def rates(told: Json) -> Json:
    """Counters of drafts, as the engine tells them, what follows from them, and null for others."""
    counted = Statistics(*(told.get(name) or 0 for name in _COUNTS)).counters(0)
    made = "draft_acceptance_rate", "mean_acceptance_length"
    return {name: counted[name] if name in made else told.get(name) for name in counted}


def timings(job: RemoteJob) -> Json:
    """Times as they are seen from here: the first token's is on the way, so is the queue there."""
    end, first = job.heard, job.first_token
    found = job.sequence.speculation
    return {
        "prompt_ms": None if first is None else round((first - (job.began or first)) * 1e3, 3),
        "predicted_ms": None if first is None else round((end - first) * 1e3, 3),
        "predicted_n": job.sequence.num_tokens,
        "draft_n": found.get("num_draft_tokens"),
        "draft_n_accepted": found.get("num_accepted_draft_tokens"),
    } | dict.fromkeys(("draft_ms", "verify_ms", "other_ms"))


# ------------------------------------------------------------------------- health and metrics


def acceptance(metrics: dict[str, float], k: int | None) -> Json:
    """The `speculative_decoding` block of /health from the engine's own counters."""
    counts = {name: int(value) for name, value in metrics.items() if name.startswith("spec_")}
    told = {name: counts.get(f"spec_decode_num_{what}_total") for name, what in _COUNTS.items()}
    at, drafts = positions_in(counts), told["num_spec_steps"] or 0
    reached = [drafts, *at][: len(at)]
    positions = Statistics(drafted_at=[drafts] * len(at), reached_at=reached, accepted_at=at)
    told |= {"num_spec_tokens": k or len(at) or None, "recent_acceptance_rate": None}
    return told | rates(told) | positions.per_position()


def state(relay: Relay, engine: Engine) -> tuple[str, dict[str, float], list[str]]:
    """The status for /health, the engine's metrics, and warnings."""
    if relay.draining:
        return "draining", {}, []
    try:
        engine.client.ask("/health", limit_s=_QUESTION_S)
    except RequestError as error:
        return "stuck" if error.status == 504 else "dead", {}, [error.message]
    metrics, warnings = dict[str, float](), list[str]()
    try:
        metrics = engine.client.metrics(_QUESTION_S)
    except RequestError as error:
        if error.status == 504:
            return "stuck", {}, [error.message]
        # Some engines count only when they are told to.
        warnings.append(f"the engine tells no metrics: {error.message}")
    return relay.status, metrics, warnings


def health(engine: Engine, relay: Relay, options: Options) -> Json:
    """The body of GET /health. What the engine does not tell is null."""
    status, metrics, warnings = state(relay, engine)
    told = acceptance(metrics, engine.num_spec_tokens)
    nulls = (
        "quantization", "compiled", "trees", "model_card", "target", "bitwise_lossless",
        "exactness", "kv_cache_capacity_tokens", "controller",
    )  # fmt: skip
    hits, asked = (metrics.get(f"prefix_cache_{what}_total") for what in ("hits", "queries"))
    cache = {"num_blocks": None, "num_bytes": None, "capacity_bytes": None}
    return {
        "status": status,
        "engine": {"name": engine.kind, "version": engine.version},
        "model": engine.name,
        **dict.fromkeys(nulls),
        "chat_template": engine.is_chat and not options.raw,
        "drafter": engine.drafter or PLAIN,
        "drafters": list(engine.choices),
        "num_speculative_tokens": told["num_spec_tokens"],
        "uptime_s": round(relay.uptime_s, 3),
        "num_requests_running": relay.num_running,
        "num_requests_waiting": relay.num_waiting,
        "kv_cache_usage_perc": metrics.get("kv_cache_usage_perc"),
        "prefix_cache": None if asked is None else cache | {
            "queried_tokens": int(asked), "hit_tokens": int(hits or 0)
        },
        "speculative_decoding": told | {
            "per_drafter": {engine.drafter: told} if engine.drafter else {},
            "per_rule": None,
            "formulas": _FORMULAS,
        },
        "warnings": warnings,
    }  # fmt: skip


def figures_of(engine: Engine) -> Figures:
    """The engine's counters under this server's names."""
    told = engine.client.metrics(_QUESTION_S)
    values = {name.removesuffix("_total"): value for name, value in told.items()}
    return Figures(values, positions_in(told))


# ------------------------------------------------------------------------------ the application


def create_app(engine: Engine, options: Options) -> Flask:
    """The web application in front of an engine that answers."""
    relay, app = Relay(engine.client, engine.model, options), base_app(options)
    is_chat = engine.is_chat and not options.raw
    register_page(app, demo.read_prompts(is_chat))
    app.extensions["worker"] = relay
    register_metrics(app, partial(figures_of, engine), relay)

    def begin(body: Json) -> tuple[list[RemoteJob], bool, list[str]]:
        """The request's job, whether to stream, and warnings."""
        wanted, stream, notes = parse(body, engine, options)
        is_behind: Callable[[], bool] = request.environ.get(CLIENT_BEHIND, lambda: False)
        g.jobs = [relay.submit(wanted, is_behind)]
        cancel_if_left(g.jobs)
        if stream:
            g.jobs[0].await_first()
        return g.jobs, stream, notes

    def read_chat(messages: Any, body: Json) -> None:
        """Put a conversation into the fields, for the engine to write as a text."""
        body |= {"prompt": read_turns(messages), "chat": True}

    @app.post("/generate")
    def generate() -> Response | Json:
        """Answer when all is done, or stream it."""
        return respond(*begin(read_body()), answer)

    @app.get("/health")
    def get_health() -> tuple[Json, int]:
        return with_status(health(engine, relay, options))

    register_routes(app, engine.name, engine.max_length, begin, answer, read_chat)
    return app
