"""Every substring of a growing text, how often it occurs, and what mostly follows it.

    text      a b c a b d a b
    suffix                a b   occurs three times; c and d followed it
    walk                    → d, the later one of two that are equally frequent

A suffix tree of a text of n tokens has as many nodes as the text has different right contexts. Here
it is kept as its twin, the suffix automaton: a state for all substrings that end at the same
places, an edge per token that follows, and a link to the state of the longest suffix that ends
elsewhere, too. It grows at its end in O(1) amortised, as Ukkonen's tree does, and it knows at any
time the longest suffix that has occurred before: the link of the last state.

Sources: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); for
drafting, SuffixDecoding (Oliaro et al., arXiv 2411.04975).

Not covered: to forget. Who bounds the text throws the whole automaton away (see suffix.py).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

DEPTH = 64  # suffixes that a token is counted for, and the longest match
END = -1  # between two texts: no token, so no draft goes on beyond it
ROOT = 0  # the state of the empty string


class Place(NamedTuple):
    """A string that occurs in the text: its state, and how many tokens it has."""

    state: int = ROOT
    length: int = 0


class Step(NamedTuple):
    """A token that may follow, and where that leads."""

    token: int
    count: int  # how often it has followed the string before it
    total: int  # how often anything has
    length: int  # of that string


class SuffixAutomaton:
    """The substrings of one text.

    Example: after extend([1, 2, 3, 1, 2, 4, 1, 2]), next(walk(end)) is Step(4, 1, 2, 2): the
    longest suffix that occurred before has 2 tokens, was followed twice, and once by 4.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # by token
        self._link = [-1]
        self._length = [0]  # of a state's longest string
        self._count = [0]  # how often its strings occur
        self._likely = [END]  # the token that has followed most often; the latest of equals
        self._last = ROOT  # the state of the whole text

    def __len__(self) -> int:
        """The number of tokens."""
        return self._length[self._last]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens: O(1) amortised each, and at most DEPTH suffixes of each are counted."""
        for token in tokens:
            before, self._last = self._last, self._grown(token)
            self._count_token(before, token)

    @property
    def end(self) -> Place:
        """Where the text ends."""
        return Place(self._last, len(self))

    @property
    def num_known(self) -> int:
        """The length of the text's longest suffix that has occurred before."""
        return self._length[max(self._link[self._last], ROOT)]

    def follow(self, place: Place, tokens: Iterable[int]) -> Place:
        """The longest suffix of a string and these tokens that occurs, of at most DEPTH tokens.

        O(1) amortised for each token, as a match grows by one at most.
        """
        follow, link, longest = self._next, self._link, self._length
        state, length = place
        for token in tokens:
            while state != ROOT and token not in follow[state]:
                state = link[state]
                length = longest[state]
            if token not in follow[state]:
                continue
            state, length = follow[state][token], min(length + 1, DEPTH)
            while longest[link[state]] >= length:  # what is shorter may end elsewhere, too
                state = link[state]
        return Place(state, length)

    def walk(self, place: Place) -> Iterator[Step]:
        """What mostly follows a string, what follows that, and so on.

        Where the text ends nothing follows: it goes on behind the longest suffix that occurred
        before, and so reads a periodic text on into itself.
        """
        state, length = place
        while True:
            at_end = not self._next[state]
            if at_end:
                state = max(self._link[state], ROOT)
                length = self._length[state]
            token = self._likely[state]
            if state == ROOT or token == END:
                return
            total, state = self._count[state] - at_end, self._next[state][token]
            count = self._count[state]
            yield Step(token, count, max(total, count), length)  # not all suffixes are counted
            length += 1

    def _grown(self, token: int) -> int:
        """The state of the text with one more token."""
        follow, link, length = self._next, self._link, self._length
        new, state = self._add({}, length[self._last] + 1, 0, END), self._last
        while state >= 0 and token not in follow[state]:
            follow[state][token] = new
            state = link[state]
        if state < 0:
            link[new] = ROOT
            return new
        target = follow[state][token]
        if length[target] == length[state] + 1:
            link[new] = target
            return new
        # Only the shorter strings of `target` occur here as well: they get a state of their own.
        short = self._add(
            dict(follow[target]), length[state] + 1, self._count[target], self._likely[target]
        )
        link[short] = link[target]
        link[target] = link[new] = short
        while state >= 0 and follow[state].get(token) == target:
            follow[state][token] = short
            state = link[state]
        return new

    def _add(self, follow: dict[int, int], length: int, count: int, likely: int) -> int:
        self._next.append(follow)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(count)
        self._likely.append(likely)
        return len(self._link) - 1

    def _count_token(self, state: int, token: int) -> None:
        """The token has followed the text that ended in `state`, and all suffixes of that."""
        follow, count, likely, seen = self._next, self._count, self._likely, -1
        for _ in range(DEPTH):
            target = follow[state][token]
            if target != seen:
                count[target] += 1
                seen = target
            best = likely[state]
            if best != token and (best == END or count[target] >= count[follow[state][best]]):
                likely[state] = token
            state = self._link[state]
            if state < 0:
                break
