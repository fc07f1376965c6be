"""The list of faults on purpose fits the code, and the tests notice each of them (mutants.py)."""

import subprocess
import sys

import pytest
from conftest import ROOT
from mutants import MUTANTS, broken, node


def test_every_mutant_has_its_place_in_the_source():
    """Where code has moved, the list moves with it."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        function, other = broken(mutant)
        assert function.__code__ != other.__code__, mutant.name
        assert mutant.tests and all(map(node, mutant.tests))


@pytest.mark.slow
def test_no_mutant_survives():
    """The tests named pass, and with each mutant one of them fails."""
    command = [sys.executable, "-m", "tests.mutants"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
