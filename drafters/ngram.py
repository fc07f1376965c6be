"""Prompt lookup: propose what followed the last time the text ended like this.

    text:     … the quick brown fox … the quick brown
    suffix:                             the quick brown   (the longest of max … min tokens)
    match:      the quick brown                           (the most recent one)
    draft:                      fox …                     (what followed it, read on into itself)

No model and nothing drawn: q is one-hot, so a token is accepted with probability p. Where the text
repeats itself the draft is nearly free and often right. Where no suffix came before, the drafter
proposes nothing, and the cycle is plain decoding if no other drafter was asked.

A hash index per request keeps a lookup O(1) in the length of the text: each committed token adds
one entry per suffix length. Drafts never enter the index, so a rejected draft needs no rollback.

Source: Saxena, github.com/apoorvumang/prompt-lookup-decoding (2023).
"""

from collections.abc import Sequence
from typing import ClassVar

from runtime.sampling import Noise
from runtime.values import Sampling

from .base import Context, GuessingDrafter


class NgramDrafter(GuessingDrafter):
    """Proposes from the text of its request alone."""

    name: ClassVar[str] = "ngram"
    rank = 4
    accepts_forced_prefix = True

    @classmethod
    def build(cls, context: Context) -> "NgramDrafter":
        return cls(context.prompt_lookup_max, context.prompt_lookup_min)

    def __init__(self, prompt_lookup_max: int, prompt_lookup_min: int) -> None:
        self._sizes = prompt_lookup_min, prompt_lookup_max

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> "NgramIndex":
        index = NgramIndex(*self._sizes)
        index.extend(prompt)
        return index

    def guess(self, state: "NgramIndex", max_tokens: int) -> list[int]:
        """What followed the latest match, behind what a grammar forces."""
        return [*state.forced, *state.continuation(max_tokens - len(state.forced))]

    def evidence(self, state: "NgramIndex") -> int:
        """How many tokens of the text a proposal rests on."""
        return state.match()[0]

    # `observe` is Drafter's: the index is extended by the new tokens.


class NgramIndex:
    """A request's tokens, and for each n-gram in them where its latest continuation stands.

    Example (sizes 1 to 2): after extend([5, 6, 7, 5]) the suffix (5,) was last followed at position
    1, so continuation(3) is [6, 7, 5].
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self.tokens: list[int] = []
        self.forced: Sequence[int] = ()  # tokens behind the text, which its continuation follows
        self._sizes = range(largest, smallest - 1, -1)
        self._followed_at: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram enters once its continuation is known: none finds itself."""
        text = self.tokens
        for token in tokens:
            end = len(text)
            for size in self._sizes:
                if size <= end:
                    self._followed_at[tuple(text[end - size : end])] = end
            text.append(token)

    def match(self) -> tuple[int, int]:
        """The length of the longest known suffix, and where its continuation stands; (0, 0)."""
        text = [*self.tokens[-self._sizes[0] :], *self.forced]
        for size in self._sizes:
            start = self._followed_at.get(tuple(text[-size:])) if size <= len(text) else None
            if start is not None:
                return size, start
        return 0, 0

    def continuation(self, max_tokens: int) -> list[int]:
        """What followed the latest earlier occurrence of the longest known suffix; [] if none did.

        A match near the end runs out of text after a few tokens; the draft then reads on in itself,
        which is what periodic text does.
        """
        text, (size, start) = self.tokens, self.match()
        if not size or max_tokens < 1:
            return []
        text = [*text, *self.forced] if self.forced else text
        draft, period = text[start : start + max_tokens], len(text) - start
        while len(draft) < max_tokens:
            draft.append(draft[len(draft) - period])
        return draft
