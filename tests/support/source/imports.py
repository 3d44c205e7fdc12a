"""Imports that import-linter does not see, read from the source: lazy names of rooms, imports in functions, scripts.

A room lists public names in `__init__.pyi`. `room.name`, or `from room import name`, loads the module behind the name.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
OWN = ("hybridrl", "reward_score", "data_preprocess")
TEMPLATE = "hybridrl/cli/project/template"  # programs that `hybridrl init` copies
SCRIPT_IMPORT = re.compile(r"""^\s*(?:import|export)\b[^'"]*?["']\./([^"']+)["']""", re.MULTILINE)


class Source:
    """The modules of the packages below a directory, and the lazy names of their rooms."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        files = (path for package in OWN for path in (root / package).rglob("*.py"))
        self.modules = {self.name_of(path): path for path in files if TEMPLATE not in path.as_posix()}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.modules.items()}
        stubs = (path for package in OWN for path in (root / package).rglob("__init__.pyi"))
        self._lazy_names = {self.name_of(path): self._names_in(path) for path in stubs}

    def name_of(self, path: Path) -> str:
        parts = path.relative_to(self._root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def lazy_edges(self) -> set[tuple[str, str]]:
        """Return (importer, imported) of every use of a lazy name of a room."""
        return {(module, found) for module in self.modules for found in self._lazily_loaded(module)}

    def room_name_edges(self) -> set[tuple[str, str]]:
        """Return those of the edges that are written as `room.name`: a reader follows them through two files more."""
        return {(module, found) for module in self.modules for found in self._attributes(module)}

    def imports_in_functions(self) -> list[str]:
        """Return every import of our own modules in a function, as `module:line: statement`."""
        return sorted(
            {
                f"{module}:{node.lineno}: {ast.unparse(node)}"
                for module, tree in self.trees.items()
                for function in ast.walk(tree)
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                for node in ast.walk(function)
                if _is_own(node)
            }
        )

    def _names_in(self, stub: Path) -> dict[str, tuple[str, str]]:
        """Return lazy name -> (module or room, name there)."""
        package, names = self.name_of(stub), {}
        for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, package)
                names |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
        return names

    def _resolved(self, room: str, name: str) -> str | None:
        """Return the module that `room.name` loads; None if it is no lazy name."""
        if name not in self._lazy_names.get(room, ()):
            return None
        origin, original = self._lazy_names[room][name]
        if f"{origin}.{original}" in self.modules:
            return f"{origin}.{original}"
        return self._resolved(origin, original) or origin

    def _lazily_loaded(self, module: str) -> Iterator[str]:
        yield from self._attributes(module)
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, self._package_of(module))
                yield from filter(None, (self._resolved(origin, alias.name) for alias in node.names))

    def _attributes(self, module: str) -> Iterator[str]:
        """Yield the modules that the attributes `room.name` of a module load."""
        rooms = dict(self._bound_modules(module))
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Attribute):
                head, _, below = ast.unparse(node.value).partition(".")
                room = ".".join(filter(None, (rooms.get(head, ""), below)))
                if (found := self._resolved(room, node.attr)) is not None:
                    yield found

    def _bound_modules(self, module: str) -> Iterator[tuple[str, str]]:
        """Yield variable -> module of every import of a module."""
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (first, first)
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(node, self._package_of(module))
                for alias in node.names:
                    if f"{origin}.{alias.name}" in self.modules:
                        yield alias.asname or alias.name, f"{origin}.{alias.name}"

    def _package_of(self, module: str) -> str:
        return module if self.modules[module].name == "__init__.py" else module.rpartition(".")[0]


def script_imports(folder: Path) -> set[tuple[str, str]]:
    """Return (importer, imported) of the scripts in a folder: `import ... from "./x.js"`."""
    return {
        (path.name, imported)
        for path in sorted(folder.glob("*.js"))
        for imported in SCRIPT_IMPORT.findall(path.read_text(encoding="utf-8"))
    }


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the module of `from module import ...`, without leading dots."""
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in OWN for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or (node.module or "").partition(".")[0] in OWN)
