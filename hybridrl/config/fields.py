"""Dataclass fields that carry a setting's description, range and choices."""

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,  # noqa: A002 - argparse's name
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple | None = None,
    free: bool = False,
):
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


def section(cls: type, help: str):  # noqa: A002
    """Return a dataclass field with a nested group of settings."""
    return field(default_factory=cls, metadata={"help": help})
