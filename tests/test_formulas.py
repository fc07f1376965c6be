"""The formulas of speculation against figures that were worked out by hand or published."""

import doctest

import pytest

from control import formulas
from control.formulas import break_even_alpha as break_even
from control.formulas import break_even_of_drafts, expected_speedup, expected_tokens, steadiness

TARGET_MS, DRAFT_MS = 29.92, 22.09  # a step of each
C = DRAFT_MS / TARGET_MS


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(formulas) == (0, 7)


@pytest.mark.parametrize("k", [0, 1, 4, 16])
def test_expected_tokens_are_the_closed_form(k):
    for alpha in (0.0, 0.3, 0.75, 0.999):
        assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert expected_tokens(1.0, k) == k + 1


def test_break_even_alphas_are_those_of_a_draft_step_of_three_quarters():
    found = [round(break_even(k, C), 3) for k in (1, 2, 3, 4, 5, 6, 8, 10)]
    assert found == [0.738, 0.814, 0.856, 0.882, 0.901, 0.914, 0.932, 0.944]


@pytest.mark.parametrize(
    ("k", "verify_ms", "ms_per_token", "speedup"),
    [(1, 28.93, 25.51, 1.17), (2, 29.92, 24.70, 1.21), (4, 30.49, 23.77, 1.26)]
    + [(8, 29.83, 22.95, 1.30)],
)
def test_ideal_speedups_are_those_of_the_measured_verify(k, verify_ms, ms_per_token, speedup):
    found = expected_speedup(1.0, k, C, verify_ms / TARGET_MS)
    assert round(found, 2) == speedup
    assert TARGET_MS / found == pytest.approx(ms_per_token, abs=0.006)


@pytest.mark.parametrize("t_verify", [1.0, 1.3])
def test_at_the_break_even_alpha_speculation_is_as_fast_as_none(t_verify):
    for k in (1, 3, 8):
        alpha = break_even(k, 0.2, t_verify)
        assert expected_speedup(alpha, k, 0.2, t_verify) == pytest.approx(1, abs=1e-4)
        below, above = (expected_speedup(alpha + d, k, 0.2, t_verify) for d in (-0.05, 0.05))
        assert below < 1 < above
        drafts = break_even_of_drafts([40] * k, 40, cost=40 * (k * 0.2 + t_verify))
        assert drafts == pytest.approx(alpha, abs=1e-5)


def test_what_is_free_always_pays_and_what_is_too_dear_never():
    assert break_even(4, 1.0) == 1 and break_even(4, 1.001) is None
    assert break_even(8, 0.0) == 0
    assert break_even(8, 0.0, t_verify=1.25) == pytest.approx(0.2, abs=1e-4)
    assert break_even_of_drafts([], num_cycles=7, cost=7.0) == 0
    assert break_even_of_drafts([2], num_cycles=7, cost=8.0) == 0.5


@pytest.mark.parametrize(
    ("speedups", "tokens_per_pass", "t_verify", "disturbed"),
    [
        ([1.9, 1.8, 2.0], 2.0, 1.0, False),
        ([2.0, 2.04, 9.0], 2.0, 1.0, False),  # within the noise of a clock; one outlier of three
        ([2.3, 2.2, 0.5], 2.0, 1.0, True),  # more than the passes that were saved
        ([1.5, 1.5, 1.5], 2.0, 0.69, True),
        ([1.5, 1.5, 1.5], 2.0, 3.01, True),
        ([1.5, 1.5, 1.5], 2.0, 0.71, False),
        ([1.5, 1.5, 1.5], None, None, False),
        ([], 2.0, None, False),
    ],
)
def test_what_only_a_busy_machine_explains_is_called_disturbed(
    speedups, tokens_per_pass, t_verify, disturbed
):
    spread = [min(speedups), max(speedups)] if speedups else None
    found = steadiness(speedups, tokens_per_pass, t_verify)
    assert found == {"disturbed": disturbed, "spread": spread}
