"""Names to formulas: how a registered advantage estimator or policy loss is entered and found.

A registry is a plain dict. It does not import anything: a formula of your own is registered when your module is imported.
"""

from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from typing import TypeVar

from hybridrl.errors import ConfigError

Entry = TypeVar("Entry")


def enter(registry: MutableMapping[str, Entry], name: str, entry: Entry) -> None:
    """Put `entry` under `name`. The same function may be entered again (a notebook cell that is run twice).

    Errors: ConfigError if another function has the name.
    """
    if name in registry and _origin(registry[name]) != _origin(entry):
        raise ConfigError(f"the name {name!r} is taken by {_origin(registry[name])}; register {_origin(entry)} under another name")
    registry[name] = entry


def find(registry: Mapping[str, Entry], name: str, *, key: str) -> Entry:
    """Return the entry called `name`; `key` is the setting that named it.

    Errors: ConfigError listing the known names and the nearest.
    """
    if name in registry:
        return registry[name]
    nearest = get_close_matches(str(name), registry, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigError(f"{key}={name!r} is not known{hint} Known: {', '.join(sorted(registry))}.")


def _origin(entry: object) -> str:
    fn = getattr(entry, "fn", entry)
    return f"{fn.__module__}.{fn.__qualname__}"
