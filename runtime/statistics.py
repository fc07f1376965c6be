"""Counters and times of speculation, of one request or many, and the figures made of them.

The names are the field's (vLLM's `metrics.speculative_decoding`, llama.cpp's `timings`); FORMULAS
says what each figure divides by what, because systems disagree. A rate is null before there is
anything to divide.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import torch

from runtime.values import PLAIN

FORMULAS = {
    "num_draft_tokens": "drafted tokens, less those after an accepted one that ended the text",
    "draft_acceptance_rate": "accepted / drafted",
    "mean_acceptance_length": "1 + accepted / cycles with a draft",
    "tokens_per_pass": "tokens emitted after the prefill's / target forwards after prefill",
    "acceptance_rate_per_position": "position i accepted / position i drafted",
    "conditional_acceptance_rate_per_position": "position i accepted / i drafted, i - 1 accepted",
    "completion_tokens": "accepted + recovered + bonus",
}
_COUNTERS = (  # of the block `speculative_decoding`
    "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_recovered_tokens",
    "num_bonus_tokens", "draft_acceptance_rate", "mean_acceptance_length", "acceptance_histogram",
    "target_passes", "tokens_per_pass",
)  # fmt: skip


@dataclass
class Statistics:
    """What happened. Invariant: completion_tokens = accepted + recovered + bonus."""

    num_spec_steps: int = 0  # cycles in which something was drafted
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_recovered_tokens: int = 0
    num_bonus_tokens: int = 0
    prefills: int = 0  # target forwards that read a prompt and gave its first token
    target_passes: int = 0  # target forwards after those
    drafted_at: list[int] = field(default_factory=list)  # by position in the draft
    # Drafted tokens with everything before them accepted.
    reached_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prompt_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    def record(self, drafted: int, kinds: list[str], beside: int = 0) -> None:
        """Count one cycle: `drafted` tokens judged, and the kind of each token that stays.

        `beside` more were drafted in other branches; positions are those of the text's branch.
        Example: record(3, ["accepted", "recovered"]) counts 3 drafted, 1 accepted, 1 recovered.
        """
        accepted = kinds.count("accepted")
        self.num_recovered_tokens += kinds.count("recovered")
        self.num_bonus_tokens += kinds.count("bonus")
        if drafted:
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted + beside
            self.num_accepted_draft_tokens += accepted
            self.drafted_at = _summed(self.drafted_at, [1] * drafted)
            self.reached_at = _summed(self.reached_at, [1] * min(drafted, accepted + 1))
            self.accepted_at = _summed(self.accepted_at, [1] * accepted)

    def record_times(self, times: list[float], is_prefill: bool) -> None:
        """Count one cycle's seconds: began, drafted, verified, done."""
        draft_ms, verify_ms, other_ms = ((end - begin) * 1e3 for begin, end in pairwise(times))
        if is_prefill:
            self.prefills += 1
            self.prompt_ms += draft_ms + verify_ms + other_ms
        else:
            self.target_passes += 1
            self.draft_ms += draft_ms
            self.verify_ms += verify_ms
            self.other_ms += other_ms

    def __add__(self, other: "Statistics") -> "Statistics":
        """The sum of both, as a new object."""
        total = Statistics()
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            both = _summed(mine, theirs) if isinstance(mine, list) else mine + theirs
            setattr(total, name, both)
        return total

    @property
    def completion_tokens(self) -> int:
        return self.num_accepted_draft_tokens + self.num_recovered_tokens + self.num_bonus_tokens

    @property
    def acceptance_histogram(self) -> list[int]:
        """Cycles with a draft, by tokens accepted: those that reached a position, less the next."""
        return [at - more for at, more in pairwise([self.num_spec_steps, *self.accepted_at, 0])]

    @property
    def passes(self) -> int:
        """All forwards of the target."""
        return self.target_passes + self.prefills

    @property
    def draft_acceptance_rate(self) -> float | None:
        return ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        accepted = ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        return None if accepted is None else round(1 + accepted, 4)

    @property
    def tokens_per_pass(self) -> float | None:
        return ratio(self.completion_tokens - self.prefills, self.target_passes)

    @property
    def decode_ms(self) -> float:
        """All time after prefill."""
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def ms_per_token(self) -> float | None:
        """Mean ms per token after the prefill's token."""
        return ratio(self.decode_ms, self.completion_tokens - self.prefills)

    def counters(self, num_spec_tokens: int) -> dict[str, Any]:
        """The `speculative_decoding` block; the histogram has K + 1 buckets, K the largest seen."""
        histogram = self.acceptance_histogram
        histogram += [0] * (num_spec_tokens + 1 - len(histogram))
        counts = {"num_spec_tokens": len(histogram) - 1} | {n: getattr(self, n) for n in _COUNTERS}
        return counts | {"acceptance_histogram": histogram}

    def per_position(self) -> dict[str, list[float | None]]:
        """Acceptance by position in the draft: of all drafted, and of those that were reached."""
        at = self.accepted_at, self.drafted_at, self.reached_at
        positions = list(zip_longest(*at, fillvalue=0))
        of_reached = [ratio(n, reached) for n, _, reached in positions]
        return {
            "acceptance_rate_per_position": [ratio(n, drafted) for n, drafted, _ in positions],
            "conditional_acceptance_rate_per_position": of_reached,
        }

    def timings(self) -> dict[str, float]:
        """The `timings` block; predicted_ms = draft + verify + other, all after prefill."""
        return {
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_ms": round(self.decode_ms, 3),
            "predicted_n": self.completion_tokens,
            "draft_n": self.num_draft_tokens,
            "draft_n_accepted": self.num_accepted_draft_tokens,
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "other_ms": round(self.other_ms, 3),
        }


def clock(device: torch.device) -> Callable[[], float]:
    """Tells seconds, once the device has done all that it was asked to do."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return now


class Totals:
    """Statistics of closed requests, and what else is counted over the server's life."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are those of drafters that a request may ask for."""
        self.by_drafter = {name: Statistics() for name in [*names, PLAIN]}
        self.by_rule = {rule: Statistics() for rule in ("greedy", "coupled", "rejection")}
        self.recent: deque[tuple[int, int]] = deque(maxlen=200)  # (drafted, accepted) by cycle
        self.num_faults = 0  # forwards of the target that failed

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Count a cycle among the recent ones."""
        if num_drafted:
            self.recent.append((num_drafted, num_accepted))

    def add(self, name: str | None, rule: str, statistics: Statistics) -> None:
        """Count a closed request."""
        # A new object each time: /health reads whole sums from another thread.
        name = name or PLAIN
        self.by_drafter[name] = self.by_drafter[name] + statistics
        self.by_rule[rule] = self.by_rule[rule] + statistics


def ratio(part: float, whole: float) -> float | None:
    """part / whole to four places; None where there is nothing to divide by."""
    return round(part / whole, 4) if whole else None


def _summed(counts: list[int], more: list[int]) -> list[int]:
    """The sums of both, position by position; one of them may be longer."""
    return [mine + theirs for mine, theirs in zip_longest(counts, more, fillvalue=0)]
