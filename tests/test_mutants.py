"""The list of faults on purpose fits the code, and the tests notice every one of them."""

import subprocess
import sys

import pytest
from conftest import ROOT
from mutants import MUTANTS, broken


def test_every_mutant_has_its_place_in_the_source():
    """Where code has moved, the list moves with it."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        function, other = broken(mutant)
        assert function.__code__ != other.__code__, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            source = (ROOT / "tests" / f"test_{file}.py").read_text()
            assert f"def {name.split('[')[0]}(" in source, test


@pytest.mark.slow
def test_no_mutant_survives():
    command = [sys.executable, "-m", "tests.mutants"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout
