"""Programs in C beside the tests, compiled as other machines would: what do they print?"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc here")
needs_aarch64 = pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")),
    reason="no compiler for aarch64, or nothing to run it in",
)
SANITIZED = "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"


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


def builds() -> Iterator[tuple[str, list[str]]]:
    """Machines that this one can be: names, and the compiler's flags."""
    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    yield "SSE", ["-march=x86-64"]
    if "avx2" in flags and "fma" in flags:
        yield "AVX2", ["-march=x86-64-v3"]
    if "avx512vl" in flags:
        yield "AVX-512", ["-march=x86-64-v4"]


def assert_same_bits(folder: Path, program: str) -> None:
    """On all of them."""
    found = {name: printed(folder, program, *flags) for name, flags in builds()}
    assert len(set(found.values())) == 1, found


def assert_same_bits_on_aarch64(folder: Path, program: str) -> None:
    there = printed(folder, program, is_aarch64=True)
    assert there == printed(folder, program, "-march=native")


def assert_sane(folder: Path, program: str) -> None:
    """Nothing is read or written where it should not be, and nothing is undefined."""
    for _, flags in builds():
        assert printed(folder, program, *flags, *SANITIZED)
