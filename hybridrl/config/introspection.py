"""Read a schema back: every setting with its type, default, range and description.

The dataclasses in `schema/` define the settings. Checks, the reference and saved configs read them through this module.
It does not depend on Hydra or on particular keys.
"""

import functools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from hybridrl.registry import Registry
from hybridrl.system.secrets import without_secrets

LONG_LINES = 10_000  # characters; YAML then folds no value
BOUND_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class SettingSpec:
    """One setting: its dotted name and its allowed values."""

    name: str
    type: Any
    optional: bool
    default: Any
    help: str
    bounds: dict[str, float]
    choices: tuple | None
    free: bool
    registry: Registry[Any] | None = None

    @property
    def type_name(self) -> str:
        """The type in words: `int`, `list[str]`, `float or null`, `float or str or null`."""
        name = "mapping" if self.type is dict else getattr(self.type, "__name__", str(self.type))
        if get_origin(self.type):
            name = str(self.type).replace(" | ", " or ")
        return f"{name} or null" if self.optional else name

    @property
    def range_text(self) -> str:
        """The allowed values: `>= 0, <= 1` or `one of auto, cpu, cuda`; empty without limits."""
        quantity = "any of" if get_origin(self.type) is list else "one of"
        if self.registry is not None:
            return f"{quantity} {', '.join(self.registry.names())}, or an import path"
        if self.choices:
            return f"{quantity} {', '.join(map(str, self.choices))}"
        return ", ".join(f"{BOUND_SIGNS[sign]} {limit:g}" for sign, limit in self.bounds.items())


@dataclass(frozen=True)
class SettingSection:
    """A group of settings: dotted name (empty for the root), description and own settings."""

    name: str
    help: str
    keys: tuple[SettingSpec, ...]


@functools.cache
def sections(schema: type) -> tuple[SettingSection, ...]:
    """Return the sections of `schema`, outermost first, in their order of definition."""
    return tuple(_iter_sections(schema, name="", help_text=""))


@functools.cache
def keys(schema: type) -> dict[str, SettingSpec]:
    """Return every setting of `schema` by its dotted name."""
    return {key.name: key for section in sections(schema) for key in section.keys}


def value_at(config: Any, key: str) -> Any:
    """Return the value of the setting or section with this dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def with_value(config: Any, key: str, value: Any) -> Any:
    """Return a copy of the settings with this value of a key."""
    head, _, rest = key.partition(".")
    return replace(config, **{head: with_value(getattr(config, head), rest, value) if rest else value})


def changed(config: Any, *names: str) -> dict[str, Any]:
    """Return key -> value of the settings with another value than their default.

    Args:
        config: The config.
        names: Settings, and sections with all that is in them.
    """
    below = tuple(f"{name}." for name in names)
    schema: type = type(config)
    chosen = (key for key in keys(schema).values() if key.name in names or key.name.startswith(below))
    return {key.name: value for key in chosen if (value := value_at(config, key.name)) != key.default}


def section_class(field: Field) -> type | None:
    """Return the dataclass of a nested group of settings, or None for a single setting."""
    factory = field.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def to_dict(config: Any) -> dict[str, Any]:
    """Return the settings as nested dictionaries and lists, the inverse of `from_dict`."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def to_yaml(config: Any, *, hide_secrets: bool = False) -> str:
    """Return the settings as YAML; `--config-path/--config-name` loads it as an equal config.

    Args:
        config: The settings.
        hide_secrets: Leave out values that look like secrets (`system/secrets.py`), for a file.
    """
    nested = without_secrets(to_dict(config)) if hide_secrets else to_dict(config)
    return yaml.dump(_escaped(nested), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LONG_LINES)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a nested mapping as (dotted key, value)."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def value_text(value: Any) -> str:
    """Return a value as written on a command line: `null`, `true`, `[a,b]`, `1e-06`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{value_text(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _iter_sections(schema: type, *, name: str, help_text: str) -> Iterator[SettingSection]:
    hints, own = get_type_hints(schema), [field for field in fields(schema) if section_class(field) is None]
    yield SettingSection(name, help_text, tuple(_key(field, hints[field.name], prefix=name) for field in own))
    for field in fields(schema):
        nested = section_class(field)
        if nested is not None:
            yield from _iter_sections(nested, name=dotted(name, field.name), help_text=field.metadata["help"])


def _key(field: Field, hint: Any, *, prefix: str) -> SettingSpec:
    optional, kind = _without_none(hint)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    meta = field.metadata
    return SettingSpec(
        name=dotted(prefix, field.name),
        type=kind,
        optional=optional,
        default=default,
        help=meta.get("help", ""),
        bounds=meta.get("bounds", {}),
        choices=meta.get("choices"),
        free=meta.get("free", kind is dict),
        registry=meta.get("registry"),
    )


def _without_none(hint: Any) -> tuple[bool, Any]:
    """Return (True, X) for `X | None`, and (False, X) for any other type X.

    X may be `float | str`.
    """
    if not isinstance(hint, UnionType) or NoneType not in get_args(hint):
        return False, hint
    return True, functools.reduce(operator.or_, (arg for arg in get_args(hint) if arg is not NoneType))


def dotted(prefix: str, name: str) -> str:
    """Return the dotted name of a field in a section."""
    return f"{prefix}.{name}" if prefix else name


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _escaped(value: Any) -> Any:
    """Return `value` with `${` escaped in strings.

    A resolved config has no interpolations, so `${` is text.
    """
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes text that starts like a number.

    Hydra parses more text as numbers (1e5) than YAML 1.1 does.
    """

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out: `load_plain_yaml` reads no aliases."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if text[:1] in tuple("+-.0123456789") else None
    )


_Dumper.add_representer(str, _represent_text)


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. Raises YAMLError for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(problem="has an alias", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


def load_plain_yaml(text: Any) -> Any:
    """Return the data in a text, bytes or an open file that somebody else may have written.

    Raises:
        yaml.YAMLError: It is no YAML, or has an alias: a few lines of them stand for billions of values.
    """
    return yaml.load(text, Loader=_PlainLoader)  # safe: a SafeLoader
