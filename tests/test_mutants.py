"""The list of faults on purpose fits the code; `python -m tests.mutants` runs it."""

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
