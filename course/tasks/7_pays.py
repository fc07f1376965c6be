"""Task 7. When does it pay?

(Page: http://127.0.0.1:5000/#chapter-2, 2. One stream, six positions; #chapter-7, 7. When it pays)

Each token that a pass reads is a position. A pass loads each weight once, and multiplies it at each
position. Loading takes longer, so a few more positions are nearly free, and many are not. On a busy
Intel Xeon the products of a pass with 53 million weights took:

    positions    1      5      17     65
    ms          16.9   20.3   27.3   48.7

Such a table is the curve, pass_ms. It differs by machine, model and number of texts in a pass:
where 64 texts fill it already, each guess costs time. “What to try first” on the page finds yours.

A cycle with K guesses takes the time of these and of a pass over K + 1 positions. What does it
bring? α is the chance that a guess is right if all before it were. So the first guess stays with
chance α, the second with α · α, and so on. One token, recovered or bonus, comes in any case.

    K = 4, α = 0.75, a guess takes a tenth of a pass, the pass takes as long as a plain one:
    3.05 tokens in 1.4 passes: 2.18 times as fast.      With α = 0.2 it is 0.89: a loss.

So an engine chooses K anew as texts change, also 0. What loses: surprising text (α is low), a slow
drafter, and a full batch (the curve is steep).

Write the four functions. Then: python -m course 7
"""


def tokens(alpha: float, k: int) -> float:
    """How many tokens a cycle with k guesses brings on average, from 1 (k = 0) to k + 1 (α = 1)."""
    raise NotImplementedError


def speedup(alpha: float, k: int, draft_ms: float, pass_ms: dict[int, float]) -> float:
    """Times as fast as plain decoding, which brings one token in a pass over one position.

    draft_ms is the time of one guess; pass_ms[n] that of a pass over n positions.
    """
    raise NotImplementedError


def best_k(alpha: float, draft_ms: float, pass_ms: dict[int, float]) -> int:
    """The fastest k from 0 to n - 1, where the curve knows 1, 2, … n positions."""
    raise NotImplementedError


def break_even(k: int, draft_ms: float, pass_ms: dict[int, float]) -> float | None:
    """The α (three decimals) from which k guesses are as fast as plain decoding; None if no α is.

    `speedup` grows with α, so halve the interval from 0 to 1 again and again.
    """
    raise NotImplementedError
