"""What is computed in C has the same bits on every machine, and nothing is read beside it.

Programs in C beside the tests, compiled as other machines would: what do they print?
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc here")
needs_aarch64 = pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="no compiler for aarch64, or nothing to run it in",
)
pytestmark = pytest.mark.parametrize("program", ["choosing.c", "rules.c"])


def printed(folder: Path, program: str, *flags: str, is_aarch64: bool = False) -> str:
    """What tests/PROGRAM prints, compiled with the kernels that its first line names."""
    compiler = ["aarch64-linux-gnu-gcc", "-static"] if is_aarch64 else ["gcc"]
    fixed = "-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-pthread"
    first = (ROOT / "tests" / program).read_text("utf-8").splitlines()[0]
    sources = ROOT / "tests" / program, *(ROOT / "kernels" / name for name in first.split()[1:])
    rest = "-ffunction-sections", "-Wl,--gc-sections", "-lm"  # what is not called need not be there
    command = [*compiler, *fixed, *flags, "-I", ROOT / "kernels", *sources, *rest]
    subprocess.run([*command, "-o", folder / "program"], check=True)
    through = ["qemu-aarch64"] if is_aarch64 else []
    run = subprocess.run([*through, folder / "program"], capture_output=True, text=True, check=True)
    return run.stdout


def builds() -> list[str]:
    """Machines that this one can be, as the compiler names them."""
    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    is_avx2, is_avx512 = {"avx2", "fma"} <= {*flags}, "avx512vl" in flags
    return ["x86-64"] + ["x86-64-v3"] * is_avx2 + ["x86-64-v4"] * is_avx512


@needs_gcc
def test_machines_give_the_same_bits(tmp_path, program):
    found = {name: printed(tmp_path, program, f"-march={name}") for name in builds()}
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
@needs_aarch64
def test_another_kind_of_machine_gives_the_same_bits(tmp_path, program):
    there = printed(tmp_path, program, is_aarch64=True)
    assert there == printed(tmp_path, program, "-march=native")


@pytest.mark.slow
@needs_gcc
def test_nothing_is_read_or_written_where_it_should_not_be(tmp_path, program):
    sanitized = "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    for name in builds():
        assert printed(tmp_path, program, f"-march={name}", *sanitized)
