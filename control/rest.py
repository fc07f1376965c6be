"""Does drafting pay at all? Told by the clock: tokens a second with drafts and without.

    plan · kept … kept · plan · kept … kept · rest … rest · plan · kept …
    └─────── a look: tokens, ms ───────┘      └ ms ┘

What the controller expects of drafts leaves out what it takes to choose them, to read what was
missed, and whatever else the machine does meanwhile. So all of a cycle's time is held against all
of its tokens. Where drafts lose, nothing is chosen for a while: such a rest costs what plain
decoding costs. Rests become longer until drafts pay again.
"""

from dataclasses import dataclass
from math import sqrt

_FIRST, _GROWTH, _LONGEST = 4, 4, 1024  # cycles of a rest
_LOOK = 8  # cycles with drafts that are looked at, at least
_RENEWED = 256  # cycles with drafts until plain ones are measured again
_KEPT = 0.98  # of what was seen, with each cycle: the machine has slow moments
_OLD_KEPT = 0.25  # and with each rest
_EFFORT_KEPT = 0.95  # and with each choice
_OUTLIER = 3.0  # times as long as on average: the machine did something else
_LITTLE = 0.03  # of the time: to lose so much is no reason to rest
_EFFORT, _MOST = 0.05, 16  # so much is, for keeping a choice for some cycles; and how many at most


@dataclass(slots=True)
class Rest:
    """Batches of about one size: what drafts bring, and whether none are chosen for now."""

    tokens: float = 0.0  # of the last cycles with drafts, in cycles of plain decoding
    time: float = 0.0  # and what they took
    effort: float = 0.0  # what choosing takes of a cycle for which it is done
    looks: int = 0  # cycles with drafts since the last rest
    left: int = 0  # cycles of this rest
    length: int = _FIRST  # of the next one

    def begin(self) -> bool:
        """Whether the next cycle is one of a rest; counts it."""
        if not self.left and self.looks >= _LOOK:
            self._judge()
        if not self.left:
            return False
        self.left -= 1
        return True

    def _judge(self) -> None:
        if not self.time or self.looks >= _RENEWED:  # what plain cycles take is to be measured
            self.left, self.looks = _FIRST, 0
        elif self.tokens < (1 - _LITTLE) * self.time:
            self.left, self.looks = self.length, 0
            self.length = min(_GROWTH * self.length, _LONGEST)
            self.tokens, self.time = _OLD_KEPT * self.tokens, _OLD_KEPT * self.time
        elif self.looks > 2 * _MOST:
            self.length = _FIRST

    def see(self, tokens: float, time: float) -> None:
        """A cycle for which drafts were chosen; `time` is 0 where plain ones are not known yet.

        In the first one models read what they missed, which serves all that follow: not counted.
        """
        self.looks += 1
        if time and self.looks > 1:
            time = min(time, _OUTLIER * (self.time / self.tokens if self.tokens else 1.0) * tokens)
            self.tokens = _KEPT * self.tokens + tokens
            self.time = _KEPT * self.time + time

    def see_choice(self, time: float) -> None:
        """What it took to choose drafts, and to learn what became of them."""
        known = self.effort or time
        self.effort = known + (1 - _EFFORT_KEPT) * (min(time, _OUTLIER * known) - known)

    @property
    def keeps(self) -> int:
        """For how many more cycles a choice is kept, so that choosing is a small part of them."""
        return max(1, min(_MOST, round(self.effort / _EFFORT))) - 1

    def join(self, batch: int) -> None:
        """A new request: one of at least so many may be different."""
        self.left -= self.left // batch


class PlainCycles:
    """How long cycles without drafts take, by the size of the batch."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # ms and cycles; old ones count less

    def see(self, batch: int, ms: float) -> None:
        """A cycle without drafts."""
        total, count = self._seen.get(batch, (0.0, 0.0))
        if count:
            ms = min(ms, _OUTLIER * total / count)
        self._seen[batch] = _KEPT * total + ms, _KEPT * count + 1

    def ms(self, batch: int) -> float:
        """Of the nearest size that was seen, in proportion to the root of both; 0 before any was.

        A larger batch takes longer, but not as much longer as it is larger.
        """
        if not self._seen:
            return 0.0
        near = min(self._seen, key=lambda other: abs(other - batch))
        total, count = self._seen[near]
        return total / count * sqrt(batch / near)
