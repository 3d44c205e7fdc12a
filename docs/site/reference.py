"""Pages of the Python reference: the public names of each room, for mkdocstrings."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {  # name of the page -> module
    "hybridrl": "hybridrl",
    "advantages": "hybridrl.algos.advantages",
    "policy_losses": "hybridrl.algos.policy_losses",
    "algos": "hybridrl.algos",
    "data_plane": "hybridrl.data_plane",
    "framework": "hybridrl.framework",
    "sdk": "hybridrl.sdk",
    "single_controller": "hybridrl.single_controller",
    "rewards": "hybridrl.rewards",
    "agent_loop": "hybridrl.serving.agent_loop",
    "rollout": "hybridrl.workers.rollout",
    "weight_transfer": "hybridrl.workers.weight_transfer",
    "engine": "hybridrl.workers.engine",
    "testing": "hybridrl.testing",
    "errors": "hybridrl.errors",
}


def source_file(module: str) -> Path:
    """Return the file that says what a module has: its stub, if it has one."""
    path = ROOT.joinpath(*module.split("."))
    if not path.is_dir():
        return path.with_suffix(".py")
    stub = path / "__init__.pyi"
    return stub if stub.exists() else path / "__init__.py"


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, module and name there of what a module imports from this package by `from ... import ...`."""
    body = tree_of(source_file(module)).body
    for node in [*body, *(inner for block in body if isinstance(block, ast.If) for inner in block.body)]:
        if isinstance(node, ast.ImportFrom) and node.module:  # without one it imports modules
            source = f"{module}.{node.module}" if node.level else node.module
            if source.startswith("hybridrl"):
                yield from ((alias.asname or alias.name, source, alias.name) for alias in node.names)


def definition(module: str, name: str) -> str | None:
    """Return the full name of a class or function where it is defined; None for modules and values."""
    if not source_file(module).is_file():
        return None
    body = tree_of(source_file(module)).body
    if any(isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name for node in body):
        return f"{module}.{name}"
    found = (definition(source, original) for given, source, original in imports(module) if given == name)
    return next(found, None)


def public_names(module: str) -> list[str]:
    """Return the full names of the classes and functions of a package, or of a module that defines them itself."""
    if source_file(module).name.startswith("__init__"):
        found = {definition(module, name) for name, _, _ in imports(module)} | set(registered(module))
    else:
        body = tree_of(source_file(module)).body
        found = {f"{module}.{node.name}" for node in body if isinstance(node, ast.ClassDef)}
    public = [name for name in found if name is not None and not name.rpartition(".")[2].startswith("_")]
    return sorted(public, key=lambda name: name.rpartition(".")[2].lower())


def registered(module: str) -> Iterator[str]:
    """Yield the full names of the functions in a package's files that `@register...("name")` makes available."""
    for file in sorted(ROOT.joinpath(*module.split(".")).glob("*.py")):
        for node in tree_of(file).body:
            calls = [one.func for one in getattr(node, "decorator_list", ()) if isinstance(one, ast.Call)]
            if any(isinstance(call, ast.Name) and call.id.startswith("register_") for call in calls):
                yield f"{module}.{file.stem}.{node.name}"


@functools.cache
def homes() -> dict[str, str]:
    """Return full name -> the page that describes it: the room's own before that of the whole package."""
    pages = sorted(PAGES, key=lambda page: PAGES[page].count("."), reverse=True)
    return {name: page for page in reversed(pages) for name in public_names(PAGES[page])}


def page_text(module: str) -> str:
    """Return the page of a module: its docstring, and one directive of mkdocstrings for each public name."""
    path = ROOT.joinpath(*module.split("."))
    about = ast.get_docstring(tree_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))) or ""
    about = about.partition("\n\nPublic names, listed in")[0]  # how they are imported is of no use to a reader
    return f"# {module}\n\n{about}\n\n" + "\n\n".join(described(name, module) for name in public_names(module)) + "\n"


def described(name: str, module: str) -> str:
    """Return the directive for a name, or a link to the page that has it."""
    home = homes()[name]
    return f"::: {name}" if PAGES[home] == module else f"- [{name.rpartition('.')[2]}]({home}.md#{name})"
