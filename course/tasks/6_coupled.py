"""Task 6. Coupled sampling: the same seed, the same text

(Page: http://127.0.0.1:5000/#chapter-9, 9. The same noise)

Rejection keeps the chances of each text, but which text comes depends on the drafts. This project's
default rule keeps the text itself. All chance comes from noise that depends on the seed and on the
position in the text, on nothing else. Then the target's choice at a position is fixed, whoever
guessed whatever, and `verify` of task 1 stays as it is.

The draw is a race. noise(seed, position, V) gives each token x a number e[x] > 0, drawn from the
exponential distribution. Token x takes the time e[x] / weight[x], and the shortest time wins. The
weight is exp(logit / temperature). So x wins with probability weight[x] / (sum of weights), which
is the softmax: a known property of this distribution. A weight of 0 never wins.

A temperature below 1 sharpens the differences, one above 1 flattens them. Subtract the largest
logit from all first, which changes no winner, else exp overflows.

    text      The  cat  sat │ on   a                the pending token is sat, at position 2
    position   0    1    2  │ 3    4    5           the first choice will stand at position 3

A drafter that runs the same race, with the same noise and its own weights, mostly draws the same
token where its weights are close to the target's. (Daliri, Musco, Suresh, 2024.)

Write `choose` and `cycle`. Then: python -m course 6
"""

import numpy as np

from course.lab import Row, noise, verify


def choose(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    """The token that wins the race at this position. logits [V]."""
    raise NotImplementedError


def cycle(target: Row, text: list[int], draft: list[int], temperature: float, seed: int) -> None:
    """The cycle of task 2, where the target's choices are sampled.

    A position is the number of tokens before it: the first choice of a cycle has len(text).
    """
    raise NotImplementedError
