"""One setting: a dataclass field that carries its sentence, its range and its choices."""

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word argparse and Hydra users know
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple | None = None,
    free: bool = False,
):
    """Return a dataclass field with its documentation and its allowed values.

    `ge, gt, le, lt` bound a number; `choices` lists the allowed values; `free=True` marks a mapping whose keys are the
    user's own (keyword arguments for somebody else's function). Mutable defaults are copied for each instance.
    """
    bounds = {k: v for k, v in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if v is not None}
    metadata = {"help": help, "bounds": bounds, "choices": choices, "free": free}
    if isinstance(default, dict | list | tuple):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, help: str):  # noqa: A002
    """Return a dataclass field holding a nested group of settings."""
    return field(default_factory=cls, metadata={"help": help})
