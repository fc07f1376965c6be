"""One thread owns the models; handlers hand it jobs through a bounded queue and read events back.

    handler thread                       worker thread, cycle after cycle
    submit(request) ── waiting ────────→ admit while there is room · drop cancelled
                                         retry.step(all that run)
    read(jobs)        ← news ─────────── an event to each, its end, or an error
    job.wait()        ← ────────────────

A request joins at any cycle, shares the target's forwards with whatever else runs, and leaves when
it is done; the engine sees to it that its output does not depend on that.

`status` tells /health of a cycle that takes too long (stuck), of one failing request after another
(failing) and of a thread that has died; stuck and dead, new requests are refused with 503. Not
covered: ending a forward that hangs.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from itertools import chain
from typing import Any

from drafters import FixedK
from runtime.statistics import Totals
from runtime.values import Engine, Json, Request, RequestError, TextSequence

from . import retry, trace
from .metrics import Meter
from .options import Options

LOG = logging.getLogger("engine")
PROGRESS = logging.getLogger("progress")  # what is being done until all is loaded
POLL_S, LONGEST_POLL_S = 0.1, 10.0  # without an event; a proxy ends what is silent for a minute
_REST_S = 0.025  # after a look at the news: nobody reads faster, and each look costs a pass time
_QUIET_S = 0.2  # before measuring: who asks again at once is not to wait for a pass
_FAILURES_TO_TELL = 3  # requests in a row: one of them may be to blame itself
_GETS_ON = 8  # cycles of a request, after which the engine works: a prefill says little of passes


def wait_for(reports: "queue.SimpleQueue[Any]") -> Any:
    """Wait in the main thread until the queue has an item, and return it.

    A signal that comes just before the thread sleeps does not wake it, and its handler is called
    when the thread is awake again. So the thread wakes every second.
    """
    while True:
        with suppress(queue.Empty):
            return reports.get(timeout=1)


def unavailable(why: str) -> RequestError:
    """The error (503) for new and waiting requests while nothing can be served."""
    return RequestError(why, status=503, code="unavailable")


WHY_NOT = {
    "draining": "the server is shutting down",
    "dead": "the engine has stopped",
    "stuck": "the engine does not answer",
}


class Job:
    """A request that the worker carries out: `read` its events, or wait for its end.

    A thread that wakes takes a core from the running pass. So a waiting thread wakes once, and a
    reading one at most every 25 ms: events in between come with the next one, or the end.
    """

    def __init__(
        self, request: Request, timeout_s: float, after: "Job | None" = None,
        entry: "Job | None" = None,
    ) -> None:  # fmt: skip
        """`after` is a job that must have ended before this one begins, and gives it its place.

        A choice begins as soon as the job before it has read the prompt, which is in the prefix
        cache then. `entry` is the request's first job: one thread waits for all of them.
        """
        self.request, self.after = request, after
        self.then: Job | None = None  # gets this one's place
        if after and not self.is_choice:
            after.then = self
        self.at_cancel: Callable[[], None] = lambda: None
        self.cancelled = self.ended = False
        self.failure: Exception | None = None
        # When it got its place in the batch, its first token, and its end.
        self.began: float | None = None
        self.first_token: float | None = None
        self.left: float | None = None
        self.submitted = time.monotonic()
        self.deadline = self.submitted + timeout_s
        self.sequence: TextSequence | None = None  # the engine's, once it runs
        self.events: list[Json] = []  # stored for a trace
        first = after or entry
        self.first: Job | None = (first.first or first) if first else None  # of its request
        self.has_failed = False  # of the first: whether a failure of its request was counted
        # Jobs of one request share it: one thread waits for all of them.
        self._changed = first._changed if first else threading.Condition()
        self._news: list[Json] = []  # events that nobody has taken yet
        self._is_read = True  # by `read`
        self._rested = 0.0  # about from when on an event wakes the reading thread
        self._put_at = self.submitted  # when the last event came

    def cancel(self) -> None:
        """The client has gone: stop at the next cycle, or do not start."""
        with self._changed:
            self.cancelled = True
            self._changed.notify()
        self.at_cancel()

    @property
    def num_prompt_tokens(self) -> int | None:
        return len(self.request.prompt)

    @property
    def num_cached(self) -> int | None:
        """Tokens of its prompt that were known already, once it runs."""
        return self.sequence.drafting.num_cached

    @property
    def is_choice(self) -> bool:
        """Whether it writes one of several texts that a request wants."""
        return self.request.n > 1

    @property
    def may_begin(self) -> bool:
        """Whether the job before it has come far enough, once it waits for a place."""
        return self.after is None or self.after.ended or self.after.first_token is not None

    @property
    def wants_events(self) -> bool:
        """Whether anybody will read them; an answer's log-probabilities are of the events, too."""
        request = self.request
        return self._is_read or request.trace or request.logprobs is not None

    def put(self, event: Json) -> None:
        """Hand an event to the thread that reads the job's."""
        if self.request.trace:
            self.events.append(event)
        with self._changed:
            before, self._put_at = self._put_at, (now := time.monotonic())
            if self._is_read:
                self._news.append(event)
                if now + (now - before) / 2 >= self._rested:  # the next one would come too late
                    self._rested = now
                    self._changed.notify()

    def note_first(self) -> None:
        """Note the time of the first token."""
        if self.first_token is None:
            self.first_token = time.monotonic()

    def times(self, num_tokens: int) -> Json:
        """Its times in ms as vLLM names them; where there is nothing to divide by, one is left out.

        A mean is over the tokens after the first; tokens a second are from the place on.
        """
        if self.first_token is None or self.left is None:
            return {}
        decoding, computing = self.left - self.first_token, self.left - self.began
        spans = {
            "time_to_first_token_ms": self.first_token - self.submitted,
            "generation_time_ms": decoding,
            "queue_time_ms": self.began - self.submitted,
        }
        if num_tokens > 1:
            spans["mean_itl_ms"] = decoding / (num_tokens - 1)
        times = {name: round(span * 1e3, 3) for name, span in spans.items()}
        return times | {"tokens_per_second": round(num_tokens / computing, 3) if computing else 0}

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will come; an error is raised in the thread that reads or waits."""
        with self._changed:
            self.failure = self.failure or error
            self.ended, self.left = True, self.left or time.monotonic()
            self._changed.notify()

    @property
    def finish(self) -> str:
        """How it ended: stop, length, cancelled (the client has left), timeout or error."""
        if isinstance(self.failure, RequestError) and self.failure.code == "timeout":
            return "timeout"
        if self.failure:
            return "error"
        return (self.sequence and self.sequence.finish_reason) or "cancelled"

    def wait(self) -> None:
        """Until it ends or is cancelled. Raises what `read` raises."""
        self.pass_over()
        with self._changed:
            self._sleep(threading.TIMEOUT_MAX)
        self._check()

    def pass_over(self) -> None:
        """Nobody reads its events, those that have come neither."""
        with self._changed:
            self._is_read, self._news = False, []

    def _sleep(self, limit_s: float, *others: "Job") -> None:
        """Wait until one of them is over, has an event that is due, or the time is up."""
        jobs = (self, *others)

        def is_over() -> bool:
            now = time.monotonic()
            return any(j.ended or j.cancelled or (j._news and now >= j._rested) for j in jobs)

        limit_s = min(limit_s, self.deadline - time.monotonic(), threading.TIMEOUT_MAX)
        if limit_s > 0:
            self._changed.wait_for(is_over, limit_s)

    def _check(self) -> None:
        """Raise the job's failure; past the deadline that is a timeout."""
        if not self.ended and not self.cancelled and time.monotonic() >= self.deadline:
            self.failure = RequestError("the request took too long", status=504, code="timeout")
            self.cancel()
        if self.failure:
            raise self.failure


