"""Registries of formulas: register and look up advantage estimators and policy losses by name.

A registry is a plain dict. It imports nothing: a user's formula is registered when its module is imported.
"""

from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import TypeVar

from hybridrl.errors import ConfigError

Entry = TypeVar("Entry")


def register(registry: MutableMapping[str, Entry], name: str, entry: Entry) -> None:
    """Store `entry` under `name`.

    The same function may be registered again: a notebook cell that runs twice, or a script also imported by its path.

    Raises:
        ConfigError: Another function has the name.
    """
    if name in registry and not _origins(registry[name]) & _origins(entry):
        raise ConfigError(
            f"the name {name!r} is taken by {_origin(registry[name])}; register {_origin(entry)} under another name"
        )
    registry[name] = entry


def lookup(registry: Mapping[str, Entry], name: str, *, key: str, plugin_key: str | None = None) -> Entry:
    """Return the entry called `name`.

    Args:
        key: The setting that has the name.
        plugin_key: The setting whose files may register more.

    Raises:
        ConfigError: The name is unknown; the message lists the known names and the nearest.
    """
    if name in registry:
        return registry[name]
    nearest = get_close_matches(str(name), registry, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    more = f" To add one, register it in a file of {plugin_key}, which every process runs." if plugin_key else ""
    raise ConfigError(f"{key}={name!r} is not known{hint} Known: {', '.join(sorted(registry))}.{more}")


def _origin(entry: object) -> str:
    fn = getattr(entry, "fn", entry)
    return f"{fn.__module__}.{fn.__qualname__}"


def _origins(entry: object) -> set[str]:
    """Return a function's origins: its module path and its file path."""
    fn = getattr(entry, "fn", entry)
    code = getattr(fn, "__code__", None)
    return {_origin(entry)} | ({f"{code.co_filename}:{fn.__qualname__}"} if code else set())
