"""One thread owns the models; handlers hand it jobs through a bounded queue and read events back.

    handler thread                       worker thread, cycle after cycle
    submit(request) ── waiting ────────→ admit while there is room · drop who has left
                                         engine.step(all that run)
    for event in job: ← items ────────── an event to each, its end, or an error

A request joins at any cycle, shares the target's forwards with whatever else runs, and leaves when
it is done; the engine sees to it that its output does not depend on that.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from .metrics import Histogram
from .options import Options
from .parsing import RequestError

WAITING = object()  # what a job yields while nothing happens
_END = object()
_POLL_S = 0.1


class Job:
    """One request on its way through the worker; iterate over it to receive its events."""

    def __init__(self, request: Any, timeout_s: float, after: "Job | None" = None) -> None:
        self.request = request
        self.after = after  # a job that must have ended before this one begins
        self.cancelled = self.ended = self.started = False
        self.submitted = time.monotonic()
        self.deadline = self.submitted + timeout_s
        self.sequence: Any = None  # the engine's, once it runs
        self.events: list[dict[str, Any]] = []  # kept for a trace
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def cancel(self) -> None:
        """The client has gone: stop at the next cycle, or do not start."""
        self.cancelled = True

    def put(self, item: Any) -> None:
        """Hand an event to whoever iterates."""
        self._items.put(item)

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will come; with an error, whoever iterates gets it raised."""
        self.ended = True
        self._items.put(error or _END)

    def __iter__(self) -> Iterator[Any]:
        """The engine's events, and WAITING every 0.1 s without one; re-raises its error.

        Ends at once when the job is cancelled. Raises RequestError 504 past the deadline, whether
        the engine is busy with others, slow or stuck.
        """
        while not self.cancelled:
            if time.monotonic() > self.deadline:
                self.cancel()
                raise RequestError("the request took too long", status=504, code="timeout")
            try:
                item = self._items.get(timeout=_POLL_S)
            except queue.Empty:
                item = WAITING
            if item is _END:
                return
            if isinstance(item, Exception):
                raise item
            if item is not WAITING and self.request.trace:
                self.events.append(item)
            yield item


def cancel(jobs: Iterable[Job]) -> None:
    """Cancel what has not ended yet."""
    for job in jobs:
        job.cancel()


class Worker:
    """Runs up to `max_running` jobs at once on an engine, in a thread of its own."""

    def __init__(self, engine: Any, options: Options) -> None:
        self._engine, self._options = engine, options
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self.draining = False
        self.first_token_s = Histogram()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(not job.cancelled for job in self._waiting)

    def submit(self, *requests: Any) -> list[Job]:
        """Queue requests that belong together; they take one place, and run one after the other.

        Raises RequestError: 429 if the queue is full, 503 without engine.
        """
        with self._changed:
            if self.draining:
                raise RequestError("the server is shutting down", status=503, code="unavailable")
            if not self.alive:
                raise RequestError("the engine has stopped", status=503, code="unavailable")
            waiting = sum(not job.cancelled for job in self._waiting)
            free = max(0, self._options.max_running - len(self._running))
            if waiting >= self._options.max_queued + free:
                raise RequestError(
                    f"{waiting} requests wait already", status=429, code="queue_full"
                )
            jobs: list[Job] = []
            for request in requests:
                after = jobs[-1] if jobs else None
                jobs.append(Job(request, self._options.request_timeout, after))
            self._waiting.extend(jobs)
            self._changed.notify()
        return jobs

    def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what was taken and stop; wait for that at most `timeout_s`."""
        with self._changed:
            self.draining = True
            self._changed.notify()
        self._thread.join(timeout_s)
        for job in [*self._running, *self._waiting]:  # a stream that merely ends looks whole
            job.end(RequestError("the server is shutting down", status=503, code="unavailable"))

    def _run(self) -> None:
        while self._admit():
            self._drop_cancelled()
            if not self._running:
                continue
            try:
                events = self._engine.step([job.sequence for job in self._running])
            except Exception as error:
                for job in list(self._running):
                    self._leave(job, error)
                continue
            for job, event in zip(list(self._running), events, strict=True):
                if event is not None:
                    self._note_first(job)
                    job.put(event)
                if job.sequence.finish_reason:
                    self._leave(job, job.sequence.failure)

    def _admit(self) -> bool:
        """Let waiting jobs join, oldest first; wait while there are none. False: drained."""
        with self._changed:
            while not (self._waiting or self._running):
                if self.draining:
                    return False
                self._changed.wait()
            for job in list(self._waiting):
                if job.cancelled:
                    self._waiting.remove(job)
                    job.end()
                elif len(self._running) < self._options.max_running and (
                    job.after is None or job.after.ended
                ):
                    self._waiting.remove(job)
                    self._open(job)
        return True

    def _open(self, job: Job) -> None:
        try:
            job.sequence = self._engine.open(job.request)
            self._running.append(job)
        except Exception as error:
            job.end(error)

    def _note_first(self, job: Job) -> None:
        # A job that has to wait for another would count that one's time.
        if not job.started and job.after is None:
            self.first_token_s.observe(time.monotonic() - job.submitted)
        job.started = True

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running if job.cancelled]:
            self._leave(job)

    def _leave(self, job: Job, error: Exception | None = None) -> None:
        """Give the job's row and drafter state back; its end goes out last."""
        self._running.remove(job)
        try:
            self._engine.close(job.sequence)
        except Exception as fault:  # the thread must outlive whatever happens to one request
            error = error or fault
        job.end(error)
