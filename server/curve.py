"""The cost curve: what passes of the target and drafts take on this machine (measurement.py).

It is stored beside the compiled kernels, in a file for each target, and read at the next start. Of
each drafter it has what was measured with that drafter, whichever others a server has.
"""

import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import torch
from flask import Flask

from runtime.folders import own_folder
from runtime.values import Engine, Json, RequestError, in_short

# Kernels work in blocks, often of 8: a row more may cost as much as the next seven together.
ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 64)
PARTS = ("call_ms", "step_ms", "read_ms")
_LEAST_MS, _MOST_MS = 1e-5, 1e6  # that are possible: of a pass, and of anything
_MOST_CONTEXT = 1 << 30
LOG = logging.getLogger("engine")


@dataclass(frozen=True)
class Curve:
    """Milliseconds of passes and drafts for one request; what is not known is left out.

    A draft of n tokens takes call_ms + n · step_ms, and read_ms for each token that its drafter has
    not read.
    """

    pass_ms: dict[int, float] = field(default_factory=dict)  # by rows
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)  # PARTS of each
    measured_at: str = ""
    context: int = 0  # tokens in the KV cache meanwhile
    rows: tuple[int, ...] = ROWS

    @classmethod
    def of(cls, stored: Json) -> "Curve":
        """What was written as JSON. Raises some Exception for anything else."""
        passes = {int(rows): float(ms) for rows, ms in stored["pass_ms"].items()}
        known = stored["drafters"].items()
        drafters = {name: {part: float(parts[part]) for part in PARTS} for name, parts in known}
        of_drafts = [ms for parts in drafters.values() for ms in parts.values()]
        context = int(stored["context"])
        if not (
            tuple(stored["rows"]) == ROWS and passes and passes.keys() <= {*ROWS}
            and all(_LEAST_MS <= ms <= _MOST_MS for ms in passes.values())
            and all(0 <= ms <= _MOST_MS for ms in of_drafts) and 0 <= context <= _MOST_CONTEXT
        ):  # fmt: skip
            raise ValueError("it has impossible numbers")
        measured_at = datetime.fromisoformat(stored["measured_at"]).isoformat()
        return cls(passes, drafters, measured_at, context)

    def least(self, other: "Curve") -> "Curve":
        """This curve, where another one of the same models and machine has no shorter times.

        What else the machine does meanwhile only adds to a time.
        """
        passes, most = other.pass_ms | self.pass_ms, inf
        for rows in sorted(passes, reverse=True):
            most = passes[rows] = min(most, passes[rows], other.pass_ms.get(rows, inf))
        drafters = {
            name: min(parts, other.drafters.get(name, parts), key=_of_a_draft)
            for name, parts in self.drafters.items()
        }
        return replace(self, pass_ms=dict(sorted(passes.items())), drafters=drafters)

    @property
    def break_even(self) -> dict[str, float]:
        """From which chance of being accepted a draft of one token pays; above 1 it never does.

        Of each drafter, and of one that costs nothing ("free").

        Example: 10 ms for one row, 11 for two, 4 for the draft -> (11 - 10 + 4) / 10 = .5.
        """
        one, two = map(self.pass_ms.get, (1, 2))
        if not (one and two):
            return {}
        drafts = {name: d["call_ms"] + d["step_ms"] for name, d in self.drafters.items()}
        drafts = {"free": 0.0} | drafts
        return {name: round((two - one + ms) / one, 4) for name, ms in drafts.items()}


def _of_a_draft(parts: dict[str, float]) -> float:
    """What a draft of five tokens takes: a part alone may be short as another one was too long."""
    return parts["call_ms"] + 5 * parts["step_ms"]


class Store:
    """The file of one curve. Whatever fails is told in a line of the log."""

    def __init__(self, engine: Engine, fingerprint: str | None, sizes: dict[str, int]) -> None:
        """`fingerprint` is the target's, without which nothing is stored.

        `sizes` are numbers of weights of a draft's step, by drafter.
        """
        target, draft, self._file = engine.target, engine.draft_model, None
        other = draft and (draft.fingerprint or draft.model.dtype)
        self._keys = {name: f"{name} {_hash(size, other)}" for name, size in sizes.items()}
        self._stored: dict[str, dict[str, float]] = {}  # all drafters in the file, by key
        self._of = _hash(fingerprint, target.model.dtype, torch.get_num_threads(), cpu_name())
        with _telling("stored"):
            self._file = own_folder() / f"curve-{self._of}.json" if fingerprint else None

    def read(self) -> Curve:
        """The curve of an earlier start; one without times if there is none that can be used."""
        with _telling(f"read from {self._file}"):
            if self._file and self._file.exists():
                stored = json.loads(self._file.read_text("utf-8"))
                if stored.get("of") != self._of:
                    raise ValueError("it is of another machine, model or version")
                curve, keys = Curve.of(stored), self._keys.items()
                self._stored = curve.drafters
                known = {name: self._stored[key] for name, key in keys if key in self._stored}
                return replace(curve, drafters=known)
        return Curve()

    def write(self, curve: Curve) -> None:
        """Write it in one piece. What is known of other drafters stays."""
        with _telling("stored"):
            if self._file and curve.pass_ms:
                self._stored |= {self._keys[name]: each for name, each in curve.drafters.items()}
                whole = asdict(replace(curve, drafters=self._stored)) | {"of": self._of}
                part = self._file.with_suffix(f".{os.getpid()}")
                try:
                    part.write_text(json.dumps(whole), "utf-8")
                    part.replace(self._file)
                finally:
                    part.unlink(missing_ok=True)


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Whatever fails meanwhile is one line: anything may stand in a file."""
    try:
        yield
    except Exception as error:
        LOG.warning("the cost curve cannot be %s: %s", what, in_short(error))


def _hash(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()[:16]


def cpu_name() -> str:
    """The name of this machine's CPU."""
    with suppress(OSError):
        if named := re.search(
            "^model name.*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M
        ):
            return named[1]
    return platform.processor() or platform.machine()


def register(app: Flask, service: Any) -> None:
    """GET /curve: a 404 where nothing is measured, as with another engine."""

    @app.get("/curve")
    def get_curve() -> Json:
        """The curve, and from where on drafts pay."""
        if service.worker.measurement is None:
            raise RequestError("no cost curve is measured here", status=404)
        return service.worker.measurement.as_dict()
