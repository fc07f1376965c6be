"""Requests that another engine carries out, in the place of the worker and its jobs.

    handler thread:  submit(wanted) → a place, or 429 → Client.stream → events, merged → its client

Each request is driven by the thread that answers it: it reads what the engine has sent by now and
hands that on as one event. A client that reads slowly is therefore read for slowly, and the engine
notices. Leaving early closes the connection, which cancels the request in the engine.

What an engine does not tell is None: who proposed a token, p, q, u, the cache, and times within a
cycle. An event is what came at once, and not a cycle.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from control.statistics import ratio
from messages import Request, RequestError
from serving.options import Options
from serving.worker import POLL_S, WHY_NOT, Job, Places, unavailable

from .client import Client, Exchange, broke_off

_FIRST_S = 1.0  # to wait for a first token before a stream of our own begins
_BEHIND_S = 0.05


@dataclass(frozen=True)
class Wanted(Request):
    """A request whose prompt the engine reads: a text, token ids, or the turns of a chat."""

    prompt: Any = ""  # type: ignore[assignment]
    seed: int | None = None  # type: ignore[assignment]  # None: the engine's own
    max_tokens: int | None = None  # type: ignore[assignment]  # None: to the end of the context
    is_chat: bool = False
    is_streamed: bool = True

    def body(self, model: str) -> tuple[str, dict[str, Any]]:
        """Where to send it, and what."""
        sampling = self.sampling
        fields: dict[str, Any] = {
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
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        if self.stop:
            fields["stop"] = list(self.stop)
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.logprobs is not None and self.is_chat:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if not self.is_streamed:
            fields["stream_interval"] = 32  # tokens at once: nobody reads them one by one
        return "/v1/chat/completions" if self.is_chat else "/v1/completions", fields


@dataclass
class Told:
    """What an engine has told of a request; stands where the engine's own Sequence does."""

    request: Wanted
    output: list[int] = field(default_factory=list)
    has_ids: bool = True  # whether the engine tells token ids
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)  # vLLM's, of this request
    finish_reason: str | None = None
    num_steps: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> Any:
        """With a `text` of its own, as a TextStream has it."""
        return SimpleNamespace(text="".join(self.pieces))

    @property
    def tokenizer(self) -> Any:
        """Gives the prompt back as it was sent."""
        return SimpleNamespace(decode=str)

    @property
    def statistics(self) -> Any:
        """What the log asks for."""
        rate = ratio(*map(self._count, ("num_accepted_draft_tokens", "num_draft_tokens")))
        return SimpleNamespace(passes=None, draft_acceptance_rate=rate)

    def _count(self, name: str) -> int:
        value = self.speculation.get(name)
        return value if isinstance(value, int) else 0

    @property
    def num_tokens(self) -> int:
        """Of the text, by the engine's own count where it has said."""
        return self.usage.get("completion_tokens") or len(self.output)

    def take(self, chunks: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Note what came at once. Returns an event for the client, or None if there is no news."""
        new: list[int] = []
        logprobs: list[dict[str, Any]] = []
        before = len(self.pieces)
        for chunk in chunks:
            self.usage = chunk.get("usage") or self.usage
            told = (chunk.get("metrics") or {}).get("speculative_decoding")
            self.speculation = told or self.speculation
            for choice in (chunk.get("choices") or [])[:1]:
                delta = choice.get("delta") or {}
                ids = choice.get("token_ids") or []
                text = choice.get("text") or delta.get("content") or ""
                self.has_ids &= bool(ids) or not text
                self.pieces += [text] if text else []
                new += ids
                if choice.get("logprobs"):
                    logprobs += _logprobs(choice["logprobs"], ids)
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.output += new
        self.logprobs += logprobs
        if not new and len(self.pieces) == before:
            return None
        event: dict[str, Any] = {
            "step": self.num_steps,
            "tokens": [{"id": token, "kind": None} for token in new],
            "pieces": [(text, None) for text in self.pieces[before:]],
        }
        if self.request.logprobs is not None:
            event["logprobs"] = logprobs
        self.num_steps += 1
        return event


def _logprobs(told: dict[str, Any], ids: list[int]) -> list[dict[str, Any]]:
    """vLLM's log-probabilities as /generate has them; an id that it does not tell is None."""
    entries: list[dict[str, Any]] = []
    if "content" in told:  # a chat's
        for entry in told["content"] or []:
            top = [_entry(one["token"], one["logprob"]) for one in entry.get("top_logprobs") or []]
            entries.append(_entry(entry["token"], entry["logprob"]) | {"top_logprobs": top})
    else:
        tops = told.get("top_logprobs") or [None] * len(told["tokens"])
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True):
            listed = [_entry(*pair) for pair in (top or {}).items()]
            entries.append(_entry(token, logprob) | {"top_logprobs": listed})
    for entry, token in zip(entries, ids, strict=False):
        entry["id"] = token
    return entries


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"id": None, "token": token, "logprob": max(logprob, -9999.0)}


