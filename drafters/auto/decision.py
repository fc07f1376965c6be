"""What the controller decided on a request, and its reasons, as they are shown."""

from typing import NamedTuple

from runtime.values import Json


class Decision(NamedTuple):
    """What was chosen, and the numbers behind it; costs in passes of plain decoding."""

    drafter: str
    num_tokens: int
    alpha: float = 0.0  # of the first position
    c: float = 0.0
    break_even: float = 1.0  # the chance of being accepted at which a draft of a token pays
    least_chance: float = 0.0  # the least acceptance at which one more drafted token pays
    expected_speedup: float = 1.0  # of the whole batch

    def as_dict(self) -> Json:
        """A dict for JSON, with the sentence."""
        values = {n: round(v, 4) if isinstance(v, float) else v for n, v in self._asdict().items()}
        return values | {"says": str(self)}

    def __str__(self) -> str:
        alpha, c, even = map(_short, (self.alpha, self.c, self.break_even))
        if self.num_tokens:
            expected = f"expected {self.expected_speedup:.2f}×"
            return f"{self.drafter}, K={self.num_tokens}: α {alpha}, c {c}, {expected}"
        if self.break_even > 1:
            work = f"to draft with {self.drafter} and verify"  # c is the first part of it
            return f"K=0 is faster here: {work} costs more than it can save (c {c})"
        if self.alpha >= self.break_even:  # it has text to read first, say
            return f"K=0 is faster now: starting {self.drafter} would not pay yet (α {alpha})"
        return f"K=0 is faster here: {self.drafter} has α {alpha} < break-even {even} (c {c})"


def _short(value: float) -> str:
    """Example: 0.714 -> ".71"."""
    return f"{value:.2f}".removeprefix("0")
