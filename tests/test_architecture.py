"""The structure that CONTRIBUTING.md describes: no circle of imports, no folder that has become a drawer."""

from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULES = 12  # in one folder, `__init__` not counted
MORE_MODULES = {
    "hybridrl/data_plane": 15,  # the one container and what it is made of
    "hybridrl": 14,  # programs have verl's names, one module each: hybridrl.main_eval, hybridrl.main_generation
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("hybridrl", exclude_type_checking_imports=False)


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return the groups of modules that import one another, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_one_another_also_not_for_types(graph):
    assert circles(graph) == []


def test_a_circle_would_be_found():
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"]]


def test_no_folder_has_more_modules_than_a_reader_can_hold():
    modules = [path for path in (ROOT / "hybridrl").rglob("*.py") if path.name != "__init__.py"]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    assert {name: n for name, n in counts.items() if n > MORE_MODULES.get(name, MAX_MODULES)} == {}
