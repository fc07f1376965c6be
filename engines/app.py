"""Another engine as the service behind this server's routes.

Requests are checked as for the core's engine. What this one cannot do is refused in a sentence, and
what it does not report is null.
"""

import os
from typing import Any

from flask import request

from drafters.pool import PLAIN
from messages import Json, RequestError
from models.fim import Gap
from models.loading import StartError
from models.prompts import TEMPLATE_FIELDS, read_turns, template_options
from models.tools import Tools
from serving import masks
from serving.answers import body_of, of_choices
from serving.connection import CLIENT_BEHIND
from serving.fields import LIMITS, wrong
from serving.formats import constraint_of
from serving.metrics import Figures
from serving.options import Options
from serving.parsing import READ, parse_fields
from serving.service import Service, watched
from serving.statistics import FORMULAS, Statistics
from serving.trace import IDS, NAMES

from .client import Client, Engine, positions_in
from .relay import Relay, RemoteJob, Wanted

KEY_VARIABLE = "SPECULATIVE_ENGINE_KEY"  # which an engine at an address asks for
_QUESTION_S = 2.0  # for the engine to say how it is
_BY_POSITION = "the engine does not count drafts by position"
_FORMULAS = FORMULAS | {
    "num_draft_tokens": "drafted tokens, as the engine counts them",
    "acceptance_rate_per_position": f"position i accepted / drafts; {_BY_POSITION}",
    "conditional_acceptance_rate_per_position": f"i accepted / i - 1 accepted; {_BY_POSITION}",
}
_COUNTS = {  # by the names that vLLM's metrics have for them
    "num_spec_steps": "drafts", "num_draft_tokens": "draft_tokens",
    "num_accepted_draft_tokens": "accepted_tokens",
}  # fmt: skip
_UNKNOWN = (  # of /health: what no engine tells
    "quantization", "compiled", "trees", "model_card", "target", "bitwise_lossless",
    "exactness", "kv_cache_capacity_tokens", "controller",
)  # fmt: skip
# Fields of ours that an engine has as well, by its kind.
_HANDED_ON = {
    "vllm": (*masks.NAMES, *READ, NAMES, *TEMPLATE_FIELDS),
    "sglang": (
        "ignore_eos", "min_tokens", "stop_token_ids", "continue_final_message",
        "chat_template_kwargs",
    ),
}  # fmt: skip


def _handed_on(body: Json, fields: Json, how: Json, engine: Engine) -> Json:
    """The fields that the engine honours in our place. Raises RequestError for the first other."""
    sent = {name: body.get(name) for name in (*READ, NAMES, IDS)} | fields.pop("masks") | how
    if engine.kind == "vllm" and how.get("continue_final_message"):
        sent["add_generation_prompt"] = False
    sent["typical_p"] = fields["sampling"].penalties.get("typical_p")  # None if it is off
    sent["stream_options"] = (body.get("stream_options") or {}).get("continuous_usage_stats")
    wanted = {
        name: value
        for name, value in sent.items()
        if value or (name == "add_generation_prompt" and value is False)
    }
    for name in wanted:
        if name not in _HANDED_ON.get(engine.kind, ()):
            raise wrong(name, f"is not supported: the engine ({engine.kind}) does not know it")
    return wanted


def refuse_what_it_cannot(body: Json, engine: Engine) -> None:
    """Raises RequestError for what only the engine inside this server can do."""
    does_draft, subject = engine.drafter is not None, f"the engine ({engine.kind})"
    always = "drafts for every request, or for none"
    for name, is_asked, why in (
        ("trace", body.get("trace") is True, "does not tell p, q, u or its cache"),
        ("compare", body.get("compare") is True, "cannot decode plainly beside its drafter"),
        ("verification", body.get("verification") == "coupled", "has a rule of its own"),
        ("prompt_logprobs", body.get("prompt_logprobs") is not None, "is not asked for them"),
        ("max_tokens", body.get("max_tokens") == 0, "generates at least one token"),
        ("prediction", bool(body.get("prediction")), "cannot draft from it"),
        ("speculative", does_draft and body.get("speculative") is False, always),
        ("drafter", does_draft and body.get("drafter") == PLAIN, always),
        ("num_speculative_tokens",
         body.get("num_speculative_tokens") not in (None, engine.num_spec_tokens),
         f"drafts {engine.num_spec_tokens or 'its own number of'} tokens in every cycle"),
    ):  # fmt: skip
        if is_asked:
            raise RequestError(f"{name}: {subject} {why}", param=name)
    if constraint := constraint_of(body):
        raise wrong(constraint[0], f"is not supported: {subject} writes texts without a format")