def read(jobs: list[Job]) -> Iterator[tuple[int, list[Json]]]:
    """The events of a request's jobs as they come, each time with the job's number.

    Without an event it gives [] after 0.1 s, and then more and more rarely: hundreds may wait. Ends
    at once when the jobs are cancelled, and raises the engine's error. Raises RequestError 504 past
    the deadline, whether the engine is busy with others, slow or stuck.
    """
    going, rested, pause_s = dict(enumerate(jobs)), 0.0, POLL_S
    while going:
        first, *others = going.values()
        with first._changed:
            first._sleep(max(pause_s, rested - time.monotonic()), *others)
            taken = [(i, job, job._news, job.ended) for i, job in going.items()]
            for job in going.values():
                job._news = []
        if any(job.cancelled for job in going.values()):
            return
        news = [(i, events) for i, _, events, _ in taken if events]
        has_nothing = not news and not any(has_ended for *_, has_ended in taken)
        pause_s = min(2 * pause_s, LONGEST_POLL_S) if has_nothing else POLL_S
        yield from [(min(going), [])] if has_nothing else news
        for i, job, _, has_ended in taken:
            job._check()
            if has_ended:
                del going[i]
        rested = time.monotonic() + _REST_S
        for job in going.values():
            job._rested = rested


def cancel(jobs: Iterable[Job]) -> None:
    """Cancel what has not ended yet."""
    for job in jobs:
        job.cancel()


