"""Requests that another engine carries out, in the place of the worker and its jobs.

    handler thread                       one thread for each request
    submit(wanted) ── a place, or 429 ─→ Client.events
    read(jobs)        ← news ─────────── an event of what the engine says, its end, or an error

While a client reads slowly nothing is read for it, and the engine notices. Leaving early closes the
connection, which cancels the request in the engine.

What an engine does not report is None: a token's drafter, p, q, u, the cache, and times within a
cycle. An event is what came at once, and not a cycle.
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from messages import Json, Request
from serving.options import Options
from serving.statistics import Statistics
from serving.worker import Admission, Job

from .client import Client, broke_off, hang_up

_FIRST_S = 1.0  # to wait for a first token before our stream begins
_BEHIND_S = 0.05
_LONGEST_TOKEN = 1024  # characters


@dataclass(frozen=True)
class Wanted(Request):
    """A request whose prompt the engine reads: a text, token ids, or the turns of a chat."""

    prompt: Any = ""  # type: ignore[assignment]
    seed: int | None = None  # type: ignore[assignment]  # None: the engine chooses
    max_tokens: int | None = None  # type: ignore[assignment]  # None: to the end of the context
    is_chat: bool = False
    is_streamed: bool = True
    limit: int = 1 << 20  # of tokens, also where max_tokens is None
    handed_on: Json = field(default_factory=dict)  # fields as they were sent

    def body(self, model: str) -> tuple[str, Json]:
        """Where to send it, and what."""
        sampling = self.sampling
        fields: Json = {
            "model": model,
            "messages" if self.is_chat else "prompt": self.prompt,
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            # All of them: an engine may have defaults of the model's.
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        more = {"max_tokens": self.max_tokens, "stop": list(self.stop) or None, "seed": self.seed}
        more |= sampling.penalties | {"logit_bias": dict(sampling.logit_bias) or None}
        fields |= {name: value for name, value in more.items() if value is not None}
        fields |= self.handed_on
        if self.logprobs is not None and self.is_chat:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if not self.is_streamed:
            fields["stream_interval"] = 32  # tokens at once: nobody reads them one by one
        return "/v1/chat/completions" if self.is_chat else "/v1/completions", fields


@dataclass
class Told:
    """What an engine has sent for a request, in the place of the core's Sequence."""

    request: Wanted
    output: list[int] = field(default_factory=list)
    has_ids: bool = True  # whether the engine sends token ids
    logprobs: list[Json] = field(default_factory=list)
    usage: Json = field(default_factory=dict)
    speculation: Json = field(default_factory=dict)  # vLLM's, of this request
    finish_reason: str | None = None
    pieces: list[str] = field(default_factory=list)  # of the text, one for each event
    num_characters: int = 0
    is_cut: bool = False  # the engine went on behind the last token that was asked for

    @property
    def text(self) -> Any:
        """An object with attributes of a TextStream. Which stop string it was is not told."""
        return SimpleNamespace(text="".join(self.pieces), stopped_by=None)

    @property
    def tokenizer(self) -> Any:
        """Gives the prompt back as it was sent."""
        return SimpleNamespace(decode=str)

    @property
    def statistics(self) -> Statistics:
        """What the log asks for: of drafts the engine tells two counts, of passes none."""
        names = "num_accepted_draft_tokens", "num_draft_tokens"
        return Statistics(**{name: self.speculation.get(name) or 0 for name in names})

    @property
    def num_tokens(self) -> int:
        """Tokens of the text, by the engine's count where it has sent one."""
        return self.usage.get("completion_tokens") or len(self.output)

    def take(self, chunk: Json) -> Json | None:
        """Note what came. Returns an event for the client, or None if there is no news.

        Raises TypeError, ValueError, LookupError or AttributeError for another shape than vLLM's.
        """
        usage, metrics = (_checked(dict, chunk.get(name), {}) for name in ("usage", "metrics"))
        speculation = _checked(dict, metrics.get("speculative_decoding"), {})
        for name, count in (*usage.items(), *speculation.items()):
            if name.endswith(("_tokens", "_steps")) and _checked(int, count, 0) < 0:
                raise ValueError
        choice = _checked(dict, next(iter(_checked(list, chunk.get("choices"), [])), None), {})
        ids = [_checked(int, token, None) for token in choice.get("token_ids") or []]
        text = choice.get("text") or _checked(dict, choice.get("delta"), {}).get("content")
        text, reason = _checked(str, text, ""), _checked(str, choice.get("finish_reason"), None)
        logprobs = _logprobs(choice["logprobs"], ids) if choice.get("logprobs") else []
        self.num_characters += len(text)
        tokens = max(len(self.output) + len(ids), len(self.logprobs) + len(logprobs))
        tokens = max(tokens, len(self.pieces), self.num_characters // _LONGEST_TOKEN)
        if tokens > self.request.limit:
            self.finish_reason, self.is_cut = "length", True
            return None
        self.usage, self.speculation = usage or self.usage, speculation or self.speculation
        self.finish_reason = reason or self.finish_reason
        self.has_ids &= bool(ids) or not text
        self.output += ids
        self.logprobs += logprobs
        if not ids and not text:
            return None
        shown = [{"id": token, "kind": None} for token in ids]
        event: Json = {"step": len(self.pieces), "tokens": shown, "pieces": [(text, None)]}
        self.pieces.append(text)
        if self.request.logprobs is not None:
            event["logprobs"] = logprobs
        return event


def _checked(kind: type, value: Any, otherwise: Any) -> Any:
    """A value of an engine's answer, `otherwise` for null. Raises TypeError for another type."""
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError
    return otherwise if value is None else value


def _logprobs(data: Json, ids: list[int]) -> list[Json]:
    """vLLM's log-probabilities as /generate has them; an id that it does not send is None."""
    entries: list[Json] = []
    if "content" in data:  # a chat's
        for entry in data["content"] or []:
            top = [_entry(one["token"], one["logprob"]) for one in entry.get("top_logprobs") or []]
            entries.append(_entry(entry["token"], entry["logprob"]) | {"top_logprobs": top})
    else:
        tops = data.get("top_logprobs") or [None] * len(data["tokens"])
        for token, logprob, top in zip(data["tokens"], data["token_logprobs"], tops, strict=True):
            listed = [_entry(*pair) for pair in (top or {}).items()]
            entries.append(_entry(token, logprob) | {"top_logprobs": listed})
    for entry, token in zip(entries, ids, strict=False):
        entry["id"] = token
    return entries


def _entry(token: str, logprob: float) -> Json:
    return {"id": None, "token": _checked(str, token, ""), "logprob": max(logprob, -9999.0)}


class RemoteJob(Job):
    """A request that another engine carries out."""

    sequence: Told  # type: ignore[assignment]
    is_behind: Callable[[], bool]  # whether its client has yet to read what it was sent

    def __init__(
        self, wanted: Wanted, timeout_s: float, is_behind: Callable[[], bool],
        first: "RemoteJob | None" = None,
    ) -> None:  # fmt: skip
        """`first` is the job of the request's first choice, if this is another one."""
        super().__init__(wanted, timeout_s, entry=first)
        self.sequence, self.is_behind = Told(wanted), is_behind
        self.heard = self.submitted  # when the engine last said something
        self._socket: socket.socket | None = None

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.sequence.usage.get("prompt_tokens")

    @property
    def num_cached(self) -> int | None:
        return (self.sequence.usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def cancel(self) -> None:
        """The client has left: close the connection, so that the engine stops at once."""
        super().cancel()
        if self._socket:
            hang_up(self._socket)

    def await_first(self) -> None:
        """Wait for the first event, if not for long. Raises RequestError.

        So what the engine refuses is an error with a status, also where the answer is streamed.
        """
        with self._changed:
            self._sleep(_FIRST_S)
            has_begun = bool(self._news)
        if not has_begun:  # else the stream tells of a failure after what came before it
            self._check()

    def carry_out(self, relay: "Relay") -> None:
        """Send it, and hand on what the engine says, to the end. Raises RequestError."""
        self.began = self.heard = time.monotonic()
        connection = relay.client.connect(relay.options.stall_limit)
        self._socket = connection.sock
        if self.cancelled:  # before there was a socket
            hang_up(self._socket)
        for chunk in relay.client.events(connection, *self.request.body(relay.model)):
            self.heard = time.monotonic()
            try:
                event = self.sequence.take(chunk)
            except (TypeError, ValueError, LookupError, AttributeError):
                raise broke_off("an event of its stream has another shape than vLLM's") from None
            if event:
                self.note_first()
                self.put(event)
            while self.is_behind() and not self.cancelled:
                time.sleep(_BEHIND_S)  # and read nothing from the engine
            if self.cancelled or self.sequence.is_cut:
                return
        if self.sequence.finish_reason is None:
            raise broke_off("its stream ended without a reason")


class Relay(Admission):
    """What stands where a worker does: places for requests, and the state of the engine."""

    def __init__(self, client: Client, model: str, options: Options) -> None:
        """`model` is the name by which the engine knows it."""
        super().__init__(options)
        self.client, self.model = client, model

    def submit(self, wanted: Wanted, is_behind: Callable[[], bool]) -> list[RemoteJob]:
        """Queue a request's choices. Raises RequestError: 429 if the queue is full, 503 in the end.

        Each is a request to the engine.
        """
        jobs: list[RemoteJob] = []
        for each in wanted.choices:
            limit_s = self.options.request_timeout
            jobs.append(RemoteJob(each, limit_s, is_behind, jobs[0] if jobs else None))
        with self._changed:
            self._queue(jobs)
            self._admit()
        return jobs

    def _admit(self) -> None:
        """Begin what waits and has a place now. With the lock held."""
        for job in self._give_places():
            try:
                threading.Thread(target=self._run, args=(job,), name="relay", daemon=True).start()
            except RuntimeError as error:  # no more threads
                self._running.remove(job)
                self._end(job, error)

    def _run(self, job: RemoteJob) -> None:
        """Carry a request out, and give its place to the next."""
        failure: Exception | None = None
        try:
            job.carry_out(self)
        except Exception as error:  # of the engine's: nobody else must be left waiting
            failure = None if job.cancelled else error
        with self._changed:
            self._running.remove(job)
            self._end(job, job.failure or failure)
            self._admit()
            self._changed.notify_all()

    def _finish(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._running or self._waiting), timeout_s)
