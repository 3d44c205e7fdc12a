"""Dataclass fields that carry a setting's description, range, choices and registry."""

from dataclasses import field
from typing import Any

from hybridrl.registry import Registry

MAX_SEED = 4_000_000_000  # NumPy's old generators take 32 bits
MAX_NODES, MAX_SLOTS = 10_000, 1000  # machines of a job, processes of one role on a machine: beyond is a typo


def setting(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple | None = None,
    free: bool = False,
) -> Any:  # the type that the field is declared with
    """Return a dataclass field with its description and its allowed values.

    Mutable defaults are copied for each instance.

    Args:
        default: Default value.
        help: One sentence.
        ge: Smallest allowed number.
        gt: Exclusive lower bound.
        le: Largest allowed number.
        lt: Exclusive upper bound.
        choices: The allowed values.
        free: Marks a mapping whose keys the user chooses, such as keyword arguments of the user's function.
    """
    bounds = {k: v for k, v in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if v is not None}
    metadata = {"help": help, "bounds": bounds, "choices": choices, "free": free}
    if isinstance(default, dict | list | tuple):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def plug(default: Any, help: str, registry: Registry[Any]) -> Any:
    """Return a dataclass field whose value is a name of `registry` or an import path.

    A value is `pkg.mod:Name` or `path/file.py:Name`. A list has several of them.

    Args:
        default: Default value.
        help: One sentence.
        registry: The names and what is behind them.
    """
    metadata = {"help": help, "registry": registry}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, help: str) -> Any:
    """Return a dataclass field with a nested group of settings."""
    return field(default_factory=cls, metadata={"help": help})
