"""One thread owns the models; handlers hand it jobs through a bounded queue and read events back.

    handler thread                       worker thread
    submit(request) ── queue ──────────→ generate(request), one job after the other
    for item in job: ← items ─────────── (sequence, event) per cycle, then the end or an error

Not covered yet: several requests in one batch; a deadline per request.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .parsing import RequestError

WAITING = object()  # what a job yields while nothing happens
_END = object()
_POLL_S = 0.25


class Job:
    """One request on its way through the worker; iterate over it to receive its events."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.cancelled = False
        self.sequence: Any = None  # the engine's, as of the last event
        self.events: list[dict[str, Any]] = []  # kept for a trace
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def cancel(self) -> None:
        """The client has gone: stop at the next cycle, or do not start."""
        self.cancelled = True

    def put(self, item: Any) -> None:
        """Hand an item, or the error that ends the job, to whoever iterates."""
        self._items.put(item)

    def __iter__(self) -> Iterator[Any]:
        """The engine's events, and WAITING every 0.25 s without one; re-raises its error.

        Ends at once when the job is cancelled.
        """
        while not self.cancelled:
            try:
                item = self._items.get(timeout=_POLL_S)
            except queue.Empty:
                item = WAITING
            if item is _END:
                return
            if isinstance(item, Exception):
                raise item
            if item is not WAITING:
                self.sequence, item = item
                if self.request.trace:
                    self.events.append(item)
            yield item


def cancel(jobs: Iterable[Job]) -> None:
    """Cancel what has not ended yet."""
    for job in jobs:
        job.cancel()


class Worker:
    """Runs `generate(request)`, an iterator, for one job at a time in a thread of its own."""

    def __init__(self, generate: Callable[[Any], Iterator[Any]], max_queued: int = 64) -> None:
        self._generate = generate
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self.max_queued = max_queued
        self.num_running = 0
        self.draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

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
            if waiting >= self.max_queued:
                raise RequestError(
                    f"{waiting} requests wait already", status=429, code="queue_full"
                )
            jobs = [Job(request) for request in requests]
            self._waiting.extend(jobs)
            self._changed.notify()
        return jobs

    def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what was taken and stop; wait for that at most `timeout_s`."""
        with self._changed:
            self.draining = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _next(self) -> Job | None:
        """The next job, or None when draining is done."""
        with self._changed:
            while not self._waiting:
                if self.draining:
                    return None
                self._changed.wait()
            self.num_running = 1
            return self._waiting.popleft()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._run_one(job)
            except Exception as error:
                job.put(error)
            finally:
                self.num_running = 0
                job.put(_END)

    def _run_one(self, job: Job) -> None:
        if job.cancelled:
            return
        steps = self._generate(job.request)
        try:
            for item in steps:
                job.put(item)
                if job.cancelled:
                    break
        finally:
            steps.close()
