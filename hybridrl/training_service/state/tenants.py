"""Tenants of the service: keys from a file, with limits.

    {"tml-SECRET": {"name": "alice", "max_models": 4, "max_tokens_in_flight": 200000, "max_storage_mb": 1000}}

Without a file there is one tenant, whom every key, or none, stands for; the service then only listens at a loopback
address. A tenant's sessions, models, weights and errors are not visible to others.
"""

import hmac
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError

PREFIX = "tml-"  # the SDK refuses other keys
MIN_KEY_LENGTH = 16


@dataclass(frozen=True)
class Tenant:
    """The owner of a key, with limits.

    Attributes:
        name: In the logs and listings.
        max_models: Models in memory at a time; others wait on the disk. 0: none can be trained.
        max_tokens_in_flight: Tokens of operations that wait or run.
        max_storage_mb: Size of named weights.
    """

    name: str
    max_models: int = 8
    max_tokens_in_flight: int = 4_000_000
    max_storage_mb: int = 10_000


EVERYBODY = Tenant("local")


class Tenants:
    """The tenants by their keys; without keys, everybody is one tenant."""

    def __init__(self, by_key: Mapping[str, Tenant] | None = None):
        self._by_key = dict(by_key or {})

    @property
    def has_keys(self) -> bool:
        return bool(self._by_key)

    def all(self) -> list[Tenant]:
        """Return all tenants."""
        return list(self._by_key.values()) or [EVERYBODY]

    def of_key(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None. Compares with every key, so that its time says nothing."""
        if not self._by_key:
            return EVERYBODY
        found = None
        for known, tenant in self._by_key.items():
            if hmac.compare_digest(known.encode(), key.encode("utf-8", "replace")):
                found = tenant
        return found


def read_tenants(path: str | None) -> Tenants:
    """Return the tenants of a file of keys.

    Raises:
        ConfigError: The file cannot be read, others can read it, or an entry is wrong.
    """
    if path is None:
        return Tenants()
    try:
        mode = Path(path).stat().st_mode
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--keys={path}: cannot be read as JSON ({error})") from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"--keys={path}: other users of this machine can read it; run: chmod 600 {path}")
    if not isinstance(stored, dict) or not stored:
        raise ConfigError(f'--keys={path}: must have an object like {{"tml-SECRET": {{"name": "alice"}}}}')
    tenants = {key: _tenant(key, entry, path) for key, entry in stored.items()}
    if len({tenant.name for tenant in tenants.values()}) < len(tenants):
        raise ConfigError(f"--keys={path}: two keys have the same name; each tenant has one key")
    return Tenants(tenants)


def _tenant(key: str, entry: Any, path: str) -> Tenant:
    shown = f"{key[:8]}..."
    if not key.startswith(PREFIX) or len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"--keys={path}: key {shown} must begin with {PREFIX} and have {MIN_KEY_LENGTH} characters")
    known = {field.name for field in fields(Tenant)}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry.keys() <= known:
        raise ConfigError(f"--keys={path}: the entry of {shown} has a name and may have {', '.join(sorted(known))}")
    limits = {name: value for name, value in entry.items() if name != "name"}
    if wrong := [name for name, value in limits.items() if type(value) is not int or value < 0]:
        raise ConfigError(f"--keys={path}: {wrong[0]}={limits[wrong[0]]!r} of {shown}: must be a whole number")
    return Tenant(entry["name"], **limits)