class RemoteJob(Job):
    """A request on its way through the engine; iterate over it to have it carried out."""

    def __init__(self, relay: "Relay", wanted: Wanted, is_behind: Callable[[], bool]) -> None:
        super().__init__(wanted, relay.options.request_timeout)
        self.sequence = Told(wanted)
        self._relay, self._is_behind = relay, is_behind
        self._exchange: Exchange | None = None
        self._held: list[Any] = []  # what came before anybody iterated
        self.heard = time.monotonic()  # when the engine last said something

    @property
    def num_prompt_tokens(self) -> int | None:
        return self.sequence.usage.get("prompt_tokens")

    def start(self) -> None:
        """Send it now if there is a place, and wait for the first token, if not for long.

        So what the engine refuses is an error with a status, also where the answer is streamed.
        """
        try:
            if self._relay.enter(self, 0):
                self._send()
                end = time.monotonic() + _FIRST_S
                while not self._held and not self.cancelled and time.monotonic() < end:
                    self._check()
                    news = self._take(POLL_S)
                    self._held += [] if news == [] else [news]
        except RequestError as error:
            self._leave(error)
            raise

    def end(self, error: Exception | None = None) -> None:
        """Have the iteration end with an error; called from any thread."""
        self.failure = self.failure or error

    def wait(self) -> None:
        """Have it carried out, whoever reads. Raises RequestError."""
        for _ in self:
            pass

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Events as they come, and [] every 0.1 s without one. Raises RequestError.

        In the end the connection to the engine is closed, however that comes.
        """
        failure: Exception | None = None
        try:
            yield from self._events()
        except RequestError as error:
            failure = error
            raise
        finally:
            self._leave(failure)

    def _events(self) -> Iterator[list[dict[str, Any]]]:
        while not self._relay.enter(self, POLL_S):
            self._check()
            yield []
            if self.cancelled:
                return
        if self._exchange is None:
            self._send()
        while not self.cancelled:
            news = self._held.pop(0) if self._held else self._take(POLL_S)
            if news is None:
                break
            self._check()
            if news and self.first_token is None:
                self.first_token = time.monotonic()
                self._relay.first_token_s.observe(self.first_token - self.submitted)
            yield news
            while self._is_behind() and not self.cancelled:
                time.sleep(_BEHIND_S)  # nor is the engine read from
                self.heard = time.monotonic()
                self._check()
                yield []

    def _send(self) -> None:
        self.began = self.heard = time.monotonic()
        self._exchange = self._relay.send(self.request)

    def _take(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """What came, as an event; [] if nothing did, None at the end. Raises RequestError."""
        while chunks := self._exchange.events(timeout_s):
            self.heard = time.monotonic()
            if event := self.sequence.take(chunks):
                return [event]
            self._check()  # what came was no news: the figures at the end, say
        if chunks is None:
            if self.sequence.finish_reason is None:
                raise broke_off("its stream ended without a reason")
            return None
        limit_s = self._relay.options.stall_limit
        if time.monotonic() - self.heard > limit_s:
            message = f"the engine has said nothing for {limit_s:g} s"
            raise RequestError(message, status=504, code="timeout")
        return []

    def _check(self) -> None:
        """Raises RequestError past the deadline, and what `end` was given."""
        if time.monotonic() > self.deadline:
            self.end(RequestError("the request took too long", status=504, code="timeout"))
        if self.failure:
            raise self.failure

    def _leave(self, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended, self.failure = True, self.failure or error
            if self._exchange:
                self._exchange.close()
            self._relay.leave(self)


class Relay(Places):
    """What stands where a worker does: places for requests, and the state of the engine."""

    def __init__(self, client: Client, model: str, options: Options) -> None:
        """`model` is the name by which the engine knows it."""
        super().__init__(options)
        self.client, self.model = client, model

    def submit(self, wanted: Wanted, is_behind: Callable[[], bool] = lambda: False) -> RemoteJob:
        """Queue a request. Raises RequestError: 429 if the queue is full, 503 in the end."""
        job = RemoteJob(self, wanted, is_behind)
        with self._changed:
            if self.draining:
                raise unavailable(WHY_NOT["draining"])
            for late in [job for job in self._waiting if time.monotonic() > job.deadline + 1]:
                self._waiting.remove(late)  # nobody iterates over it
            self._refuse_if_full()
            self._waiting.append(job)
        return job

    def send(self, wanted: Wanted) -> Exchange:
        """Have the engine carry a request out. Raises RequestError."""
        return self.client.stream(*wanted.body(self.model))

    def enter(self, job: RemoteJob, timeout_s: float) -> bool:
        """Whether the job has a place now: the oldest that waits is the next to get one."""

        def has_place() -> bool:
            """Take it if it is there."""
            if self._waiting and self._waiting[0] is job:
                if len(self._running) < self.options.max_running:
                    self._running.append(self._waiting.popleft())
                    self._changed.notify_all()  # perhaps there is one for the next, too
            return job in self._running

        with self._changed:
            return self._changed.wait_for(has_place, timeout_s)

    def leave(self, job: RemoteJob) -> None:
        """Give its place to the next."""
        with self._changed:
            for places in (self._running, self._waiting):
                if job in places:
                    places.remove(job)
            status = getattr(job.failure, "status", 500 if job.failure else 200)
            if status >= 500:
                self._failures_in_a_row += 1
            elif job.first_token is not None:
                self._failures_in_a_row = 0
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, and wait for what was taken; how many were cut off, with an error."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self.draining = True
            while (self._running or self._waiting) and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            left = [*self._running, *self._waiting]
        for job in left:
            job.end(unavailable(WHY_NOT["draining"]))
        return len(left)
