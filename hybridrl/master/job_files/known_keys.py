"""Checks of the keys and values in a file: near names for unknown keys, the expected type for a wrong value."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from hybridrl.errors import ConfigError

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
}


def check_keys(data: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for a key that is not known. where: the mapping's own keys, for the message."""
    known = list(known)
    for key in data:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{_joined(where, key)}: there is no such key; {hint}")


def check_type(value: Any, expected: tuple[type, ...], where: str, key: str) -> None:
    """Raise ConfigError unless the value has one of these types; true is no whole number here."""
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        words = " or ".join(WORDS[one] for one in expected)
        raise ConfigError(f"{_joined(where, key)}={value!r}: must be {words}")


def _joined(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
