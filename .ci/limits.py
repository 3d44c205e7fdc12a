"""Print the sizes of `.ci/limits.toml` with their limits, all but that of the core. Exits with 1 above a limit.

    python .ci/limits.py [LIMITS]

`core_size.py` measures the core, because that takes a run. `tests/support/source` has what counts.
"""

import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.source import counts  # noqa: E402 - the path must be set before
from tests.support.source.imports import Source  # noqa: E402

LIMITS = Path(__file__).with_name("limits.toml")
GENERATED = ("config.md",)  # of docs/


def sizes() -> dict[str, int]:
    """Return the sizes of this tree by their names in `limits.toml`, without `core_lines`."""
    source = Source(ROOT)
    own = {module: path for module, path in source.modules.items() if module.partition(".")[0] == "hybridrl"}
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "hybridrl").rglob("*.py")]
    readme = ROOT / "README.md"
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED]
    return {
        "code_lines": sum(map(counts.code_lines, texts)),
        "documentation_words": counts.words([readme, ROOT / "CONTRIBUTING.md", *pages]),
        "readme_lines": len(readme.read_text(encoding="utf-8").splitlines()),
        "pass_through_functions": sum(len(counts.pass_through_functions(source.trees[module])) for module in own),
        "small_modules": len(counts.small_modules(importers(source), own)),
        "lazy_edges": len(source.room_name_edges()),
    }


def importers(source: Source) -> dict[str, set[str]]:
    """Return the importers of every module, those that use its lazy name included."""
    graph = grimp.build_graph("hybridrl", exclude_type_checking_imports=False)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        found[module] |= graph.find_modules_that_directly_import(module)
    for importer, imported in source.lazy_edges():
        found[imported].add(importer)
    return found


def main(limits: Path = LIMITS) -> int:
    """Print the sizes with the limits of this file, and return 1 if one is above its limit."""
    lines, fits = counts.compared(sizes(), counts.limits_of(tomllib.loads(limits.read_text(encoding="utf-8"))))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
