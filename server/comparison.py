"""Speculation against plain decoding: what became of the time, and whether that is believable.

Everything is measured several times, in turn, and figures are medians. Where even these cannot be
right, as the machine was busy with something else, they are called disturbed (steadiness).
"""

from dataclasses import replace
from itertools import zip_longest
from statistics import median

import torch

from runtime.statistics import Statistics, ratio
from runtime.values import Json, Request, Sampling, TextSequence

# A choice between scores this close is decided by rounding: logits of one row and of several differ
# by 1e-5 in float32 and by 0.13 in bfloat16 as measured (float16 has 8 times its precision), and
# deeper models add to that.
_NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.06}
_LEAST_T_VERIFY, _MOST_T_VERIFY = 0.7, 3.0
_NOISE = 1.05  # by which factor two measurements of one task differ on a quiet machine

NUM_RUNS = 3  # of what is compared; figures are medians


def runs_to_compare(request: Request) -> list[Request]:
    """A request and its plain decoding, in turn: a busy machine then slows both.

    Each run is isolated, or the second would draft from the first one's text among past outputs.
    """
    request = replace(request, isolated=True)
    plain = replace(request, drafter=None)
    again = [replace(request, trace=False), replace(plain, trace=False)]
    return [request, replace(plain, trace=True)] + again * (NUM_RUNS - 1)


def comparison(
    runs: list[tuple[TextSequence, TextSequence]], events: list[Json], dtype: torch.dtype
) -> Json:
    """The `compare` block: what speculation changed, which should be nothing but the time.

    `runs` are pairs of finished sequences, speculative and plain, of the same request; the times
    are those of the median run of each. `events` are the first plain sequence's, with a trace.
    Under the rule of rejection sampled outputs are different draws from one distribution: those
    are not compared token by token (identical: null).
    """
    comparable = runs[0][0].request.sampling.is_coupled
    differing = [pair for pair in runs if pair[0].output != pair[1].output] if comparable else []
    speculative, plain = (differing or runs)[0]
    difference = _first_difference(speculative, plain, events, dtype) if differing else None
    every = [(ours.statistics, theirs.statistics) for ours, theirs in runs]
    ours, theirs = (_median_run(list(side)) for side in zip(*every, strict=True))
    times = [(plain.ms_per_token, drafted.ms_per_token) for drafted, plain in every]
    speedups = [ratio(*pair) for pair in times if None not in pair]
    measured = ratio(theirs.ms_per_token, ours.ms_per_token) if speedups else None
    costs = costs_of(ours, theirs)
    return {
        "plain": {
            "text": plain.text.text,
            "token_ids": plain.output,
            "finish_reason": plain.finish_reason,
            "timings": theirs.timings(),
        },
        "speculative": {"timings": ours.timings()},
        "identical": not differing if comparable else None,
        "first_difference": difference,
        "measured_speedup": measured,
        "predicted_speedup": predicted_speedup(ours, theirs),
        "costs": costs,
        "num_runs": len(runs),
    } | steadiness(speedups, ours.tokens_per_pass, costs["t_verify"])


def _median_run(runs: list[Statistics]) -> Statistics:
    return sorted(runs, key=lambda run: run.ms_per_token or 0.0)[(len(runs) - 1) // 2]


def _first_difference(
    speculative: TextSequence, plain: TextSequence, events: list[Json], dtype: torch.dtype
) -> Json:
    """Where two outputs that differ part, and whether rounding can have done that.

    Totals of sampled text are log p and noise, so the bound of a tie is divided by the temperature.
    With typical_p, top-k, top-p or min-p, rounding may also have moved the border of what is cut
    off: then nobody can tell (verdict: null).
    """
    pairs = enumerate(zip_longest(speculative.output, plain.output))
    position, ours, theirs = next((i, *pair) for i, pair in pairs if pair[0] != pair[1])
    sampling = speculative.request.sampling
    cuts, off = ((*s.transforms[1:], s.typical_p) for s in (sampling, Sampling()))
    may_have_cut = not sampling.is_greedy and cuts != off
    # Where one of them ends, the other one went on: no tie explains that.
    tops = [top for event in events for top in event["target_top"]]
    top = tops[position] if position < len(tops) else []
    totals = {choice["id"]: choice["total"] for choice in top}
    near_tie = _NEAR_TIE.get(dtype, 1e-3) / (1 if sampling.is_greedy else sampling.temperature)
    is_tie = ours in totals and top[0]["total"] - totals[ours] <= near_tie
    return {
        "position": position,
        "speculative_token": ours,
        "plain_token": theirs,
        "target_top": top,
        "top_2_gap": top[0]["total"] - top[1]["total"] if len(top) > 1 else None,
        "verdict": "near-tie" if is_tie else None if may_have_cut else "bug",
    }


def steadiness(
    speedups: list[float], tokens_per_pass: float | None, t_verify: float | None
) -> Json:
    """Whether the measured speed-ups of several runs can be believed, and how far they are apart.

    Two figures tell of a machine that was busy with something else. A pass over several tokens
    takes no less time than one over one, so a speed-up above the tokens per pass was not brought by
    speculation. And t_verify is near 1: rows of a pass are nearly free.

    >>> steadiness([1.4, 1.5, 2.6], tokens_per_pass=2.0, t_verify=1.1)
    {'disturbed': False, 'spread': [1.4, 2.6]}
    >>> steadiness([2.4, 2.5, 2.6], tokens_per_pass=2.0, t_verify=1.1)["disturbed"]
    True
    """
    is_too_fast = bool(speedups and tokens_per_pass and median(speedups) > _NOISE * tokens_per_pass)
    is_odd = t_verify is not None and not _LEAST_T_VERIFY <= t_verify <= _MOST_T_VERIFY
    spread = [round(edge(speedups), 4) for edge in (min, max)] if speedups else None
    return {"disturbed": is_too_fast or is_odd, "spread": spread}


def costs_of(drafted: Statistics, plain: Statistics) -> dict[str, float | None]:
    """What the formulas of speculative decoding are made of, as measured.

    `plain` is the same request's plain decoding. alpha: the chance that a draft token is
    accepted once those before it are; c: one draft token's time, and t_verify: one pass's, in
    passes of plain decoding.
    """
    plain_pass_ms = plain.verify_ms / max(1, plain.target_passes)
    return {
        "alpha": ratio(drafted.num_accepted_draft_tokens, sum(drafted.reached_at)),
        "c": ratio(drafted.draft_ms, drafted.num_draft_tokens * plain_pass_ms),
        "t_verify": ratio(drafted.verify_ms, drafted.target_passes * plain_pass_ms),
    }


def predicted_speedup(drafted: Statistics, plain: Statistics) -> float | None:
    """Expected tokens per cycle / (draft tokens per cycle · c + t_verify), by `costs_of`.

    With one alpha for all positions a draft of n tokens gives 1 + α + … + αⁿ of them. The
    time of the engine itself is left out, and so are differences between positions: measured
    against predicted shows what those cost.
    """
    alpha, c, t_verify = (cost or 0.0 for cost in costs_of(drafted, plain).values())
    tokens = sum(count * alpha**i for i, count in enumerate(drafted.drafted_at, 1))
    spent = drafted.num_draft_tokens * c + drafted.target_passes * t_verify  # in plain passes
    return ratio(drafted.target_passes + tokens, spent)
