"""The list of faults on purpose fits the code, and the tests notice each of them (mutants.py)."""

import subprocess
import sys
from functools import cache

import pytest
from conftest import ROOT
from mutants import MUTANTS, broken

NUM_PARTS = 4  # of the list: two workers share them


@cache
def source_of(file):
    return (ROOT / "tests" / f"test_{file}.py").read_text("utf-8")


def test_every_mutant_has_its_place_in_the_source():
    """Where code has moved, the list moves with it."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        function, other = broken(mutant)
        assert function.__code__ != other.__code__, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.split('[')[0]}(" in source_of(file), test


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, NUM_PARTS + 1))
def test_no_mutant_survives(part):
    """The tests named pass, and with each mutant one of them fails."""
    options = [f"--part={part}/{NUM_PARTS}", "--jobs=1"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