class Admission:
    """Takes requests in: places for `max_running` jobs that run, and `max_queued` requests to wait.

    The jobs of a request wait as one, and each begins when a place comes.
    """

    measurement: Any = None  # of the cost curve (measurement.py), where it is measured

    def __init__(self, options: Options) -> None:
        self.options, self.draining = options, False
        self.meter = Meter()
        self._began, self._failures_in_a_row = time.monotonic(), 0
        self._waiting: deque[list[Job]] = deque()  # of each request what has no place yet
        self._has_left = False  # whether one of them was cancelled
        self._running: list[Job] = []
        self._changed = threading.Condition()

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests of which a job waits for a place."""
        with self._changed:
            self._sweep()
            return len(self._waiting)

    @property
    def status(self) -> str:
        """ok; failing (request after request), until one gets on; draining, for good."""
        if self.draining:
            return "draining"
        return "failing" if self._failures_in_a_row >= _FAILURES_TO_TELL else "ok"

    def expect_place(self) -> None:
        """Raises what `submit` would raise: a refusal is cheap before the request is read."""
        with self._changed:
            self._check(1)

    def _check(self, num_jobs: int) -> None:
        """Raises RequestError: 429 without a place for a request, 503 where none can be served."""
        if (status := self.status) in WHY_NOT:
            raise unavailable(WHY_NOT[status])
        self._sweep()
        free, num_left = self.options.max_running - len(self._running), 0
        for needed in (*map(len, self._waiting), num_jobs):
            num_left += needed > free
            free = max(0, free - needed)
        if num_left > self.options.max_queued:
            many = self.options.max_queued  # beside those that get the next free places
            why = f"{many} requests wait already, as many as --max-queued allows"
            raise RequestError(why, status=429, code="queue_full")

    def _queue(self, jobs: list[Job]) -> None:
        """Let a request wait: its choices, or the first of its other jobs. With the lock held.

        Raises what `_check` raises.
        """
        jobs = jobs if jobs[0].request.texts > 1 else jobs[:1]
        self._check(len(jobs))
        self._wait(jobs, self._waiting.append)

    def _wait(self, jobs: list[Job], put: Callable[[list[Job]], None]) -> None:
        for job in jobs:
            job.at_cancel = self._note_leave
        put(list(jobs))
        self._has_left |= any(job.cancelled for job in jobs)

    def _note_leave(self) -> None:
        self._has_left = True

    def _sweep(self) -> None:
        """End what waits and is cancelled. With the lock held."""
        if not self._has_left:
            return
        self._has_left = False
        for job in (job for jobs in self._waiting for job in jobs if job.cancelled):
            self._end(job)
        left = ([job for job in jobs if not job.ended] for jobs in self._waiting)
        self._waiting = deque(filter(None, left))

    def _end(self, job: Job, error: Exception | None = None) -> None:
        """End a job, and count it before its client can ask."""
        job.failure, job.left = job.failure or error, time.monotonic()
        with self._changed:  # a thread that serves a client may end what waits meanwhile
            if error and getattr(error, "status", 500) >= 500:
                first = job.first or job
                self._failures_in_a_row += not first.has_failed  # a request may be to blame itself
                first.has_failed = True
            elif not job.failure and (job.first_token or job.finish in ("stop", "length")):
                self._failures_in_a_row = 0
            self.meter.count(job)
        job.end()

    def _give_places(self) -> list[Job]:
        """Let waiting jobs run, oldest first, while there are places. With the lock held.

        What is left of a list of prompts then waits behind the others.
        """
        self._sweep()
        joining, begun = list[Job](), list[list[Job]]()
        for jobs in self._waiting:
            free = self.options.max_running - len(self._running) - len(joining)
            if free <= 0:
                break
            chosen = [job for job in jobs if job.may_begin][:free]
            jobs[:] = [job for job in jobs if job not in chosen]
            joining += chosen
            if chosen and chosen[0].request.num_prompts > 1:
                begun.append(jobs)
        if joining:
            self._running += joining
            others = [jobs for jobs in self._waiting if jobs not in begun]
            self._waiting = deque(filter(None, [*others, *begun]))
        return joining

    def _finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all that was taken is done."""
        raise NotImplementedError

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, and finish what was taken, in at most `timeout_s`.

        Returns how many were not done by then; they get an error.
        """
        with self._changed:
            self.draining = True
            self._changed.notify_all()
        self._finish(timeout_s)
        left = [*self._running, *chain.from_iterable(self._waiting)]
        for job in left:  # a stream that merely ends looks whole
            job.end(unavailable(WHY_NOT["draining"]))
        return len(left)


class Worker(Admission):
    """Runs up to `max_running` jobs at once on an engine, in a separate thread."""

    def __init__(
        self, engine: Engine | None, options: Options,
        load: "Callable[[Worker], tuple[Engine, Any]] | None" = None,
    ) -> None:  # fmt: skip
        """Without an engine, `load` makes one and the `app` around it, in the worker's thread.

        torch keeps idle threads for each thread that has computed. With more of them than cores,
        all take turns, and a pass takes twice as long. Raises what `load` raises.
        """
        super().__init__(options)
        self.app: Any = None  # a Flask
        self._engine, self._load, self._died = engine, load, False
        self._busy_since: float | None = None
        loaded: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=[loaded], name="engine", daemon=True)
        self._thread.start()
        if refusal := wait_for(loaded):
            raise refusal

    @property
    def status(self) -> str:
        """ok; failing or stuck (a cycle takes too long) until one gets on; draining or dead."""
        since = self._busy_since
        if self._died:
            return "dead"
        is_late = since is not None and time.monotonic() - since > self.options.stall_limit
        return "stuck" if is_late and not self.draining else super().status

    def submit(self, *requests: Request) -> list[Job]:
        """Queue requests that belong together: choices run at once, others one after the other.

        Each choice takes a place to run, and others one together. Jobs for a list of prompts run at
        once, and wait as one. Raises RequestError: 429 if the queue is full, 503 without an engine
        that works.
        """
        jobs: list[Job] = []
        for i, request in enumerate(requests):
            prompt, choice = divmod(i, request.n)
            before = jobs[i - choice] if choice else None
            if jobs and request.texts == 1:
                before = jobs[-1]
            limit_s = self.options.request_timeout * (1 + prompt)  # as if each came alone
            jobs.append(Job(request, limit_s, before, entry=jobs[0] if jobs else None))
        with self._changed:
            self._queue(jobs)
            self._changed.notify()
        return jobs

    def _finish(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self, loaded: "queue.SimpleQueue[BaseException | None]") -> None:
        try:
            if self._load:
                self._engine, self.app = self._load(self)
        except BaseException as error:
            return loaded.put(error)
        loaded.put(None)
        try:
            while (joining := self._admit()) is not None:
                self._busy_since = time.monotonic()
                for job in joining:
                    self._open(job)
                for job in [job for job in self._running if job.cancelled]:
                    self._leave(job)
                if self._running:
                    self._step()
                self._busy_since = None
        except BaseException:  # what kills a thread must not leave its clients waiting
            LOG.exception("the engine's thread has died")
            with self._changed:
                self._died = True
            for job in self._running:
                job.end(RequestError("the engine has stopped", status=500, code="engine_dead"))
            for job in chain.from_iterable(self._waiting):
                job.end(unavailable(WHY_NOT["dead"]))
            self._running, self._waiting = [], deque()

    def _step(self) -> None:
        """A cycle of all running jobs. A fault in it fails only the job that it belongs to."""
        try:
            cycles = retry.step(self._engine, [job.sequence for job in self._running])
        except Exception as error:
            for job in list(self._running):
                self._leave(job, error)
            return
        for job in list(self._running):
            s = job.sequence
            if s in cycles:
                try:
                    event = trace.event(s, cycles[s]) if job.wants_events else None
                except Exception as error:
                    s.fail(error)
                else:
                    job.note_first()
                    if s.num_steps >= _GETS_ON:
                        self._failures_in_a_row = 0
                    if event:
                        job.put(event)
            if s.finish_reason:
                self._leave(job, s.failure)

    def _admit(self) -> list[Job] | None:
        """Jobs that join now; measure and wait while there is nothing to do. None: drained."""
        if self.measurement and not self.measurement.is_done:
            self._measure()
        with self._changed:
            while not (self._waiting or self._running):
                if self.draining:
                    return None
                self._changed.wait()
            return self._give_places()

    def _measure(self) -> None:
        """Measure while there is nothing to do, once nothing has come for a while."""
        with self._changed:
            has_work = self._changed.wait_for(self._has_work, _QUIET_S)
        while not (has_work or self.measurement.is_done):
            self._busy_since = time.monotonic()
            self.measurement.measure()
            self._busy_since, has_work = None, self._has_work()
        self.measurement.pause()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self.draining)

    def _open(self, job: Job) -> None:
        """Without the lock: a drafter may be slow to open, and /health must not wait for it."""
        try:
            job.began = time.monotonic()
            job.sequence = self._engine.open(job.request)
        except Exception as error:
            self._running.remove(job)
            self._end(job, error)

    def _leave(self, job: Job, error: Exception | None = None) -> None:
        """Give the job's row and drafter state back; its end goes out last."""
        try:
            self._engine.close(job.sequence)
        except Exception as fault:  # the thread must outlive whatever happens to one request
            error = error or fault
        self._running.remove(job)
        self._end(job, error)
        if job.then and not (error or job.cancelled):
            with self._changed:
                self._wait([job.then], self._waiting.appendleft)


@contextmanager
def uncounted(engine: Engine) -> Iterator[Engine]:
    """A copy of the engine whose runs no statistics count and no controller learns from.

    It logs none of its drafters' failures.
    """
    twin = copy(engine)
    twin.pool, twin.planner = copy(engine.pool), FixedK()
    twin.totals, twin.pool.failures = Totals(engine.pool.choices), Counter()
    twin.pool.log = logging.Logger("nobody's", logging.CRITICAL + 1)
    yield twin


def warm_up(engine: Engine) -> None:
    """Let the target and each model that drafts run once, before a measurement counts.

    First calls are slow: buffers are allocated. Each is asked for a whole draft, so the target runs
    at K + 1 rows. Statistics are dropped. A fault is ignored: it comes again at run time.
    """
    PROGRESS.info("warming up: each model runs once, as its first pass is slow")
    prompt = [i % engine.target.vocab_size for i in (1, 2, 3, 1, 2, 3)]
    models = [name for name, model in engine.pool.drafters.items() if not model.can_guess]
    with uncounted(engine) as twin:
        for name in models or [None]:
            with suppress(Exception):
                for _, cycle in twin.generate(Request(prompt, 16, name, isolated=True)):
                    if cycle.number:
                        break
