"""Task 7, solved."""


def tokens(alpha: float, k: int) -> float:
    return sum(alpha**i for i in range(k + 1))


def speedup(alpha: float, k: int, draft_ms: float, pass_ms: dict[int, float]) -> float:
    cycle_ms = k * draft_ms + pass_ms[k + 1]
    return tokens(alpha, k) * pass_ms[1] / cycle_ms


def best_k(alpha: float, draft_ms: float, pass_ms: dict[int, float]) -> int:
    return max(range(max(pass_ms)), key=lambda k: speedup(alpha, k, draft_ms, pass_ms))


def break_even(k: int, draft_ms: float, pass_ms: dict[int, float]) -> float | None:
    low, high = 0.0, 1.0
    if speedup(1.0, k, draft_ms, pass_ms) < 1:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        if speedup(middle, k, draft_ms, pass_ms) < 1:
            low = middle
        else:
            high = middle
    return high
