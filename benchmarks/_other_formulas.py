"""Formulas of verl, TRL and OpenRLHF, executed from their unpacked wheels without their dependencies.

    pip download --no-deps verl==0.9.1 trl==1.16.0 openrlhf==0.11.2 && unzip ...

A formula is a function, a method or a statement in a source file. It is compiled alone, with the names it needs.
`other_numbers.py` stores what the formulas return, and `algorithms_time.py --verl` measures them.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

COMMON = {
    "np": np,
    "torch": torch,
    "nn": nn,
    "F": F,
    "Any": Any,
    "Callable": Callable,
    "Literal": Literal,
    "Optional": Optional,
    "Tuple": tuple,
    "Union": Union,
    "Enum": Enum,
    "defaultdict": defaultdict,
    "dataclass": dataclass,
}
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}
Case = dict[str, Any]


def case(theirs: str, kind: str, name: str, settings: dict[str, Any], inputs: dict[str, Any], **results: Any) -> Case:
    found = {key: _rounded(value) for key, value in results.items() if value is not None}
    return {"theirs": theirs, "kind": kind, "name": name, "settings": settings, "inputs": inputs, "results": found}


def _rounded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _rounded(value.detach().double().tolist())
    return [_rounded(part) for part in value] if isinstance(value, list) else float(f"{value:.11g}")


class Settings(dict[str, Any]):
    """Settings that are read as attributes and by `get`, as the configurations of verl are."""

    __getattr__ = dict.__getitem__


def definitions(path: Path, names: Iterable[str], **given: Any) -> SimpleNamespace:
    """Return functions and classes of a file by name; `Class.method` is a method as a function.

    Args:
        path: The source file.
        names: What to take. Decorators of functions are left out.
        given: Names that the definitions refer to.
    """
    namespace, found = COMMON | given, {}
    tree = ast.parse(path.read_text())
    for name in names:
        owner, _, own = name.rpartition(".")
        body = tree.body if not owner else next(iter(_named(tree.body, owner))).body
        node = next(iter(_named(body, own)))
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        found[own] = _run([node], path, namespace)[own]
    return SimpleNamespace(**found)


def module_without_imports(path: Path, **given: Any) -> SimpleNamespace:
    """Return everything that a file defines; its own imports are not executed."""
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return SimpleNamespace(**_run(body, path, COMMON | given))


def statement(path: Path, beginning: str, **given: Any) -> dict[str, Any]:
    """Execute the first statement whose source starts so, and return all names afterwards."""
    source = path.read_text()
    at = source.index(beginning)
    line = source.count("\n", 0, at) + 1
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno == line:
            return _run([node], path, COMMON | given)
    raise LookupError(f"{path} has no statement that starts with {beginning!r}")


def load_verl(folder: Path) -> SimpleNamespace:
    """Return `verl.trainer.ppo.core_algos` of an unpacked wheel. Its `Settings` are what `config` takes."""
    utils = folder / "verl" / "utils"
    masked = definitions(
        utils / "torch_functional.py",
        ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value", "entropy_from_logits"),
    )
    groups = module_without_imports(utils / "groupwise.py", get_device_name=lambda: "cpu", os=__import__("os"))
    return module_without_imports(
        folder / "verl" / "trainer" / "ppo" / "core_algos.py",
        verl_F=masked,
        DictConfig=Settings,
        ActorConfig=Settings,
        AlgoConfig=type("AlgoConfig", (), {}),
        as_torch_index=groups.as_torch_index,
        group_mean_std=groups.group_mean_std,
        deprecated=lambda replacement: lambda function: function,
    )


def _named(body: list[ast.stmt], name: str) -> Iterable[Any]:
    return (node for node in body if getattr(node, "name", None) == name)


def _run(body: list[ast.stmt], path: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    namespace["__name__"] = path.stem
    exec(compile(ast.Module(body, []), str(path), "exec"), namespace)
    return namespace
