"""The list of faults on purpose fits the code, and the tests notice each of them (mutants.py)."""

import subprocess
import sys

import pytest
from conftest import ROOT
from mutants import MUTANTS, broken, node

NUM_PARTS = 4  # of the list: two workers share them


def test_every_mutant_has_its_place_in_the_source():
    """Where code has moved, the list moves with it."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        function, other = broken(mutant)
        assert function.__code__ != other.__code__, mutant.name
        assert mutant.tests and all(map(node, mutant.tests))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, NUM_PARTS + 1))
def test_no_mutant_survives(part):
    """The tests named pass, and with each mutant one of them fails."""
    options = [f"--part={part}/{NUM_PARTS}", "--jobs=1"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
