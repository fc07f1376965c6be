"""Cycles of a batch by chance: who accepts how much, and how long that takes.

    texts = [Text.of(alpha=0.75, k=4)] * 8                  eight requests that draft four tokens
    steady(texts, costs, 20_000, random.Random(0))          tokens per second

`costs` says what the parts of a cycle take; `benchmarks.scale` has them from a formula, or from
measurements. Nothing is run, and a seed gives the same figures everywhere.
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple


class Costs(NamedTuple):
    """Seconds of a cycle's parts."""

    draft: Callable[[int], float]  # for so many requests, all tokens of a draft
    verify: Callable[[int, int], float]  # for so many requests and rows in all
    other: Callable[[int], float]  # for so many requests: the engine's own time


class Text:
    """How a request's cycles go: pairs (drafted, accepted), drawn by their weights."""

    def __init__(self, cycles: dict[tuple[int, int], float], alpha: float) -> None:
        """`alpha` is the chance of guessing the bonus token, too, once all drafts are accepted."""
        self.pairs, self.alpha = list(cycles), alpha
        self._sums = list(accumulate(cycles.values()))

    @classmethod
    def of(cls, alpha: float, k: int) -> "Text":
        """Each drafted token is accepted with the chance alpha, once those before it are."""
        chances = [alpha**i * (1 - alpha) for i in range(k)] + [alpha**k]
        return cls({(k, i): chance for i, chance in enumerate(chances)}, alpha)

    def draw(self, chance: random.Random) -> tuple[int, int, bool]:
        """Drafted, accepted, and whether the next cycle was guessed: all of it and the bonus."""
        at = bisect_left(self._sums, chance.random() * self._sums[-1])
        drafted, accepted = self.pairs[at]
        return drafted, accepted, drafted == accepted and chance.random() < self.alpha


IN_ORDER, LAUNCH, DRAFT, SKIP = "in order", "launch ahead", "draft ahead", "skip"


def cycle(
    texts: list[Text], costs: Costs, schedule: str, has_draft: list[bool], chance: random.Random
) -> tuple[float, list[int]]:
    """Seconds of one cycle of a batch, and each request's tokens. Updates `has_draft`.

    in order      draft, verify, other, one after the other
    launch ahead  `other` of the next cycle runs beside verify, as if all drafts were accepted; for
                  requests where they were not it is done again
    draft ahead   the next drafts are made beside verify, as if all drafts and then the drafter's
                  next token were accepted; for the other requests they are made again
    skip          the same, but the other requests go without a draft for a cycle
    """
    batch, drawn = len(texts), [text.draw(chance) for text in texts]
    drawn = [one if has else (0, 0, one[2]) for one, has in zip(drawn, has_draft, strict=True)]
    draft, other = costs.draft(batch), costs.other(batch)
    verify = costs.verify(batch, sum(drafted + 1 for drafted, _, _ in drawn))
    tokens = [accepted + 1 for _, accepted, _ in drawn]
    if schedule == IN_ORDER:
        return draft + verify + other, tokens
    if schedule == LAUNCH:
        wrong = sum(accepted < drafted for drafted, accepted, _ in drawn)
        return draft + max(verify, other) + other * wrong / batch, tokens
    longest = max(drafted for text in texts for drafted, _ in text.pairs)
    ahead = draft * (longest + 1) / longest if longest else 0.0  # the bonus is guessed as well
    seconds = max(verify, ahead) + other
    if schedule == SKIP:
        has_draft[:] = [is_guessed for _, _, is_guessed in drawn]
    elif wrong := sum(not is_guessed for _, _, is_guessed in drawn):
        seconds += costs.draft(wrong)
    return seconds, tokens


def steady(
    texts: list[Text], costs: Costs, cycles: int, chance: random.Random, schedule: str = IN_ORDER
) -> float:
    """Tokens per second of a batch that nobody leaves, over so many cycles of one request."""
    seconds, tokens, has_draft = 0.0, 0, [True] * len(texts)
    for _ in range(max(1, cycles // len(texts))):
        spent, got = cycle(texts, costs, schedule, has_draft, chance)
        seconds, tokens = seconds + spent, tokens + sum(got)
    return tokens / seconds


def drained(texts: list[Text], costs: Costs, num_tokens: int, chance: random.Random) -> float:
    """Seconds until every request has its tokens; who has them leaves the batch."""
    seconds, left = 0.0, [(text, num_tokens) for text in texts]
    while left:
        running = [text for text, _ in left]
        spent, got = cycle(running, costs, IN_ORDER, [True] * len(left), chance)
        seconds += spent
        left = [(t, n - m) for (t, n), m in zip(left, got, strict=True) if n > m]
    return seconds
