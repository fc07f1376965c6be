"""What is computed in C has the same bits on every machine, and nothing is read beside it."""

import pytest
from machines import (
    assert_same_bits,
    assert_same_bits_on_aarch64,
    assert_sane,
    needs_aarch64,
    needs_gcc,
)  # fmt: skip

pytestmark = pytest.mark.parametrize("program", ["choosing.c", "rules.c"])


@needs_gcc
def test_machines_give_the_same_bits(tmp_path, program):
    assert_same_bits(tmp_path, program)


@pytest.mark.slow
@needs_aarch64
def test_another_kind_of_machine_gives_the_same_bits(tmp_path, program):
    assert_same_bits_on_aarch64(tmp_path, program)


@pytest.mark.slow
@needs_gcc
def test_nothing_is_read_or_written_where_it_should_not_be(tmp_path, program):
    assert_sane(tmp_path, program)
