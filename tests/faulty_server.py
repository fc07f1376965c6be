"""The real server with faults built in, which requests call up.

A request names one of DRAFTER_FAULTS as its drafter, or has the token id of one of TARGET_FAULTS in
its prompt. Faults come a few cycles after the prefill, in the middle of an answer.
"""

import importlib
import signal
from collections.abc import Callable
from typing import Any

from drafters import Draft, Drafter
from drafters.timed import TimedDrafter
from runtime.statistics import Statistics
from server import assembly, serving

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


class Text(list[int]):
    """The tokens of a request, and how many drafts were asked for."""

    num_proposals = 0


class Faulty(Drafter):
    """Proposes what followed the last token before, and fails in the third draft of a request."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def open(self, prompt: Any, sampling: Any, noise: Any) -> Text:
        return Text(prompt)

    def propose(self, state: Text, max_tokens: int) -> Draft:
        state.num_proposals += 1
        if state.num_proposals == 3:
            DRAFTER_FAULTS[self.name]()
        at = max((i for i in range(1, len(state)) if state[i - 1] == state[-1]), default=0)
        return Draft(state[at : at + max_tokens] if at else [])


def break_forward(target: Any) -> None:
    """Let a target's forward fail for the rows whose prompt has the id of a fault."""
    forward, lengths = target.forward, target.cache.lengths
    faults: dict[int, Any] = {}  # by row: from which length on it fails, and what happens then

    def faulty(rows: list[int], tokens: list[list[int]], *rest: Any, **named: Any) -> Any:
        for row, fed in zip(rows, tokens, strict=True):
            if lengths[row] == 0:  # a new request's
                ids = enumerate(TARGET_FAULTS.values(), FIRST_ID)
                faults[row] = next((fault for i, fault in ids if i in fed), None)
            if faults[row] and lengths[row] >= faults[row][0]:
                faults[row][1]()
        return forward(rows, tokens, *rest, **named)

    target.forward = faulty


# The token id FIRST_ID + i brings: how much is cached when a forward fails, and what it does then.
FIRST_ID = 4000
TARGET_FAULTS: dict[str, tuple[int, Callable[[], None]]] = {
    "raises": (12, raises(RuntimeError("a broken kernel"))),
    "raises_at_once": (0, raises(RuntimeError("a broken kernel"))),
    "dies": (12, raises(SystemExit(1))),
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
        break_forward(engine.target)
        return engine

    class MortalServer(serving.Server):
        """Its loop ends on SIGUSR1."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            signal.signal(signal.SIGUSR1, lambda *_: self.call(raises(SystemExit(3))))

    assembly.assemble_engine, core.load_engine = assemble_faulty, load_faulty
    serving.Server = MortalServer
    return core.main(arguments)
