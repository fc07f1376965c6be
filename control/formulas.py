"""What speculation ought to bring, by the formulas of Leviathan et al. (arXiv 2211.17192).

    alpha     the chance that a draft token is accepted, the same for every token of a draft
    k         draft tokens per cycle
    c         the time of one draft step, in steps of plain decoding
    t_verify  the time of a target forward over k + 1 tokens, in the same unit; 1 = free

Not covered: chances that differ by position. A head's fourth token is worse than its first.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

LEAST_T_VERIFY, MOST_T_VERIFY = 0.7, 3.0
_NOISE = 1.05  # how far two measurements of the same work are apart on a quiet machine


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a cycle gives: 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α).

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return sum(alpha**i for i in range(k + 1))


def expected_speedup(alpha: float, k: int, c: float, t_verify: float = 1.0) -> float:
    """Expected tokens per time of a plain step: above 1 speculation is faster.

    >>> expected_speedup(1.0, 4, c=0.25)
    2.5
    """
    return expected_tokens(alpha, k) / (k * c + t_verify)


def break_even_alpha(k: int, c: float, t_verify: float = 1.0) -> float | None:
    """The alpha at which k drafts neither gain nor lose; None if even 1 would not do.

    >>> break_even_alpha(2, c=0.375)
    0.5
    >>> break_even_alpha(4, c=1.1) is None
    True
    """
    return solve(lambda alpha: expected_tokens(alpha, k), k * c + t_verify)


def break_even_of_drafts(drafted_at: list[int], num_cycles: int, cost: float) -> float | None:
    """The same for drafts of many lengths, as they were: drafted_at[i] had more than i tokens.

    `cost` is what all `num_cycles` of them took, in plain steps.

    >>> break_even_of_drafts([10, 10], num_cycles=10, cost=17.5)
    0.5
    """
    return solve(
        lambda alpha: num_cycles + sum(n * alpha**i for i, n in enumerate(drafted_at, 1)), cost
    )


def steadiness(
    speedups: list[float], tokens_per_pass: float | None, t_verify: float | None
) -> dict[str, Any]:
    """Whether the measured speed-ups of several runs can be believed, and how far they are apart.

    Two figures tell of a machine that was busy with something else. A pass over several tokens
    takes no less time than one over one, so a speed-up above the tokens per pass was not brought by
    speculation. And t_verify is near 1: rows of a pass are nearly free.

    >>> steadiness([1.4, 1.5, 2.6], tokens_per_pass=2.0, t_verify=1.1)
    {'disturbed': False, 'spread': [1.4, 2.6]}
    >>> steadiness([2.4, 2.5, 2.6], tokens_per_pass=2.0, t_verify=1.1)["disturbed"]
    True
    """
    is_too_fast = bool(speedups and tokens_per_pass) and (
        median(speedups) > _NOISE * tokens_per_pass
    )
    is_odd = t_verify is not None and not LEAST_T_VERIFY <= t_verify <= MOST_T_VERIFY
    spread = [round(edge(speedups), 4) for edge in (min, max)] if speedups else None
    return {"disturbed": is_too_fast or is_odd, "spread": spread}


def solve(tokens: Callable[[float], float], cost: float) -> float | None:
    """The alpha from 0 to 1 where `tokens`, which rises with alpha, reaches `cost`, else None."""
    if tokens(1.0) < cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(middle) < cost else (low, middle)
    return round(high, 6)
