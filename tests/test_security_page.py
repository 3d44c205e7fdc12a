"""docs/security.md: every test that its table of findings names is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.split("## Findings\n")[1].splitlines() if line.startswith("| ")]


def test_every_finding_has_a_test_that_is_there():
    for finding, *_, test in ROWS[1:]:
        path, _, name = test.strip("`").partition("::")
        module = TESTS / path
        functions = ast.walk(ast.parse(module.read_text(encoding="utf-8"))) if module.is_file() else ()
        assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, f"{finding}: {test}"


def test_every_row_has_one_value_in_each_column():
    assert {len(row) for row in ROWS} == {3} and len(ROWS) > 50
    assert all(re.fullmatch(r"`[\w/]+\.py::test_\w+`", row[2]) for row in ROWS[1:])


def test_every_module_on_the_page_is_there():
    package = TESTS.parent / "hybridrl"
    first = PAGE.split("Not a boundary:")[0]
    named = [name for name in re.findall(r"`([\w/]+\.py)`", first) if not name.startswith("tests/")]
    assert named and [name for name in named if not (package / name).is_file()] == []
