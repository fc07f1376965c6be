"""One thread owns the models; handlers hand it jobs through a bounded queue and read events back.

    handler thread                       worker thread
    submit(request) ── queue ──────────→ generate(request), one job after the other
    for item in job: ← events ────────── (sequence, event) per cycle, then the end or an error

Not covered yet: several requests in one batch; a deadline per request.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .parsing import RequestError

_END = object()


class Job:
    """One request on its way through the worker; iterate over it to receive what it yields."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.cancelled = (
            False  # set by a handler whose client has gone; the worker then stops at the next cycle
        )
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self._items.put(item)

    def __iter__(self) -> Iterator[Any]:
        """Yields the worker's items; re-raises its error, if one ended the job."""
        while (item := self._items.get()) is not _END:
            if isinstance(item, Exception):
                raise item
            yield item


class Worker:
    """Runs `generate(request)`, an iterator, for one job at a time in a thread of its own."""

    def __init__(self, generate: Callable[[Any], Iterator[Any]], max_queued: int = 64) -> None:
        self._generate = generate
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self.max_queued = max_queued
        self.num_waiting = 0
        self.num_running = 0
        self.draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Any) -> Job:
        """Queue a request. Raises RequestError: 429 if the queue is full, 503 if shutting down."""
        with self._lock:
            if self.draining or not self.alive:
                raise RequestError("the server is shutting down", status=503, code="unavailable")
            if self.num_waiting >= self.max_queued:
                raise RequestError(
                    f"{self.num_waiting} requests are waiting already",
                    status=429,
                    code="queue_full",
                )
            self.num_waiting += 1
            job = Job(request)
            self._jobs.put(job)
        return job

    def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what was taken and stop; wait for that at most `timeout_s`."""
        with self._lock:
            self.draining = True
            self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self.num_waiting -= 1
                self.num_running = 1
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
