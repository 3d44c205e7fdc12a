"""Names to formulas: how a registered advantage estimator or policy loss is entered and found.

A registry is a plain dict. It does not import anything: a formula of your own is registered when your module is
imported.
"""

from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import TypeVar

from hybridrl.errors import ConfigError

Entry = TypeVar("Entry")


def enter(registry: MutableMapping[str, Entry], name: str, entry: Entry) -> None:
    """Put `entry` under `name`. The same function may be entered again: a notebook cell that is run twice, or a script
    that is also imported by its path.

    Errors: ConfigError if another function has the name.
    """
    if name in registry and not _origins(registry[name]) & _origins(entry):
        raise ConfigError(
            f"the name {name!r} is taken by {_origin(registry[name])}; register {_origin(entry)} under another name"
        )
    registry[name] = entry


def find(registry: Mapping[str, Entry], name: str, *, key: str, plug_key: str | None = None) -> Entry:
    """Return the entry called `name`; `key` is the setting that named it, `plug_key` the one whose files may register
    more.

    Errors: ConfigError listing the known names and the nearest.
    """
    if name in registry:
        return registry[name]
    nearest = get_close_matches(str(name), registry, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    more = f" One of your own is registered in every process by a file in {plug_key}." if plug_key else ""
    raise ConfigError(f"{key}={name!r} is not known{hint} Known: {', '.join(sorted(registry))}.{more}")


def _origin(entry: object) -> str:
    fn = getattr(entry, "fn", entry)
    return f"{fn.__module__}.{fn.__qualname__}"


def _origins(entry: object) -> set[str]:
    """Where a function comes from, as a module and as a file has it."""
    fn = getattr(entry, "fn", entry)
    code = getattr(fn, "__code__", None)
    return {_origin(entry)} | ({f"{code.co_filename}:{fn.__qualname__}"} if code else set())
