"""Sizes that `.ci/limits.toml` limits, counted in the source."""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SMALL = 40  # code lines


def code_lines(source: str, *, with_imports: bool = True) -> int:
    """Return the number of lines that are neither blank nor part of a comment or a docstring."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_docstring or (not with_imports and isinstance(node, ast.Import | ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for i, line in lines if i not in skipped and line.strip() and not line.lstrip().startswith("#"))


def small_modules(importers: Mapping[str, Iterable[str]], sources: Mapping[str, Path]) -> list[str]:
    """Return the modules with less than `SMALL` code lines that one other module imports.

    Args:
        importers: Importers of each module.
        sources: Files of the modules. Packages are not counted.
    """
    files = {module: path for module, path in sources.items() if not path.name.startswith("__")}
    alone = [module for module in files if len({*importers.get(module, ())}) == 1]
    return [module for module in alone if code_lines(files[module].read_text(encoding="utf-8")) < SMALL]


def pass_through_functions(tree: ast.Module) -> list[str]:
    """Return the functions that only pass a call on.

    After its docstring, such a function has one statement: a call, perhaps awaited or returned. Its arguments are
    parameters of the function and attributes of `self` or `cls`. Functions with Python's special names are not counted,
    nor are calls of built-in functions and of what another call returned.
    """
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function.name for function in functions if not function.name.startswith("__") and _passes_on(function)]


def _passes_on(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(call, ast.Call) or (isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)):
        return False
    if not isinstance(_root(call.func), ast.Name):
        return False
    parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(_is_given(argument, parameters) for argument in arguments)


def _is_given(argument: ast.expr, parameters: set[str]) -> bool:
    value = argument.value if isinstance(argument, ast.Starred) else argument
    root = _root(value)
    owners = {"self", "cls"} if isinstance(value, ast.Attribute) else parameters
    return isinstance(root, ast.Name) and root.id in owners


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def twins(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the classes of one name that several modules define, with these modules."""
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module)
    return {name: sorted({*homes}) for name, homes in sorted(modules.items()) if len({*homes}) > 1}


def words(files: Iterable[Path]) -> int:
    """Return the number of words, as `wc -w` counts them."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in files)


def limits_of(table: Mapping[str, Any]) -> dict[str, int]:
    """Return the limit of each size: the number in `limits.toml`, and what each capability of `[added]` needs."""
    limits = {name: limit for name, limit in table.items() if name != "added"}
    for needs in table.get("added", {}).values():
        for name, size in needs.items():
            limits[name] += size
    return limits


def compared(sizes: Mapping[str, int], limits: Mapping[str, int]) -> tuple[list[str], bool]:
    """Return a line for each size with its limit, and whether no size is above its limit."""
    lines = []
    for name, size in sizes.items():
        limit = limits[name]
        verdict = "above the limit" if size > limit else "" if size == limit else "lower the limit"
        lines.append(f"{name:<24}{size:>8,} of {limit:>8,}  {verdict}".rstrip())
    return lines, all(size <= limits[name] for name, size in sizes.items())
