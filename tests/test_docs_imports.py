"""The pages' Python blocks import what they use, so that a reader can copy them."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = {
    "register",
    "register_agent_loop",
    "register_adv_est",
    "register_policy_loss",
    "stage",
    "openai",
    "torch",
    "ray",
}


def used_and_made(source: str) -> tuple[set[str], set[str]]:
    """Return the names that are read, and those that are imported, assigned, defined or parameters."""
    used, made = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return used, made


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_the_blocks_of_a_page_import_the_classes_and_decorators_that_they_use(page):
    known = set(dir(builtins))
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        used, made = used_and_made(block)
        known |= made  # a later block of the page may use them
        missing = {name for name in used - known if name[0].isupper() or name in OURS}
        assert not missing, f"{page.name} uses {sorted(missing)} without an import, in:\n{block}"
