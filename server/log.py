"""One line on stderr for each request that generates, and for each that is refused.

It is JSON, and on a terminal a sentence: docs/operations.md has examples. Where a request failed,
or was refused before it got a place, `error` says why. What was written or read is in no line
unless asked for.
"""

import json
import logging
import queue
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from http.client import responses
from logging.handlers import QueueHandler, QueueListener
from threading import Event
from typing import Any

from flask import Flask, Response, g, request

from runtime.statistics import Statistics
from runtime.values import LONGEST_LINE, Json, one_line

from .worker import Job

LOG = logging.getLogger("server.requests")
_MAX_LINES = 10_000  # that may wait for a slow reader of stderr
_HALF = 10_000  # characters at each end of a traceback


class _Handler(QueueHandler):
    """Hands lines to a thread that writes: a full pipe must not stop an answer."""

    def handleError(self, record: logging.LogRecord) -> None:
        """If the queue is full, the line is lost, and not the request."""
        if not isinstance(sys.exc_info()[1], queue.Full):
            super().handleError(record)


class Progress(logging.Handler):
    """Keeps the last message about the progress of loading, for GET /health."""

    def __init__(self) -> None:
        super().__init__()
        self._began, self._stage = time.monotonic(), "importing"
        logging.getLogger("progress").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._stage = record.getMessage()

    def as_dict(self) -> Json:
        """What is being done, and for how long all has taken."""
        return {"stage": self._stage, "elapsed_s": round(time.monotonic() - self._began, 1)}


class _Format(logging.Formatter):
    """A request's line as it is; of anything else time, level, logger, message and traceback."""

    def formatException(self, ei: Any) -> str:
        """A traceback without its middle, where it is long: an error's text may be of megabytes."""
        text = super().formatException(ei)
        return text if len(text) <= 2 * _HALF else f"{text[:_HALF]}\n…\n{text[-_HALF:]}"

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment.replace("+00:00", "Z")}
        if isinstance(record.msg, dict):
            return json.dumps(line | record.msg)
        message = one_line(record.getMessage(), LONGEST_LINE)
        line |= {"level": record.levelname, "logger": record.name, "message": message}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Words(_Format):
    """For a terminal: time, level, and what happened in words; a traceback stands below."""

    def format(self, record: logging.LogRecord) -> str:
        level, text = record.levelname, record.getMessage()
        if isinstance(line := record.msg, dict):
            text, is_ours = _in_words(line), line["status"] == 500
            level = "ERROR" if is_ours else "WARNING" if "error" in line else "INFO"
        lines = [one_line(text, LONGEST_LINE)]
        if record.exc_info:  # strangers' bytes may be in it, too
            for each in self.formatException(record.exc_info).splitlines():
                lines.append(re.match(" *", each)[0] + one_line(each, LONGEST_LINE))
        return f"{datetime.fromtimestamp(record.created):%H:%M:%S} {level:8}" + "\n".join(lines)


def _in_words(line: Json) -> str:
    """Example: POST /generate: 30 tokens in 9 passes, drafter mtp, 80% accepted, 97 ms."""
    parts = []
    if "tokens" in line:
        passes = f" in {line['passes']} passes" if line["passes"] else ""  # else it is not known
        parts.append(f"{line['tokens']} tokens{passes}")
        parts.append(f"drafter {line['drafter']}" if line["drafter"] else "no drafter")
        if line["acceptance"] is not None:
            parts.append(f"{line['acceptance']:.0%} accepted")
    if line["finish"] == "cancelled":
        parts.append("the client left")
    elif "error" in line:
        parts.append(f"answered with an error, status {line['status']} ({line['error']})")
    parts.append(f"{line['ms']:.0f} ms")
    return f"{line['method']} {line['path']}: {', '.join(parts)}"


def log_to_stderr() -> Callable[[], bool]:
    """Send what the server has to say to stderr: JSON, an object a line; to a terminal words.

    Returns what waits for the last lines, for a second at most, and says if all are written.
    """
    lines: queue.Queue[Any] = queue.Queue(_MAX_LINES)
    handler = _Handler(lines)
    handler.setFormatter(_Words() if sys.stderr.isatty() else _Format())
    logging.getLogger().handlers = [handler]
    LOG.setLevel(logging.INFO)
    for name in ("kernels", "engine", "progress"):  # what was chosen, and is done, at the start
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("progress.once").handlers = []  # the terminal's
    QueueListener(lines, logging.StreamHandler(sys.stderr)).start()

    def flush() -> bool:
        deadline = time.monotonic() + 1
        while lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return not lines.unfinished_tasks

    return flush


def watch_requests(app: Flask) -> None:
    """Write a line for requests that generate and those refused.

    To be registered before what may refuse. Prompts and outputs are never written.
    """

    @app.before_request
    def begin() -> None:
        g.arrived = time.monotonic()

    @app.after_request
    def end(response: Response) -> Response:
        """See to it that the line is written."""
        is_watched = request.path not in ("/health", "/metrics")
        left = g.get("left")  # of what another engine answers: whether the client has left
        is_answer = g.job or (left and request.method == "POST")
        if is_answer or (response.status_code >= 400 and is_watched):
            head = {"id": g.id, "method": request.method[:20], "path": request.path[:200]}
            head["status"] = response.status_code
            # Once all is sent, or nobody is there to read it.
            response.call_on_close(partial(_write, head, g.error, g.job, g.arrived, left))
        return response


def _write(
    head: Json, error: str | None, job: Job | None, arrived: float, left: Event | None = None
) -> None:
    line = head | {"finish": None}
    if left and left.is_set():
        error, line = None, head | {"status": 499, "finish": "cancelled"}
    if job:
        first, s = job.runs[0], job.runs[0].sequence
        ends = [job.finish_reason(run) for run in job.runs]  # what is worst is told
        finish = next((end for end in ends if end not in ("stop", "length")), ends[0])
        line |= {"finish": finish, "drafter": (s or first).request.drafter}
        texts = job.runs[: first.request.texts]  # without a comparison's other runs
        line["prompt_tokens"] = sum(len(run.request.prompt) for run in texts[:: first.request.n])
        if s:
            begun = (run.sequence.statistics for run in texts if run.sequence)
            total = sum(begun, Statistics())
            line |= {"tokens": total.completion_tokens, "passes": total.passes or None}
            line["acceptance"] = total.draft_acceptance_rate
        for name, moment in {"queue_ms": first.began, "first_token_ms": first.first_token}.items():
            line[name] = None if moment is None else _ms(moment - arrived)
        if failure := job.failure:
            error = error or getattr(failure, "code", None) or type(failure).__name__
    if error is None and line["status"] >= 400:
        error = responses.get(line["status"])  # none of 499
    if error:
        line["error"] = error
    LOG.info(line | {"ms": _ms(time.monotonic() - arrived)})


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
