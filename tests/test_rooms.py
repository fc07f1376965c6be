"""A room imports only the rooms below it: runtime ← drafters ← core ← server ← tools.

Nothing grows beyond what a reader can hold: functions, the core and the page have their limits.
What must be installed is what is imported. The list of faults to try by hand fits the code.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name

from conftest import ROOT, mutants

from runtime import kernels

CORE = "08_speculative_decoding"
# Each room, and the rooms that it may import: only those below it.
ROOMS: dict[str, set[str]] = {
    "runtime": set(),
    "drafters": {"runtime"},
    CORE: {"runtime", "drafters"},  # and the server, within functions
    "server": {"runtime", "drafters"},  # it fetches the core by its name
    "tools": {"runtime", "drafters", "server"},
    "course": {"drafters"},  # task 9 alone, which is one
}
OURS = {*ROOMS, "tests", "conftest"}
FILES = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
TREES: dict[str, ast.Module] = {}  # by the module's full name
for path in FILES:
    parts = path.relative_to(ROOT).with_suffix("").parts
    TREES[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text("utf-8"))


def imported(module: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The full names that these nodes of a module import: of modules, and of what is in them."""
    package = module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = resolve_name("." * node.level + (node.module or ""), package)
            yield from [name, *(f"{name}.{alias.name}" for alias in node.names)]


def test_a_room_imports_only_the_rooms_below_it():
    for module, tree in TREES.items():
        room = module.split(".")[0]
        nodes = tree.body if room == CORE else ast.walk(tree)
        wrong = {n.split(".")[0] for n in imported(module, nodes)} & OURS - ROOMS[room]
        assert wrong <= {room}, f"{module} imports {wrong - {room}}"


def test_other_rooms_use_the_face_of_kernels_alone():
    """Tests of the kernels themselves may look inside."""
    for module, tree in TREES.items():
        if f"{module}.".startswith("runtime.kernels."):
            continue
        nodes = list(ast.walk(tree))
        attributes = (node for node in nodes if isinstance(node, ast.Attribute))
        names = {ast.unparse(node) for node in attributes if isinstance(node.value, ast.Name)}
        names |= {*imported(module, nodes)}
        inside = {name.removeprefix("runtime.") for name in names}
        inside = {name for name in inside if name.startswith("kernels.")}
        assert inside <= {f"kernels.{name}" for name in kernels.__all__}, module
    assert (ROOT / "runtime" / "kernels" / "__init__.py").read_text("utf-8").count("\n") <= 80


def test_no_import_goes_around_in_a_circle():
    needs = {m: {*imported(m, tree.body)} & TREES.keys() - {m} for m, tree in TREES.items()}
    TopologicalSorter(needs).prepare()  # raises CycleError, which shows the circle


def test_no_function_is_longer_than_50_lines():
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                num_lines = node.end_lineno - node.lineno + 1
                assert num_lines <= 50, f"{node.name} in {module}"


def test_the_core_has_at_most_480_lines_and_16_imports_of_ours():
    """What only assembles or serves is imported where it does so."""
    assert (ROOT / f"{CORE}.py").read_text("utf-8").count("\n") <= 480
    nodes = [n for n in TREES[CORE].body if isinstance(n, (ast.Import, ast.ImportFrom))]
    ours = [n for n in nodes if next(imported(CORE, [n])).split(".")[0] in OURS]
    assert sum(len(node.names) for node in ours) <= 16


def test_the_page_has_at_most_3400_lines_none_wider_than_110_columns():
    """Of its own: what was recorded is no text of ours."""
    code = {".html", ".css", ".js"}.__contains__
    files = [path for path in (ROOT / "server" / "page").iterdir() if code(path.suffix)]
    lines = [(path, line) for path in files for line in path.read_text("utf-8").splitlines()]
    assert len(lines) <= 3400
    assert [path.name for path, line in lines if len(line) > 110] == []


def test_requirements_name_what_is_imported_each_with_a_reason():
    """What is for development alone only the pictures for lectures import."""
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    first, *more = (ROOT / "requirements-dev.txt").read_text("utf-8").splitlines()
    both = [re.fullmatch(r"([a-z0-9_-]+)[<>=.,0-9]+ +# .+", line)[1] for line in lines + more]
    required, of_development = {*both[: len(lines)]}, {*both[len(lines) :]}
    used = {m: {n.split(".")[0] for n in imported(m, ast.walk(t))} for m, t in TREES.items()}
    own = {m: names & of_development for m, names in used.items() if names & of_development}
    theirs = set().union(*used.values()) - sys.stdlib_module_names - OURS - of_development
    assert {name.replace("-", "_") for name in required} == theirs
    assert first == "-r requirements.txt" and own == {"tools.figures": {"matplotlib"}}


def test_each_fault_of_mutants_txt_has_its_place_and_its_tests():
    """The list cannot go stale in silence, but for ids in brackets, which are not checked."""
    tests = {path.stem: path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    sources = {module: path.read_text("utf-8") for module, path in zip(TREES, FILES, strict=True)}
    assert len({mutant.name for mutant in mutants()}) == len(mutants())
    for mutant in mutants():
        node: ast.AST = TREES[mutant.module]
        for name in mutant.path.split("."):
            (node,) = (inner for inner in node.body if getattr(inner, "name", None) == name)
        source = ast.get_source_segment(sources[mutant.module], node)
        assert source.count(mutant.old) == 1 and mutant.old != mutant.new, mutant
        for test in mutant.tests:
            file, begin = re.match(r"(\w+)::(\w+)", test).groups()
            found = re.findall(rf"^def test_{begin}\w*\(", tests[f"test_{file}"], re.MULTILINE)
            assert len(found) == 1, f"{test} is not one test, but {found}"
