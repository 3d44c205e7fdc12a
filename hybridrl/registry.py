"""Registries: names of settings to the classes and functions behind them, the user's own included.

A setting such as `actor_rollout_ref.rollout.name` takes a registered name, or an import path: `package.module:Name` or
`path/to/file.py:Name`. Built-in entries are declared by their address, and imported when they are read: a run loads
what its settings name. Names, length and `in` import nothing; `items()` and `values()` import every entry.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar

from hybridrl.errors import ConfigError
from hybridrl.import_path import load_object

Entry = TypeVar("Entry")


class Registry(MutableMapping[str, Entry]):
    """Entries of one kind by name, in the order in which they are declared and registered.

    Args:
        setting: The setting whose value is a name of this registry; errors quote it.
        kind: What an entry is, in two or three words, such as "training engine".
        builtins: Addresses `package.module:Name` of built-in entries, loaded when they are read.
        plugins: The setting whose files may register more, if there is one.
        import_paths: Whether an import path is also a value of the setting.
    """

    def __init__(
        self,
        setting: str,
        *,
        kind: str,
        builtins: Mapping[str, str] | None = None,
        plugins: str | None = None,
        import_paths: bool = True,
    ) -> None:
        self.setting, self.kind, self.plugins, self.import_paths = setting, kind, plugins, import_paths
        self.builtins = dict(builtins or {})
        self._loaded: dict[str, Entry] = {}
        self._entered: dict[str, Entry] = {}  # built-in ones, by the decorators of their modules, which run once

    def __getitem__(self, name: str) -> Entry:
        return self._entry(name, self.setting)

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._loaded[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self.builtins

    def __iter__(self) -> Iterator[str]:
        return iter({**self.builtins, **self._loaded})

    def __len__(self) -> int:
        return len({**self.builtins, **self._loaded})

    def clear(self) -> None:
        """Forget what was registered or loaded. The built-in entries stay known, and load again when they are read."""
        self._loaded.clear()

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted(self)

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that enters a class or function under `name`.

        Raises:
            ConfigError: Another entry has the name. The same one may be entered again, as a notebook does.
        """

        def enter(entry: Entry) -> Entry:
            self.enter(name, entry)
            return entry

        return enter

    def enter(self, name: str, entry: Entry) -> None:
        """Put `entry` under `name`; see `register`. The name of an Enum's member is its value.

        Raises:
            ConfigError: The name is no text, or taken.
        """
        name = _text(name)
        if not isinstance(name, str):
            raise ConfigError(f"the name {name!r} of {_origin(entry)} is a {type(name).__name__}; register it as a str")
        if name in self and not self._origins_of(name) & _origins(entry):
            taken = _origin(self._loaded[name]) if name in self._loaded else self.builtins[name]
            raise ConfigError(f"the name {name!r} is taken by {taken}; register {_origin(entry)} under another name")
        if name in self.builtins:
            self._entered[name] = entry
        self[name] = entry

    def lookup(self, name: str, *, setting: str | None = None) -> Entry:
        """Return the entry called `name`, or the object at the import path `name`.

        Args:
            name: A registered name, or an import path with a colon.
            setting: The setting to quote in an error, if it is not the registry's own.

        Raises:
            ConfigError: The name is unknown, or the path cannot be imported. The message lists the known names.
        """
        name = _text(name)
        if name in self:
            return self._entry(name, setting or self.setting)
        if self._is_address(name):
            return self._load(name, setting or self.setting)
        raise ConfigError(f"{setting or self.setting}={self.problem(name)}")

    def problem(self, name: object) -> str:
        """Return what is wrong with `name` as a value of the setting, or "".

        Imports nothing.
        """
        if name in self or self._is_address(name):
            return ""
        near = get_close_matches(str(name), self.names(), n=1, cutoff=0.0)
        nearest = f"; did you mean {near[0]!r}?" if near else "."
        files = f", or a name that a file in {self.plugins} registers (every process runs it)" if self.plugins else ""
        path = ", or an import path such as my_package.module:Name" if self.import_paths else ""
        known = f"Known: {', '.join(self.names())}."
        return f"{name!r} is not a known {self.kind}{nearest} {known} Give one of these{files}{path}"

    def address(self, name: str) -> str:
        """Return where a built-in entry comes from, or `name` itself. Two names of one entry have one address."""
        return self.builtins.get(name, name)

    def _entry(self, name: str, setting: str) -> Entry:
        if name not in self._loaded and name in self.builtins:
            loaded = self._load(self.builtins[name], setting)
            self._loaded[name] = self._entered.get(name, loaded)
        return self._loaded[name]

    def _origins_of(self, name: str) -> set[str]:
        """Return where the entry of this name comes from; the entry of an address is not imported."""
        return _origins(self._loaded[name]) if name in self._loaded else {self.builtins[name].replace(":", ".")}

    def _is_address(self, name: object) -> bool:
        return self.import_paths and isinstance(name, str) and is_import_path(name)

    def _load(self, address: str, setting: str) -> Any:
        path, _, name = address.rpartition(":")
        try:
            return load_object(path, name)
        except ConfigError as error:
            raise ConfigError(f"{setting}={address}: {error}") from error


def is_import_path(name: str) -> bool:
    """Return whether `name` is written as `package.module:Name` or `path/to/file.py:Name`."""
    path, colon, attribute = name.rpartition(":")
    return bool(colon and path and attribute.isidentifier())


def _text(name: Any) -> Any:
    """Return the value of an Enum's member; any other name unchanged."""
    return name.value if isinstance(name, Enum) else name


def _origin(entry: Any) -> str:
    function = getattr(entry, "fn", entry)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _origins(entry: Any) -> set[str]:
    """Return where an entry comes from: its module, and its file if it is a function."""
    function: Any = getattr(entry, "fn", entry)
    code = getattr(function, "__code__", None)
    return {_origin(entry)} | ({f"{code.co_filename}:{function.__qualname__}"} if code else set())
