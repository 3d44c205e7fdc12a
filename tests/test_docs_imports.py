"""What pages and docstrings name exists: the imports of Python blocks, and files of the repository."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = ("hybridrl", "benchmarks", "examples", "tests", "data_preprocess", "reward_score")
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


NAMED_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|sh|toml|yaml))`")
PLACEHOLDERS = {"benchmarks/NAME.py", "rewards/mine.py"}


def test_every_file_that_a_page_or_a_docstring_names_with_its_folder_exists():
    tree = [path for folder in (*SOURCES, "docs", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    known = {f"/{path.relative_to(ROOT)}" for path in (*tree, *ROOT.glob("*.*"))}
    read = [*PAGES, *(path for path in tree if path.suffix == ".py")]
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in read
        for name in NAMED_FILE.findall(path.read_text(encoding="utf-8"))
        if name not in PLACEHOLDERS and not any(place.endswith(f"/{name}") for place in known)
    ]
    assert not stale, stale