def parse(body: Json, engine: Engine, options: Options) -> tuple[Wanted, list[str]]:
    """A request's fields, defaults filled in, and warnings. Raises RequestError."""
    defaults = options.for_requests | {"drafter": engine.drafter}
    how = template_options(body) if body.get("chat") is True else {}
    fields, notes = parse_fields(body, engine, engine.choices, defaults)
    refuse_what_it_cannot(body, engine)
    fields["handed_on"] = _handed_on(body, fields, how, engine)
    room = engine.max_length
    if isinstance(fields["prompt"][0], int):  # a text's tokens only the engine can count
        room -= len(fields["prompt"])
    is_chat = body.get("chat") is True
    is_open = options.max_tokens is None and is_chat and request.path != "/generate"
    if is_open and all(body.get(name) is None for name in LIMITS):
        fields["max_tokens"] = None
    elif (fields["max_tokens"] or 0) > room:
        what = f"max_tokens was lowered from {fields['max_tokens']} to {room}"
        notes.append(f"{what}: the context holds {engine.max_length} tokens")
        fields["max_tokens"] = room
    if body.get("seed", options.seed) is None:
        fields["seed"] = None  # the engine draws its noise: a seed for each request is slow
    is_streamed, _ = fields.pop("stream"), fields.pop("compare")
    limit = fields["max_tokens"] or room
    return Wanted(**fields, is_chat=is_chat, is_streamed=is_streamed, limit=limit), notes


def rates(counts: Json) -> Json:
    """An engine's counters of drafts, what follows from them, and null for what it does not count.

    `counts` has numbers by the names of the `speculative_decoding` block.
    """
    counted = Statistics(**{name: counts.get(name) or 0 for name in _COUNTS}).counters(0)
    known = counts | {n: counted[n] for n in ("draft_acceptance_rate", "mean_acceptance_length")}
    return {name: known.get(name) for name in counted}


def timings(job: RemoteJob) -> Json:
    """Times as this server sees them: prompt_ms includes the network and the engine's queue."""
    first, counts = job.first_token, job.sequence.speculation
    spans_s = (None, None) if first is None else (first - (job.began or first), job.heard - first)
    prompt_ms, predicted_ms = (None if span is None else round(span * 1e3, 3) for span in spans_s)
    return {
        "cache_n": job.num_cached,
        "prompt_n": job.num_prompt_tokens and job.num_prompt_tokens - (job.num_cached or 0),
        "prompt_ms": prompt_ms,
        "predicted_ms": predicted_ms,
        "predicted_n": job.sequence.num_tokens,
        "draft_n": counts.get("num_draft_tokens"),
        "draft_n_accepted": counts.get("num_accepted_draft_tokens"),
    } | dict.fromkeys(("draft_ms", "verify_ms", "other_ms"))


def acceptance(metrics: dict[str, float], k: int | None) -> Json:
    """The `speculative_decoding` block of /health from the engine's counters."""
    counts = {name: int(value) for name, value in metrics.items() if name.startswith("spec_")}
    block: Json = {n: counts.get(f"spec_decode_num_{what}_total") for n, what in _COUNTS.items()}
    at, drafts = positions_in(counts), block["num_spec_steps"] or 0
    reached = [drafts, *at][: len(at)]
    positions = Statistics(drafted_at=[drafts] * len(at), reached_at=reached, accepted_at=at)
    block |= {"num_spec_tokens": k or len(at) or None, "recent_acceptance_rate": None}
    return block | rates(block) | positions.per_position()


