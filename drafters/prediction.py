"""Propose the text that the client expects: a file before an edit, which the answer mostly repeats.

    prediction   class Pile : ↵ def push ( self , item )
    text         class Pile : ↵ def add (
                                    │   └ "(" occurs next behind "push": the draft is self , item )
                                    └ another token: nothing is proposed

While the text is the prediction, the draft is what follows there, as long as a draft may be. After
a difference the drafter looks up the end of the text in the prediction. The longest match wins. Of
equally long ones the first wins that lies at or behind the place up to which the prediction was
followed. So the drafter finds its place behind insertions, deletions and replacements.

No model runs and nothing is drawn: q is one-hot, as in ngram. N-grams of the prediction are hashed
once, so a lookup takes the same time in a long prediction, but for a binary search. Drafts never
enter the index, so a rejected draft needs no rollback.

Source: the field `prediction` of OpenAI's API ("predicted outputs", 2024). OpenAI has not published
how it is used there.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from runtime.sampling import Noise
from runtime.values import Draft, Sampling

from .base import GuessingDrafter
from .plan import DraftedText

_SIZES = 4, 2, 1  # of the n-grams that are looked up
_CERTAIN = 4  # equal tokens in a row, after which a place is believed


class Expected:
    """A prediction, and the place in it that the output has come to.

    Example: after take([5, 6, 7, 8]) and extend([5, 9]) there is no continuation. After extend([7])
    continuation(3) is [8], and matched is 1.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.forced: Sequence[int] = ()  # what a grammar puts next. Set by the pool
        self.matched = 0  # the output's last tokens that stand before the place
        self._place = self._followed = 0  # of the next token; the last place that was believed
        self._last: list[int] = []  # tokens of the output: none of the prompt can be repeated
        self._ends: dict[tuple[int, ...], list[int]] = {}  # the places behind each n-gram, rising

    def take(self, prediction: Sequence[int]) -> None:
        """Follow this prediction. Before, there is none."""
        self.tokens = list(prediction)
        for size in _SIZES:
            for end in range(size, len(prediction) + 1):
                self._ends.setdefault(tuple(prediction[end - size : end]), []).append(end)

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow the output by these tokens."""
        for token in tokens:
            self._last = [*self._last[1 - _SIZES[0] :], token]
            if self.continuation(1) == [token]:
                self.matched += 1
                self._place += 1
            else:
                self._find()
            if self.matched >= _CERTAIN:
                self._followed = self._place

    def _find(self) -> None:
        """Look up the end of the output; where it does not occur, nothing is to be proposed."""
        for size in (size for size in _SIZES if size <= len(self._last)):
            if ends := self._ends.get(tuple(self._last[-size:])):
                first = bisect_left(ends, self._followed)
                self.matched, self._place = size, ends[min(first, len(ends) - 1)]
                return
        self.matched, self._place = 0, len(self.tokens)

    def continuation(self, max_tokens: int) -> list[int]:
        """At most so many tokens that follow in the prediction."""
        return self.tokens[self._place : self._place + max_tokens]


class PredictionDrafter(GuessingDrafter):
    """Proposes from the prediction of its request."""

    name: ClassVar[str] = "prediction"
    needs = "prediction"
    leads = True
    accepts_forced_prefix = True

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> Expected:
        return Expected()

    def attach(self, state: Expected, text: DraftedText) -> None:
        state.take(text.request.prediction)

    def guess(self, state: Expected, max_tokens: int) -> list[int]:
        """What follows in the prediction. Nothing, where a grammar forces other tokens."""
        draft, forced = state.continuation(max_tokens), [*state.forced[:max_tokens]]
        return draft if draft[: len(forced)] == forced else []

    def evidence(self, state: Expected) -> int:
        """How many tokens of the output stand before the proposal in the prediction."""
        return state.matched

    # `observe` is Drafter's: the place moves by the new tokens.
    def count(self, text: DraftedText, draft: Draft, judged: Draft, came: list[int]) -> None:
        num_verified, num_kept = count_verified(draft.tokens, judged, came)
        text.predicted["accepted"] += num_kept
        text.predicted["rejected"] += num_verified - num_kept


def count_verified(chain: list[int], verified: Draft, came: list[int]) -> tuple[int, int]:
    """How many tokens of a drafter's chain were verified, and how many of them the text got.

    Those behind an end of text count as not verified. `came` are the tokens that the text got.

    Example: 5 6 7 in a tree that has 5 6 and 5 8; the text got 5 8 9 -> 2, 1.
    """
    at, num_verified, num_kept = -1, 0, 0
    for token in chain:
        below = [i for i in verified.children(at) if verified.tokens[i] == token]
        if not below or num_kept == len(came):
            break
        at, num_verified = below[0], num_verified + 1
        num_kept += came[num_kept] == token and num_kept == num_verified - 1
    return num_verified, num_kept
