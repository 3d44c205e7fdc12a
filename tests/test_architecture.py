"""The structure that CONTRIBUTING.md describes: no circle of imports, no folder that has become a drawer.

Lazy names of rooms (`room.name` with a `.pyi` stub) count as imports here. import-linter alone does not see them.
"""

import copy
import tomllib
from collections import Counter

import grimp
import importlinter.configuration
import pytest
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract

from tests.support.source import counts
from tests.support.source.imports import OWN, ROOT, Source, script_imports

MAX_MODULES = 12  # in one folder, `__init__` not counted
MORE_MODULES = {
    "hybridrl": 14,  # programs have verl's names, one module each: hybridrl.main_eval, hybridrl.main_generation
}
CONTRACTS = {"layers": LayersContract, "forbidden": ForbiddenContract, "independence": IndependenceContract}
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


@pytest.fixture(scope="module")
def graph(source) -> grimp.ImportGraph:
    """Our modules, the packages that they import, and the lazy names that they use."""
    found = grimp.build_graph(*OWN, exclude_type_checking_imports=False, include_external_packages=True)
    for importer, imported in source.lazy_edges():
        found.add_import(importer=importer, imported=imported)
    return found


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


def test_no_modules_import_one_another_also_not_for_types_or_by_a_lazy_name(graph):
    assert circles(graph) == []


def graph_of(*imports: tuple[str, str]) -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    return graph


def test_a_circle_would_be_found():
    assert circles(graph_of(("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"))) == [["a", "b", "c"]]


def is_kept(contract: dict, graph: grimp.ImportGraph) -> bool:
    """Return whether a contract of pyproject.toml holds, with the edges of this graph."""
    importlinter.configuration.configure()
    options = {name: str(value) if isinstance(value, bool) else value for name, value in contract.items()}
    kind, name = options.pop("type"), options.pop("name")
    rule = CONTRACTS[kind](name=name, session_options=LINTER, contract_options=options)
    return rule.check(graph=graph, verbose=False).kept


@pytest.mark.parametrize("contract", LINTER["contracts"], ids=lambda contract: contract["name"])
def test_a_contract_holds_for_lazy_names_too(contract, graph):
    assert is_kept(contract, graph)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("hybridrl.config.load", "hybridrl.trainer.loop"),  # a room above
        ("hybridrl.trainer.checkpoint.store", "hybridrl.trainer.loop"),  # above, inside a room
        ("hybridrl.config.build", "torch"),
    ],
)
def test_an_upward_edge_would_be_found(graph, importer, imported):
    wrong = copy.deepcopy(graph)
    wrong.add_import(importer=importer, imported=imported)
    assert not all(is_kept(contract, wrong) for contract in LINTER["contracts"])


def test_our_own_modules_are_never_imported_inside_a_function(source):
    assert source.imports_in_functions() == []


@pytest.fixture
def small_tree(tmp_path) -> Source:
    """Two rooms: `low` lists `Thing` and `deep` lazily, `top` uses them in all ways."""
    files = {
        "__init__.py": "",
        "low/__init__.py": "",
        "low/__init__.pyi": "from .things import Thing as Thing\nfrom . import deep as deep",
        "low/things.py": "class Thing: pass",
        "low/deep.py": "def sink(): pass",
        "__init__.pyi": "from .low import Thing as Shown",
        "attribute.py": "from hybridrl import low as floor\n\ndef make(): return floor.Thing()",
        "chain.py": "import hybridrl.low\n\nhybridrl.low.deep.sink()",
        "name.py": "from hybridrl.low import Thing",
        "passed.py": "import hybridrl\n\nhybridrl.Shown()",
        "inside.py": "async def make():\n    from .low.things import Thing\n    import torch",
        "none.py": "import low\n\nlow.Thing()",
    }
    for name, text in files.items():
        path = tmp_path / "hybridrl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Source(tmp_path)


def test_lazy_names_are_followed_to_their_modules(small_tree):
    attributes = {
        ("hybridrl.attribute", "hybridrl.low.things"),
        ("hybridrl.chain", "hybridrl.low.deep"),
        ("hybridrl.passed", "hybridrl.low.things"),
    }
    assert small_tree.room_name_edges() == attributes
    assert small_tree.lazy_edges() == attributes | {("hybridrl.name", "hybridrl.low.things")}


def test_an_import_inside_a_function_would_be_found(small_tree):
    assert small_tree.imports_in_functions() == ["hybridrl.inside:2: from .low.things import Thing"]


def test_the_scripts_of_the_page_do_not_import_one_another(tmp_path):
    (tmp_path / "a.js").write_text('// import x from "./none.js"\nimport {\n  one,\n  two,\n} from "./b.js";\n')
    (tmp_path / "b.js").write_text("import './c.js';\nexport const one = 1;\n")
    assert script_imports(tmp_path) == {("a.js", "b.js"), ("b.js", "c.js")}
    found = circles(graph_of(*script_imports(ROOT / "hybridrl" / "view" / "page")))
    assert found == []


def test_no_two_classes_share_a_name(source):
    own = {module: tree for module, tree in source.trees.items() if module.startswith("hybridrl")}
    assert counts.twins(own) == {}


def test_no_folder_has_more_modules_than_a_reader_can_hold():
    modules = [path for path in (ROOT / "hybridrl").rglob("*.py") if path.name != "__init__.py"]
    counts_of = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    assert {name: n for name, n in counts_of.items() if n > MORE_MODULES.get(name, MAX_MODULES)} == {}