class Remote(Service):
    """An engine that runs elsewhere, and the relay that hands it requests."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self.engine, self.options = engine, options
        self.worker = Relay(engine.client, engine.model, options)
        self.name, self.max_length = engine.name, engine.max_length
        self.is_chat = engine.is_chat and not options.raw
        self.call_form = None  # it is not bound to a grammar
        self.tokenizer, self.end_ids = None, []

    def begin(self, fields: Json, prompts: None = None) -> tuple[list[RemoteJob], bool, list[str]]:
        """Parse and queue a request. There are no `prompts`: `read_list` raises."""
        wanted, notes = parse(fields, self.engine, self.options)
        is_behind = request.environ.get(CLIENT_BEHIND, lambda: False)
        jobs = watched(self.worker.submit(wanted, is_behind))
        if wanted.is_streamed:
            jobs[0].await_first()
        return jobs, wanted.is_streamed, notes

    def read_list(self, prompts: list[Any], field: str) -> list[list[int]]:
        """Raises RequestError: only the engine could tell the ids of a text."""
        why = "is not supported" if field == "echo" else "must be one"
        raise RequestError(f"{field} {why}: the engine ({self.engine.kind}) reads it", param=field)

    def read_chat(
        self, messages: Any, fields: Json, tools: Tools | None = None, how: Json | None = None
    ) -> bool:
        """Put a conversation into the fields, for the engine to write as a text."""
        fields |= how or {}
        fields |= {"prompt": read_turns(messages), "chat": True}
        return False

    def read_infill(self, gap: Gap, fields: Json) -> None:
        """Raises RequestError: only the model's tokenizer knows the tokens around a gap."""
        why = f"the engine ({self.engine.kind}) fills in no gaps here"
        raise RequestError(f"suffix is not supported: {why}", param="suffix")

    def answer(self, jobs: list[RemoteJob], notes: list[str]) -> Json:
        bodies = [self._answer(job, notes) for job in jobs]
        return of_choices(bodies) if jobs[0].is_choice else bodies[0]

    def _answer(self, job: RemoteJob, notes: list[str]) -> Json:
        s = job.sequence
        names = "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"
        usage = {n: s.usage.get(n) for n in names} | {"completion_tokens": s.num_tokens}
        ids = s.output if s.has_ids else None
        return body_of(job, ids, notes, usage, rates(s.speculation), timings(job))

    def health(self) -> Json:
        engine, relay = self.engine, self.worker
        status, metrics, warnings = self._state()
        counters = acceptance(metrics, engine.num_spec_tokens)
        hits, asked = (metrics.get(f"prefix_cache_{what}_total") for what in ("hits", "queries"))
        prefixes = {"queried_tokens": int(asked or 0), "hit_tokens": int(hits or 0)}
        prefixes |= dict.fromkeys(("num_blocks", "num_bytes", "capacity_bytes"))
        of_drafter = {"per_drafter": dict.fromkeys(engine.choices, counters), "per_rule": None}
        return {
            "status": status,
            "engine": {"name": engine.kind, "version": engine.version},
            "model": engine.name,
            **dict.fromkeys(_UNKNOWN),
            "chat_template": self.is_chat,
            "drafter": engine.drafter or PLAIN,
            "drafters": list(engine.choices),
            "num_speculative_tokens": counters["num_spec_tokens"],
            "uptime_s": round(relay.uptime_s, 3),
            "num_requests_running": relay.num_running,
            "num_requests_waiting": relay.num_waiting,
            "kv_cache_usage_perc": metrics.get("kv_cache_usage_perc"),
            "prefix_cache": None if asked is None else prefixes,
            "speculative_decoding": counters | of_drafter | {"formulas": _FORMULAS},
            "warnings": warnings,
        }

    def _state(self) -> tuple[str, dict[str, float], list[str]]:
        """The status for /health, the engine's metrics, and warnings."""
        if self.worker.draining:
            return "draining", {}, []
        try:
            self.engine.client.ask("/health", limit_s=_QUESTION_S)
        except RequestError as error:
            return "stuck" if error.status == 504 else "dead", {}, [error.message]
        try:
            return self.worker.status, self.engine.client.metrics(_QUESTION_S), []
        except RequestError as error:
            if error.status == 504:
                return "stuck", {}, [error.message]
            # Some engines count only if an option asks for it.
            return self.worker.status, {}, [f"the engine tells no metrics: {error.message}"]

    def figures(self) -> Figures:
        """The engine's counters under this server's names."""
        metrics = self.engine.client.metrics(_QUESTION_S)
        values = {name.removesuffix("_total"): value for name, value in metrics.items()}
        return Figures(values, positions_in(metrics))


def connect(options: Options) -> Remote:
    """The engine at the address of --engine. Raises StartError if none answers there."""
    client = Client(options.engine, os.environ.get(KEY_VARIABLE))
    try:
        return Remote(Engine.ask(client), options)
    except RequestError as error:
        raise StartError(f"cannot use --engine {options.engine}: {error}") from error
