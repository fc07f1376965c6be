"""The real server with faults built in, which requests call up.

    python tests/faulty_server.py --port 5000 --drafter-timeout 0.5

A request names one of DRAFTER_FAULTS as its drafter, or has the token id of one of TARGET_FAULTS in
its prompt. Faults come a few cycles after the prefill, in the middle of an answer.
"""

import importlib
import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drafters import Draft, Drafter
from drafters.timed import TimedDrafter
from serving import http

core = importlib.import_module("08_speculative_decoding")
VOCABULARY = 4096


def never_returns(*_: Any) -> None:
    while True:
        pass


def blocks(*_: Any) -> None:
    threading.Event().wait(3)  # not to be interrupted from outside


def raises(error: BaseException) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error

    return act


def q_of(weights: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Draft]:
    """One token with a q that is none."""
    return lambda state, limit: Draft([5], weights(torch.full((1, VOCABULARY), 1 / VOCABULARY)))


# name -> what becomes of the third proposal of a request
PROPOSALS: dict[str, Callable[[list[int], int], Any]] = {
    "raises": raises(RuntimeError("out of ideas")),
    "runs_out_of_memory": raises(torch.OutOfMemoryError("no more memory")),
    "exits": raises(SystemExit(3)),
    "never_returns": never_returns,
    "blocks": blocks,
    "proposes_an_id_too_large": lambda state, limit: Draft([VOCABULARY]),
    "proposes_a_negative_id": lambda state, limit: Draft([-1]),
    "proposes_words": lambda state, limit: Draft(["the"]),
    "proposes_too_much": lambda state, limit: Draft([5] * (limit + 1)),
    "proposes_nothing_at_all": lambda state, limit: None,
    "has_a_q_of_mass_2": q_of(lambda q: 2 * q),
    "has_a_q_of_nan": q_of(lambda q: q * float("nan")),
    "has_a_negative_q": q_of(lambda q: torch.cat([q[:, :-1], -q[:, -1:]], -1)),
    "has_a_q_that_excludes_its_token": q_of(lambda q: torch.eye(VOCABULARY)[6:7]),
    "has_a_q_of_another_shape": q_of(lambda q: q[:, 1:]),
}  # fmt: skip
METHODS = ("open", "guess", "observe", "close")  # that may raise, too
RUBBISH = {  # what other methods may return
    "guesses_a_number": ("guess", 5),
    "guesses_words": ("guess", ["the"]),
    "guesses_a_tensor": ("guess", torch.ones(2)),
}
DRAFTER_FAULTS = [*PROPOSALS, *(f"raises_in_{method}" for method in METHODS), *RUBBISH]


class Faulty(Drafter):
    """Proposes what followed the last time, and fails in its own way the third time."""

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        if (method := name.removeprefix("raises_in_")) in METHODS:
            setattr(self, method, raises(KeyError(method)))
        if name in RUBBISH:
            method, result = RUBBISH[name]
            setattr(self, method, lambda *_: result)

    def open(self, prompt: Any, sampling: Any, noise: Any) -> dict[str, Any]:
        return {"text": list(prompt), "num_proposals": 0}

    def propose(self, state: dict[str, Any], max_tokens: int) -> Draft:
        state["num_proposals"] += 1
        text = state["text"]
        if state["num_proposals"] == 3 and self.name in PROPOSALS:
            return PROPOSALS[self.name](text, max_tokens)
        at = max((i for i in range(1, len(text)) if text[i - 1] == text[-1]), default=0)
        return Draft(text[at : at + max_tokens] if at else [])

    def observe(self, state: dict[str, Any], verdict: Any) -> None:
        state["text"] += verdict.tokens


@dataclass
class Moment:
    """When a fault may happen: in this forward, to this row."""

    num_rows: int
    num_fed: int  # tokens of the row
    nth: int  # request that called the fault up, from 0


class Target:
    """Breaks a target's forward for rows whose prompt has the id of a fault."""

    def __init__(self, target: Any) -> None:
        self._forward, self._cache = target.forward, target.cache
        self._faults: dict[int, tuple[str | None, int]] = {}  # row -> the fault, the request's nth
        self._countdown: dict[int, int] = {}  # row -> forwards until then
        self._num_requests: Counter[str | None] = Counter()
        target.forward = self

    def _note(self, row: int, prompt: list[int]) -> None:
        fault = next((name for i, name in enumerate(TARGET_FAULTS, FIRST_ID) if i in prompt), None)
        self._faults[row] = fault, self._num_requests[fault]
        self._num_requests[fault] += 1
        self._countdown[row] = COUNTDOWNS.get(fault, 4)

    def __call__(self, rows: list[int], tokens: list[list[int]], *rest: Any, **named: Any) -> Any:
        without_numbers, is_too_late = [], False
        for b, (row, fed) in enumerate(zip(rows, tokens, strict=True)):
            if self._cache.lengths[row] == 0:  # a new request's
                self._note(row, fed)
            fault, nth = self._faults[row]
            self._countdown[row] -= 1
            if fault is None or self._countdown[row] > 0:
                continue
            TARGET_FAULTS[fault](Moment(len(rows), len(fed), nth))
            without_numbers += [b] * (fault == "gives_no_numbers")
            is_too_late |= fault == "fails_behind_the_forward" and not nth % 2
            if is_too_late:
                self._faults[row] = None, nth
        output = self._forward(rows, tokens, *rest, **named)
        if is_too_late:  # all of it is in the cache by now
            raise RuntimeError("a fault behind the forward")
        for b in without_numbers:
            output.logits[b].fill_(float("nan"))
        return output


def fails_once(_: Moment) -> None:
    if not failed_once.is_set():
        failed_once.set()
        raise RuntimeError("a fault that does not come back")


def fails_on_and_off(moment: Moment) -> None:
    if moment.nth % 2 and next(turns) % 2:
        raise RuntimeError("a fault that comes and goes, to every other request")


def takes_no_drafts(moment: Moment) -> None:
    if moment.num_fed > 1:
        raise RuntimeError("no room for a draft")


def lacks_memory(moment: Moment) -> None:
    if moment.num_rows > 1:
        raise torch.OutOfMemoryError("no more memory")


failed_once, turns = threading.Event(), itertools.count()
# after how many forwards, where it is not 4
COUNTDOWNS = {"raises_at_once": 0, "fails_behind_the_forward": 0}
# token id FIRST_ID + i -> what becomes of that forward and those after it
FIRST_ID = 4000
TARGET_FAULTS: dict[str, Callable[[Moment], Any]] = {
    "raises": raises(RuntimeError("a broken kernel")),
    "raises_at_once": raises(RuntimeError("a broken kernel")),
    "fails_once": fails_once,
    "fails_on_and_off": fails_on_and_off,
    "lacks_memory": lacks_memory,
    "takes_no_drafts": takes_no_drafts,
    "gives_no_numbers": lambda *_: None,
    "fails_behind_the_forward": lambda *_: None,
    "dies": raises(SystemExit(1)),
}


def main(arguments: list[str]) -> int:
    assemble, load = core.assemble_engine, core.load_engine

    def assemble_faulty(options: Any) -> Any:
        engine = assemble(options)
        for name in DRAFTER_FAULTS:
            engine.panel.drafters[name] = TimedDrafter(Faulty(name), options.drafter_timeout)
            engine.panel.choices[name] = (name,)
            engine.totals.by_drafter[name] = core.Statistics()
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

    core.assemble_engine, core.load_engine = assemble_faulty, load_faulty
    http.Server = MortalServer
    return core.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
