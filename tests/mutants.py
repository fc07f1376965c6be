"""Faults on purpose: each mutant breaks one piece of the source, and its tests must notice.

    python -m tests.mutants
    python -m tests.mutants --only "truncation keeps one token too many"

The list is mutants.txt. Each mutant runs in a fork of its own: it puts the broken code into the
function that everybody holds already, and runs its few tests, of which one has to fail. The models
are loaded once, before the forks. First the same tests run with nothing broken, and must pass. A
mutant that survives is a hole in the tests. A piece that does not occur exactly once in its
function is an error, so the list cannot go stale in silence. Prints a table; exits with 1 if any
mutant survives.

Not covered: constants of modules and the bodies of classes; what runs only while models are loaded.
"""

import argparse
import gc
import importlib
import inspect
import mmap
import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from runtime.kernels.library import why_not
from server.options import Options

LIMIT_S = 120  # a mutant may hang: then it was noticed
ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """`place` is "module:function" or "module:Class.method".

    "cache::a_row_that" is the test in test_cache.py whose name alone begins with test_a_row_that.
    """

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants() -> list[Mutant]:
    """The list: a fault and its tests in one line; its place, the old and the new code below."""
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    if why_not() is not None:
        text = text.partition("# Only with a C compiler")[0]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    mutants = []
    for fault, change in zip(lines[::2], lines[1::2], strict=True):
        name, *tests = fault.split(" | ")
        place, code = change.strip().replace("\\n", "\n").split(" | ", 1)
        old, new = code.split(" →", 1)
        mutants.append(Mutant(name, place, old, new[1:], tuple(tests)))
    return mutants


MUTANTS = read_mutants()


def function_at(module: ModuleType, path: str) -> FunctionType:
    """The plain function there, whatever has been wrapped around it."""
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, name)
    inner = (getattr(found, name, None) for name in ("fget", "func", "__func__"))
    return inspect.unwrap(next(filter(None, inner), found))


def broken(mutant: Mutant) -> tuple[FunctionType, FunctionType]:
    """The function, and what it becomes."""
    name, path = mutant.place.split(":")
    module = importlib.import_module("08_speculative_decoding" if name == "core" else name)
    function = function_at(module, path)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not in {mutant.place} exactly once"
    scope = ModuleType(module.__name__)
    vars(scope).update(vars(module))
    exec(source.replace(mutant.old, mutant.new), vars(scope))  # noqa: S102
    other = function_at(scope, function.__name__)
    assert function.__code__.co_freevars == other.__code__.co_freevars, "super() needs its class"
    return function, other


def node(test: str) -> str:
    """What pytest calls a test of a mutant."""
    file, begin, parameters = re.fullmatch(r"(\w+)::(\w+)(.*)", test).groups()
    source = (ROOT / "tests" / f"test_{file}.py").read_text("utf-8")
    names = re.findall(rf"^def (test_{begin}\w*)\(", source, re.MULTILINE)
    assert len(names) == 1, f"{test} is not one test, but {names}"
    return f"tests/test_{file}.py::{names[0]}{parameters}"


def run_tests(tests: tuple[str, ...], mutant: Mutant | None, output: int) -> None:
    """In a process of its own: exits as pytest does, and speaks to the file `output`."""
    signal.alarm(LIMIT_S if mutant else 10 * LIMIT_S)  # which ends it, wherever it hangs
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 3
    try:
        options = ["-q", "--tb=short", "-o", "addopts=-m 'not slow'", "-p", "no:cacheprovider"]
        # In a folder that is shared one pytest would remove what another one is removing.
        options.append(f"--basetemp={tempfile.gettempdir()}/{os.getpid()}")
        if mutant:  # the code itself: whoever has imported or bound the function has it broken
            function, other = broken(mutant)
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(function, part, getattr(other, part))
            options.append("-x")
        code = int(pytest.main([*options, *map(node, tests)]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:  # whatever it was, and with threads that hang
        os._exit(code)


def ended(
    jobs: int, wanted: list[tuple[tuple[str, ...], Mutant | None]]
) -> Iterator[tuple[str, Mutant | None, str]]:
    """Run these tests, each with its mutant, `jobs` at a time; yields their fate as they end.

    Beside it there is the mutant, and what pytest printed. Who crashes has failed.
    """
    waiting, running = wanted[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            (tests, mutant), output = waiting.pop(), tempfile.TemporaryFile()
            pid = os.fork()
            if not pid:
                run_tests(tests, mutant, output.fileno())
            running[pid] = mutant, output
        pid, status = os.wait()
        (mutant, output), code = running.pop(pid), os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
        assert code < 2, f"{mutant}: pytest could not run:\n{said}"
        yield {0: "SURVIVES", -signal.SIGALRM: "hung"}.get(code, "killed"), mutant, said


def load_once() -> None:
    """Import all, and load the engine of the fixture `demo_engine`, which every fork inherits.

    A test that loads an engine gets another one, as in the ordinary run: it may spoil it.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to start than a test
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    conftest = importlib.import_module("conftest")
    core = conftest.core
    for file in {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}:
        importlib.import_module(f"test_{file}")
    # What a fork writes to the KV cache is its own: mmap's default would share it with all.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    importlib.import_module("runtime.cache.slots").mmap = partial(mmap.mmap, flags=flags)
    load = core.load_engine
    engine = load(Options(model="embedded", fixed_k=True, kernels=False, suffix_cache=0))

    def load_or_inherit(options: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code is conftest.load.__code__:  # which loads for a test
            frame = frame.f_back
        caller = frame.f_globals["__name__"]
        if caller == "conftest" and options.model == "embedded":
            return engine
        in_c = caller[5:] in ("cache", "kernels", "lossless", "sampling", "tree")
        # The mutants are in Python, but for those of the kernels.
        return load(options if in_c else replace(options, kernels=False))

    core.load_engine = load_or_inherit
    gc.collect()
    gc.freeze()


def judge(chosen: list[Mutant], jobs: int) -> int:
    """Run each mutant's tests without it and with it. Returns 1 if one survives."""
    load_once()
    every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    shares = [every[i::jobs] for i in range(min(jobs, len(every)))]
    for fate, _, said in ended(jobs, [(tests, None) for tests in shares]):
        if fate != "SURVIVES":
            print("these tests do not pass without any mutant:", said, sep="\n")
            return 1
    survivors = 0
    for fate, mutant, _ in ended(jobs, [(each.tests, each) for each in chosen]):
        survivors += fate == "SURVIVES"
        print(f"{fate:8}  {mutant.name}", flush=True)
    print(f"{survivors} of {len(chosen)} survive")
    return int(survivors > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="this mutant alone, or those that begin so")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if mutant.name.startswith(options.only or "")]
    if not chosen:
        parser.error(f"no mutant's name begins with {options.only!r}")
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        return judge(chosen, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
