"""Several drafters as one: in each cycle the one that the controller thinks fastest proposes.

All of them observe every verdict, so any may propose next; a model that was passed over reads what
it has missed when its turn comes. Without controller the first one always proposes.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from messages import Draft, Sampling, Verdict

from .base import Drafter
from .noise import Noise


@dataclass(slots=True)
class _State:
    chosen: str
    states: dict[str, Any]  # by drafter


class AutoDrafter(Drafter):
    """Chooses among the drafters it was made of."""

    name: ClassVar[str] = "auto"

    def __init__(self, drafters: dict[str, Drafter]) -> None:
        """`drafters` by name, the one to begin with first."""
        self._drafters = drafters
        self.needs_hidden = any(drafter.needs_hidden for drafter in drafters.values())

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> _State:
        states: dict[str, Any] = {}
        try:
            for name, drafter in self._drafters.items():
                states[name] = drafter.open(prompt, sampling, noise)
        except Exception:
            self._close(states)
            raise
        return _State(next(iter(states)), states)

    def candidates(self, state: _State) -> list[str]:
        return list(state.states)

    def select(self, state: _State, name: str) -> None:
        state.chosen = name

    def guess(self, state: _State, name: str, max_tokens: int) -> list[int] | None:
        return self._drafters[name].guess(state.states[name], name, max_tokens)

    def propose(self, state: _State, max_tokens: int) -> Draft:
        return self._drafters[state.chosen].propose(state.states[state.chosen], max_tokens)

    def propose_batch(self, states: list[_State], max_tokens: list[int]) -> list[Draft]:
        """One batch per drafter that was chosen."""
        drafts: dict[int, Draft] = {}
        for name in dict.fromkeys(state.chosen for state in states):
            at = [i for i, state in enumerate(states) if state.chosen == name]
            proposed = self._drafters[name].propose_batch(
                [states[i].states[name] for i in at], [max_tokens[i] for i in at]
            )
            drafts |= zip(at, proposed, strict=True)
        return [drafts[i] for i in range(len(states))]

    def observe(self, state: _State, verdict: Verdict) -> None:
        """Who proposed rolls back; to the others what came is text like any other."""
        passed_over = replace(verdict, drafted=0)
        for name, own in state.states.items():
            is_chosen = name == state.chosen
            self._drafters[name].observe(own, verdict if is_chosen else passed_over)

    def close(self, state: _State) -> None:
        self._close(state.states)

    def _close(self, states: dict[str, Any]) -> None:
        with ExitStack() as stack:  # all of them, also where one raises
            for name, own in states.items():
                stack.callback(self._drafters[name].close, own)
