"""Fill a schema from nested dictionaries, and report all errors at once.

Each setting is checked by itself: does the key exist, has its value the right type, is it in range. Rules over several
settings are in `checks/rules.py`. Hydra, which reads a word of a command line, is imported only where one is read.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any, TypeVar, get_args, get_origin

from hybridrl import config as settings
from hybridrl.config import introspection
from hybridrl.config.plugs import load_plugins
from hybridrl.errors import ConfigError

Schema = TypeVar("Schema")
Problems = Iterator[str]
"""Lines about settings that cannot work: key, value, reason and fix."""
BOUND_CHECKS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping, such as {name:value}",
    float | str: "a number or text",
}


class InvalidValue(ValueError):
    """A value is not allowed for its key; the message says what is."""


def from_dict(schema: type[Schema], nested: Mapping[str, Any]) -> Schema:
    """Return `schema` filled from `nested`.

    Raises:
        ConfigError: One line for each error.
    """
    config, problems = build(schema, nested)
    raise_problems(problems)
    return config


def from_section(schema: type[Schema], nested: Mapping[str, Any], *, key: str) -> Schema:
    """Return `schema` filled from the mapping that the setting `key` holds.

    Raises:
        ConfigError: One line for each error, with the whole key.
    """
    found, problems = build(schema, nested)
    raise_problems(f"{key}.{problem}" for problem in problems)
    return found


def build(schema: type[Schema], nested: Mapping[str, Any]) -> tuple[Schema, list[str]]:
    """Return `schema` filled from `nested`, and a line for each error.

    Errors are unknown keys, wrong types and values out of range. A missing key, or one with an error, has its default.
    """
    problems: list[str] = []
    config = _section(schema, nested, prefix="", root=schema, problems=problems)
    return config, problems + list(plug_problems(config))


def plug_problems(config: Any) -> Problems:
    """Yield names of plugs that no registry knows.

    Plugin modules of the config are loaded first if a name is unknown, because they may register it.
    """
    if not list(_unknown_plugs(config)):
        return
    try:
        load_plugins(config)
    except ConfigError as error:
        yield str(error)
    yield from _unknown_plugs(config)


def idle_problems(config: Any, *names: str, why: str) -> Problems:
    """Yield the settings of `changed` as ones that have no effect, for a reason such as "without trainer.lag"."""
    for key, value in introspection.changed(config, *names).items():
        yield f"{key}={introspection.value_text(value)}: has no effect {why}"


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one ConfigError with a line for each problem; return if there is none."""
    problems = list(dict.fromkeys(problems))  # a file and the command line may have the same error
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problems in the configuration:", *problems]))


@functools.lru_cache(4096)
def parse_override(word: str) -> Any:
    """Return a word of a command line as Hydra's `Override`; None if it is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except OverrideParseException:
        return None
    return override


def override_problem(schema: type, name: str) -> str | None:
    """Return why a command line cannot set the key `name`, or None."""
    known = introspection.keys(schema)
    if name in known or name in {section.name for section in introspection.sections(schema)}:
        return None
    parent = next((known[prefix] for prefix in accumulate(name.split("."), "{}.{}".format) if prefix in known), None)
    if parent is None:
        return settings.suggest_key(name, known)
    return None if parent.free else f"{name}: {parent.name} is one value ({parent.type_name}) and has no keys below it"


def convert(value: Any, key: introspection.SettingSpec) -> Any:
    """Return `value` as the setting's type, if the conversion loses nothing.

    Raises:
        InvalidValue: It does not fit; the message says what is expected.
    """
    if value is None:
        if key.optional:
            return None
        way_out = "; leave the setting out for none" if key.default == [] else ""
        raise InvalidValue(f"must be {TYPE_WORDS.get(key.type, f'a {key.type_name}')}, not null{way_out}")
    if key.optional and value in ("None", "none"):
        raise InvalidValue("write null for no value")
    kind, args = get_origin(key.type), get_args(key.type)
    if kind is list:
        items = [_scalar(item, args[0]) for item in (value if isinstance(value, list | tuple) else [value])]
        return [_allowed(item, key) for item in items]
    if kind is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise InvalidValue(f"must be a list of {len(args)} values, such as {introspection.value_text(key.default)}")
        return tuple(_allowed(_scalar(item, arg), key) for item, arg in zip(value, args, strict=True))
    return _allowed(_scalar(value, key.type), key)


def _unknown_plugs(config: Any) -> Problems:
    schema: type = type(config)
    for key in introspection.keys(schema).values():
        if key.registry is None:
            continue
        value = introspection.value_at(config, key.name)
        for name in value if isinstance(value, list) else [value]:
            if problem := key.registry.problem(name):
                yield f"{key.name}={introspection.value_text(value)}: {problem}"


def _section(cls: type, nested: Any, *, prefix: str, root: type, problems: list[str]) -> Any:
    """Return a filled section; errors go to `problems`, and their keys keep their defaults."""
    if not isinstance(nested, Mapping):
        problems.append(
            f"{prefix}={introspection.value_text(nested)}: this is a group of settings; set one of its keys, such as "
            f"{prefix}.{fields(cls)[0].name}"
        )
        return cls()
    known, values = introspection.keys(root), {}
    for field in fields(cls):
        if field.name not in nested:
            continue
        name, value = introspection.dotted(prefix, field.name), nested[field.name]
        section = introspection.section_class(field)
        if section is not None:
            values[field.name] = _section(section, value, prefix=name, root=root, problems=problems)
            continue
        try:
            values[field.name] = convert(value, known[name])
        except InvalidValue as refused:
            problems.append(f"{name}={introspection.value_text(value)}: {refused}")
    own = {field.name for field in fields(cls)}
    unknown = {introspection.dotted(prefix, str(name)): value for name, value in nested.items() if name not in own}
    problems.extend(
        settings.suggest_key(name, known) for name, value in unknown.items() if not settings.asks_nothing(name, value)
    )
    return cls(**values)


def _scalar(value: Any, kind: type) -> Any:
    """Return `value` as a `kind`.

    A bool is never a number. A number becomes another type only without loss.
    """
    is_bool, is_int = isinstance(value, bool), isinstance(value, int) and not isinstance(value, bool)
    if kind == float | str:
        kind = str if isinstance(value, str) else float
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if is_int and kind in (float, str):
        return kind(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind in (int, float) and isinstance(value, str) and (number := _quoted_number(value)) is not None:
        return _scalar(number, kind)
    if kind is str and isinstance(value, float | bool):
        raise InvalidValue(f"must be text; quote it twice: '\"{introspection.value_text(value)}\"'")
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise InvalidValue(f"must be {TYPE_WORDS[kind]}")
    if value == "":
        raise InvalidValue("is empty (an unset shell variable?)")
    return value


def _quoted_number(text: str) -> int | float | None:
    """Return the number that a quoted text shows; None if it shows none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def _allowed(value: Any, key: introspection.SettingSpec) -> Any:
    if key.choices and value not in key.choices:
        raise InvalidValue(f"must be {key.range_text}")
    if isinstance(value, float) and math.isnan(value):
        raise InvalidValue("must be a number")
    if not all(BOUND_CHECKS[sign](value, limit) for sign, limit in key.bounds.items()):
        bounds = (f"{introspection.BOUND_SIGNS[sign]} {limit:g}" for sign, limit in key.bounds.items())
        raise InvalidValue(f"must be {' and '.join(bounds)}")
    return value
