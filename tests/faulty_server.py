"""The real server with faults built in, which requests call up.

    python tests/faulty_server.py --port 5000 --drafter-timeout 0.5

A request names one of DRAFTER_FAULTS as its drafter, or has the token id of one of TARGET_FAULTS in
its prompt. Faults come a few cycles after the prefill, in the middle of an answer.
"""

import importlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from control import Statistics
from drafters import Draft, Drafter
from drafters.timed import TimedDrafter
from serving import assembly, http

core = importlib.import_module("08_speculative_decoding")


def never_returns(*_: Any) -> None:
    while True:
        pass


def raises(error: BaseException) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error

    return act


# name -> what becomes of the third proposal of a request
DRAFTER_FAULTS: dict[str, Callable[[], None]] = {
    "raises": raises(RuntimeError("out of ideas")),
    "never_returns": never_returns,
}


class Faulty(Drafter):
    """Proposes what followed the last time, and fails in its own way the third time."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def open(self, prompt: Any, sampling: Any, noise: Any) -> dict[str, Any]:
        return {"text": list(prompt), "num_proposals": 0}

    def propose(self, state: dict[str, Any], max_tokens: int) -> Draft:
        state["num_proposals"] += 1
        if state["num_proposals"] == 3:
            DRAFTER_FAULTS[self.name]()
        text = state["text"]
        at = max((i for i in range(1, len(text)) if text[i - 1] == text[-1]), default=0)
        return Draft(text[at : at + max_tokens] if at else [])

    def observe(self, state: dict[str, Any], verdict: Any) -> None:
        state["text"] += verdict.tokens


class Target:
    """Breaks a target's forward for rows whose prompt has the id of a fault."""

    def __init__(self, target: Any) -> None:
        self._forward, self._cache = target.forward, target.cache
        self._faults: dict[int, str | None] = {}  # of each row
        self._countdown: dict[int, int] = {}  # row -> forwards until then
        target.forward = self

    def __call__(self, rows: list[int], tokens: list[list[int]], *rest: Any, **named: Any) -> Any:
        for row, fed in zip(rows, tokens, strict=True):
            if self._cache.lengths[row] == 0:  # a new request's
                found = (name for i, name in enumerate(TARGET_FAULTS, FIRST_ID) if i in fed)
                self._faults[row] = next(found, None)
                self._countdown[row] = 0 if self._faults[row] == "raises_at_once" else 4
            fault = self._faults[row]
            self._countdown[row] -= 1
            if fault and self._countdown[row] <= 0:
                TARGET_FAULTS[fault]()
        return self._forward(rows, tokens, *rest, **named)


# token id FIRST_ID + i -> what becomes of a forward, and of those after it
FIRST_ID = 4000
TARGET_FAULTS: dict[str, Callable[[], None]] = {
    "raises": raises(RuntimeError("a broken kernel")),
    "raises_at_once": raises(RuntimeError("a broken kernel")),
    "dies": raises(SystemExit(1)),
}


def main(arguments: list[str]) -> int:
    assemble, load = assembly.assemble_engine, core.load_engine

    def assemble_faulty(options: Any, *parts: Any) -> Any:
        engine = assemble(options, *parts)
        for name in DRAFTER_FAULTS:
            engine.pool.drafters[name] = TimedDrafter(Faulty(name), options.drafter_timeout)
            engine.pool.choices[name] = (name,)
            engine.totals.by_drafter[name] = Statistics()
        return engine

    def load_faulty(options: Any) -> Any:
        engine = load(options)
        Target(engine.target)
        return engine

    class MortalServer(http.Server):
        """Its loop ends on SIGUSR1."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            signal.signal(signal.SIGUSR1, lambda *_: self.call(raises(SystemExit(3))))

    assembly.assemble_engine, core.load_engine = assemble_faulty, load_faulty
    http.Server = MortalServer
    return core.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
