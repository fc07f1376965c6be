"""Does drafting pay at all? The clock decides: tokens a second with drafts and without.

    choice · reused … reused · choice · reused … reused · rest … rest · choice · reused …
    └──────────────── a look: tokens, ms ─────────────┘   └── ms ───┘

What the controller expects of drafts leaves out what it takes to choose them, to read what was
missed, and whatever else the machine does meanwhile. So all of a cycle's time is held against all
of its tokens. Where drafts lose, nothing is chosen for so long that a look loses a small part of
the time. And where choosing takes long, a choice serves some cycles.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from statistics import median_low

_LOOK = 8  # cycles with drafts that are looked at, at least
_RENEWED, _PLAIN = 256, 4  # cycles with drafts until some plain ones are measured again
_DECAY, _REST_DECAY = 0.98, 0.25  # factors of what was seen, with each cycle and each rest
_OUTLIER = 3.0  # times as long as on average: the machine did something else
_LITTLE = 0.03  # of the time: to lose so much is no reason to rest
_COST = 0.02  # of the time: what looks may lose
_EFFORT, _MOST = 0.05, 16  # of the time, for choosing; cycles that a choice serves, at most
Recent = partial(deque[float], maxlen=8)  # ms: their median is not moved by an accident


@dataclass
class Rest:
    """Batches of about one size: what drafts bring, and whether none are chosen for now."""

    cycles: float = 0.0  # with drafts, old ones counting less
    tokens: float = 0.0  # of a request, in these
    time: float = 0.0  # that they took, in plain cycles: each gives a token
    # Of plain cycles, whoever might draft; of more requests the root of their number more.
    plain: deque[float] = field(default_factory=Recent)
    efforts: deque[float] = field(default_factory=Recent)  # of choosing
    looks: int = 0  # cycles with drafts since the last rest
    left: int = 0  # cycles of this rest

    def begin(self) -> bool:
        """Whether the next cycle is one of a rest; counts it."""
        if not self.left and self.looks >= _LOOK:
            lost = self.time - self.tokens
            if not self.plain or self.looks >= _RENEWED:  # what plain cycles take is to be seen
                self.left, self.looks = _PLAIN, 0
            elif lost > _LITTLE * self.time:
                self.left, self.looks = int(_LOOK * lost / self.cycles / _COST), 0
                self._fade(_REST_DECAY)
        self.left -= (is_rest := self.left > 0)
        return is_rest

    def see(self, tokens: float, batch: int, ms: float) -> None:
        """A cycle for which drafts were chosen gave each of `batch` requests so many tokens.

        In the first one models read what they missed, which serves all that follow: not counted.
        """
        self.looks += 1
        if self.plain and self.looks > 1:
            usual = self.time / self.tokens if self.tokens else 1.0
            time = min(ms / self._plain_ms(batch), _OUTLIER * usual * tokens)
            self._fade(_DECAY)
            self.cycles += 1
            self.tokens += tokens
            self.time += time

    def _fade(self, decay: float) -> None:
        self.cycles *= decay
        self.tokens *= decay
        self.time *= decay

    def see_plain(self, batch: int, ms: float) -> None:
        """A cycle without drafts."""
        self.plain.append(ms / sqrt(batch))

    def _plain_ms(self, batch: int) -> float:
        return median_low(self.plain) * sqrt(batch)

    def serves(self, batch: int) -> int:
        """For how many cycles a choice is made, so that choosing is a small part of them."""
        if not (self.plain and self.efforts):
            return 1
        effort = median_low(self.efforts) / self._plain_ms(batch)
        return max(1, min(_MOST, round(effort / _EFFORT)))

    def join(self, batch: int) -> None:
        """A new request: alone it may be quite different, one of many changes little."""
        self.left -= self.left // batch**2
