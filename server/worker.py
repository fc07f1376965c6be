"""One thread owns the models; handlers hand it jobs through a bounded queue and read events back.

    handler thread                     worker thread, cycle after cycle
    submit(requests) ─ waiting ──────→ places for what waits · drop what is cancelled
                                       retry.step(all that run)
    job.read()       ← news ────────── an event of each run, its end, or an error
    job.wait()       ← ───────────────

A request joins at any cycle, shares the target's forwards with whatever else runs, and leaves when
it is done; the engine sees to it that its output does not depend on that.

`status` tells /health if a cycle takes too long (stuck), if requests in a row fail (failing), or if
the thread has died (dead). A stuck, dead or draining server answers new requests with 503. A
forward that hangs is not ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime import plug
from runtime.values import Engine, Json, Request, RequestError, TextSequence

from .events import event
from .options import Options

retry = plug("server.retry")  # without it a fault in a pass fails all requests in it
LOG = logging.getLogger("engine")
POLL_S, LONGEST_POLL_S = 0.1, 10.0  # without an event; a proxy ends what is silent for a minute
_REST_S = 0.02  # after a look at the news: nobody reads faster, and each look costs a pass time
_QUIET_S = 0.2  # before measuring: who asks again at once is not to wait for a pass
_FAILURES_TO_TELL = 3  # requests in a row: one of them may be to blame itself
_GETS_ON = 8  # cycles of a request, after which the engine works: a prefill says little of passes


def unavailable(why: str) -> RequestError:
    """The error (503) for new and waiting requests while nothing can be served."""
    return RequestError(why, status=503, code="unavailable")


WHY_NOT = {
    "draining": "the server is shutting down",
    "dead": "the engine has stopped",
    "stuck": "the engine does not answer",
}


@dataclass(eq=False)
class Run:
    """A text of a job: its request, its sequence once it runs, and when it got how far."""

    request: Request
    number: int  # in its job
    sequence: TextSequence | None = None
    events: list[Json] = field(default_factory=list)  # stored for a trace
    submitted: float = field(default_factory=time.monotonic)
    began: float | None = None  # it got its place in the batch
    first_token: float | None = None
    ended: float | None = None


class Job:
    """What a client wants: runs whose events it reads, or for whose end it waits, in one thread.

    A thread that wakes takes a core from the running pass. So a waiting thread wakes once, and a
    reading one at most every 20 ms: events in between come with the next one, or the end.
    """

    def __init__(self, requests: Iterable[Request], timeout_s: float) -> None:
        """Choices and texts of a list run side by side, the runs of a comparison in turn."""
        self.runs = [Run(request, number) for number, request in enumerate(requests)]
        self.request, self._timeout_s = self.runs[0].request, timeout_s
        count = len(self.runs) if self.request.texts > 1 else 1
        self.waiting = self.runs[:count]  # for a place
        self.later = self.runs[count:]  # for the place of the run before
        self.is_over = self.cancelled = False
        self.failure: Exception | None = None
        self._num_ended = 0
        self._changed = threading.Condition()
        self._news: list[tuple[int, Json]] = []  # events that nobody has taken yet
        self.is_read, self._rests_until = True, 0.0  # whether a thread takes the news

    @property
    def deadline(self) -> float:
        """Each prompt, and each run of a comparison, has as long as if it came alone."""
        return self.runs[0].submitted + self._timeout_s * (1 + self._num_ended // self.request.n)

    def ready(self) -> list[Run]:
        """The waiting runs that may begin.

        A choice waits until the first one has read the prompt, which is in the prefix cache then.
        """
        firsts = [self.runs[run.number - run.number % self.request.n] for run in self.waiting]
        pairs = zip(self.waiting, firsts, strict=True)
        return [run for run, first in pairs if run is first or first.first_token or first.ended]

    def push_event(self, run: Run, event: Json) -> None:
        """Hand an event to the thread that reads."""
        if run.request.trace:
            run.events.append(event)
        with self._changed:
            if self.is_read:
                self._news.append((run.number, event))
                if time.monotonic() >= self._rests_until:
                    self._changed.notify()

    def cancel(self, failure: Exception | None = None) -> None:
        """Stop at the next cycle, or do not start: the client has gone, or this has failed.

        The failure is raised in the thread that reads or waits.
        """
        with self._changed:
            self.failure = self.failure or failure
            self.is_over = self.cancelled = True
            self._changed.notify()

    def end_run(self, error: Exception | None = None) -> None:
        """One more run has ended; an error ends all of them."""
        with self._changed:
            self._num_ended += 1
            if error:
                self.cancel(error)
            elif self._num_ended == len(self.runs):
                self.is_over = True
                self._changed.notify()

    def finish_reason(self, run: Run) -> str:
        """How a run ended: stop, length, cancelled (the client has left), timeout or error."""
        if self.failure:
            return "timeout" if getattr(self.failure, "code", None) == "timeout" else "error"
        return (run.sequence and run.sequence.finish_reason) or "cancelled"

    def wait(self) -> None:
        """Until all has ended, or is cancelled. Raises what `read` raises."""
        with self._changed:
            self.is_read, self._news = False, []
            while not self.is_over:
                self._sleep(threading.TIMEOUT_MAX)
        if self.failure:
            raise self.failure

    def read(self) -> Iterator[list[tuple[int, Json]]]:
        """The events of the runs as they come, each with its run's number.

        Without an event it gives [] after 0.1 s, and then more and more rarely: hundreds may wait.
        Ends at once when it is cancelled, and raises the engine's error. Raises RequestError 504
        past the deadline, whether the engine is busy with others, slow or stuck.
        """
        is_over, pause_s = False, POLL_S
        while not is_over:
            with self._changed:
                self._sleep(pause_s)
                news, self._news = self._news, []
                is_over = self.is_over  # then no event will come
            if news or not is_over:
                yield news
            pause_s = POLL_S if news else min(2 * pause_s, LONGEST_POLL_S)
            if news:  # else what comes next is late already
                self._rests_until = time.monotonic() + _REST_S
        if self.failure:
            raise self.failure

    def _sleep(self, limit_s: float) -> None:
        """Wait until it is over or an event is due, or for so long. Past the deadline it fails."""

        def is_due() -> bool:
            return self.is_over or bool(self._news and time.monotonic() >= self._rests_until)

        self._changed.wait_for(is_due, min(limit_s, self.deadline - time.monotonic()))
        if not self.is_over and time.monotonic() >= self.deadline:
            self.cancel(RequestError("the request took too long", status=504, code="timeout"))


class Worker:
    """Runs texts on an engine, up to `max_running` at once, while up to `max_queued` jobs wait.

    The runs of a job wait as one, and each begins when a place comes.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        self.options, self.draining = options, False
        self.measurement: Any = None  # of the cost curve (measurement.py), where it is measured
        self.count: Callable[[Run, str], None] = lambda run, finish: None  # see metrics.py
        self.began, self._engine, self._has_died = time.monotonic(), engine, False
        self._busy_since: float | None = None
        self._failures_in_a_row = 0
        self._waiting: list[Job] = []  # in which a run waits for a place
        self._running: list[tuple[Job, Run]] = []
        self._changed = threading.Condition()
        self._has_stopped = threading.Event()

    def start(self) -> "Worker":
        """Run in a thread of its own."""
        threading.Thread(target=self.run, name="engine", daemon=True).start()
        return self

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _jobs(self) -> set[Job]:
        """Those that are not done. With the lock held."""
        return {*self._waiting, *(job for job, _ in self._running)}

    @property
    def num_jobs(self) -> int:
        with self._changed:
            return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Jobs in which a run waits for a place."""
        with self._changed:
            self._sweep()
            return len(self._waiting)

    @property
    def status(self) -> str:
        """The first that holds of dead, draining, stuck (in one cycle) and failing; or ok."""
        since, limit_s = self._busy_since, self.options.stall_limit
        states = {
            "dead": self._has_died,
            "draining": self.draining,
            "stuck": since is not None and time.monotonic() - since > limit_s,
            "failing": self._failures_in_a_row >= _FAILURES_TO_TELL,
        }
        return next((name for name, holds in states.items() if holds), "ok")

    def expect_place(self) -> None:
        """Raises what `submit` would raise: a refusal is cheap before the request is read.

        RequestError: 429 without a place for a request, 503 where none can be served.
        """
        with self._changed:
            if (status := self.status) in WHY_NOT:
                raise unavailable(WHY_NOT[status])
            many, free = self.options.max_queued, self.options.max_running - len(self._running)
            if self.num_waiting >= many + free:  # beside those that get the next free places
                why = f"{many} requests wait already, as many as --max-queued allows"
                raise RequestError(why, status=429, code="queue_full")

    def submit(self, *requests: Request) -> Job:
        """Queue requests that belong together. Raises RequestError as `expect_place` does."""
        job = Job(requests, self.options.request_timeout)
        with self._changed:
            self.expect_place()
            self._waiting.append(job)
            self._changed.notify()
        return job

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, and finish what was taken, in at most `timeout_s`.

        Returns how many jobs were not done by then; they get an error.
        """
        with self._changed:
            self.draining = True
            self._changed.notify()
        self._has_stopped.wait(timeout_s)
        with self._changed:
            left = self._jobs
        for job in left:  # a stream that merely ends looks whole
            job.cancel(unavailable(WHY_NOT["draining"]))
        return len(left)

    def run(self) -> None:
        """Carry out jobs until all is drained. No other thread is to compute.

        torch keeps idle threads for each thread that has computed. With more of them than cores,
        all take turns, and a pass takes twice as long.
        """
        try:
            while (joining := self._admit()) is not None:
                self._busy_since = time.monotonic()
                for job, run in joining:
                    self._open(job, run)
                for job, run in list(self._running):
                    if job.cancelled:
                        self._end(job, run)
                if self._running:
                    self._step()
                self._busy_since = None
        except BaseException:  # what kills a thread must not leave its clients waiting
            LOG.exception("the engine's thread has died")
            with self._changed:
                self._has_died = True
                for job, _ in self._running:
                    job.cancel(RequestError(WHY_NOT["dead"], status=500, code="engine_dead"))
                for job in self._waiting:
                    job.cancel(unavailable(WHY_NOT["dead"]))
                self._running, self._waiting = [], []
        self._has_stopped.set()

    def _admit(self) -> list[tuple[Job, Run]] | None:
        """Runs that join now; measure and wait while there is nothing to do. None: drained."""
        if self.measurement and not self.measurement.is_done:
            with self._changed:
                self._changed.wait_for(self._has_work, _QUIET_S)
            while not (self._has_work() or self.measurement.is_done):
                self._busy_since = time.monotonic()
                self.measurement.measure()
                self._busy_since = None
            self.measurement.pause()
        with self._changed:
            self._changed.wait_for(self._has_work)
            return self._give_places() if self._waiting or self._running else None

    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self.draining)

    def _give_places(self) -> list[tuple[Job, Run]]:
        """Let waiting runs begin, those of the oldest job first. With the lock held.

        What is left of a list of prompts then waits behind the others.
        """
        self._sweep()
        num_running = len(self._running)
        for job in list(self._waiting):
            if not (free := self.options.max_running - len(self._running)):
                break
            begun = job.ready()[:free]
            self._running += [(job, run) for run in begun]
            job.waiting = [run for run in job.waiting if run not in begun]
            if begun and (job.request.num_prompts > 1 or not job.waiting):
                self._waiting.remove(job)
                self._waiting += [job] if job.waiting else []
        return self._running[num_running:]

    def _sweep(self) -> None:
        """End what waits and is cancelled. With the lock held."""
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            for run in job.waiting:
                self._end(job, run)

    def _open(self, job: Job, run: Run) -> None:
        """Without the lock: a drafter may be slow to open, and /health must not wait for it."""
        run.began = time.monotonic()
        try:
            run.sequence = self._engine.open(run.request)
        except Exception as error:
            self._end(job, run, error)

    def _step(self) -> None:
        """A cycle of all that runs. A fault in it fails all, unless `retry` finds whose it is."""
        try:
            engine, sequences = self._engine, [run.sequence for _, run in self._running]
            cycles = retry.step(engine, sequences) if retry else engine.step(sequences)
        except Exception as error:
            for job, run in list(self._running):
                self._end(job, run, error)
            return
        for job, run in list(self._running):
            s = run.sequence
            if s in cycles:
                run.first_token = run.first_token or time.monotonic()
                if s.num_steps >= _GETS_ON:
                    self._failures_in_a_row = 0
                try:
                    # An answer's log-probabilities are of the events, too.
                    if job.is_read or run.request.trace or run.request.logprobs is not None:
                        job.push_event(run, event(s, cycles[s]))
                except Exception as error:
                    s.fail(error)
            if s.finish_reason:
                self._end(job, run, s.failure)

    def _end(self, job: Job, run: Run, error: Exception | None = None) -> None:
        """Give back what a run holds, and count it before its client can ask.

        The next run of a comparison gets its place.
        """
        try:
            if run.sequence:
                self._engine.close(run.sequence)
        except Exception as fault:  # the thread must outlive whatever happens to one request
            error = error or fault
        run.ended, finish = time.monotonic(), "error" if error else job.finish_reason(run)
        with self._changed:  # a thread that serves a client may end what waits meanwhile
            if (job, run) in self._running:
                self._running.remove((job, run))
            if error and not job.failure and getattr(error, "status", 500) >= 500:
                self._failures_in_a_row += 1  # once for a job: it may be to blame itself
            elif finish in ("stop", "length") or finish == "cancelled" and run.first_token:
                self._failures_in_a_row = 0
            self.count(run, finish)
        job.end_run(error)
        if job.later and not job.cancelled:
            self._running.append((job, job.later.pop(0)))
            self._open(*self._running[-1])
