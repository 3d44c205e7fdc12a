"""From nested dictionaries to a frozen, checked config, reporting everything that is wrong at once.

Checks each setting by itself: is there such a key, has the value its type, is it in range. What two settings mean
together stands in `check.py`.
"""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_origin

from hybridrl.config.introspection import BOUND_SIGNS, Key, dotted, is_section, keys, sections, value_text
from hybridrl.config.unknown_keys import unknown_key
from hybridrl.errors import ConfigError

Schema = TypeVar("Schema")
WITHIN = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
INSTEAD = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping, such as {name:value}",
}


class Refused(ValueError):
    """A value cannot stand in its key; the message says what can."""


def from_dict(schema: type[Schema], nested: Mapping[str, Any]) -> Schema:
    """Return `schema` filled from `nested`; raises ConfigError with one line for each thing that is wrong."""
    config, problems = build(schema, nested)
    raise_for(problems)
    return config


def build(schema: type[Schema], nested: Mapping[str, Any]) -> tuple[Schema, list[str]]:
    """Return `schema` filled from `nested`, and a line for each unknown key, wrong type and value out of range.

    A key that is left out, or whose value is refused, has its default.
    """
    problems: list[str] = []
    return _section(schema, nested, prefix="", root=schema, problems=problems), problems


def raise_for(problems: list[str]) -> None:
    """Raise one ConfigError that holds every problem on a line of its own; do nothing when there is none."""
    problems = list(dict.fromkeys(problems))  # the same key may be wrong in a file and on the command line
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problems in the configuration:", *problems]))


def override_problem(schema: type, name: str) -> str | None:
    """Return why a command line cannot set the key `name` of `schema`, or None when it can."""
    known = keys(schema)
    if name in known or name in {section.name for section in sections(schema)}:
        return None
    parent = next((known[name[:dot]] for dot in _dots(name) if name[:dot] in known), None)
    if parent is None:
        return unknown_key(name, known)
    return None if parent.free else f"{name}: {parent.name} is one value ({parent.type_name}) and has no keys below it"


def convert(value: Any, key: Key) -> Any:
    """Return `value` as `key`'s type, if that loses nothing; raises Refused with what is wanted instead."""
    if value is None:
        if key.optional:
            return None
        raise Refused(f"must be {_wanted(key)}, not null")
    if key.optional and value in ("None", "none"):
        raise Refused("write null for nothing")
    kind, args = get_origin(key.type), get_args(key.type)
    if kind is list:
        items = [_scalar(item, args[0]) for item in (value if isinstance(value, list | tuple) else [value])]
        return [_allowed(item, key) for item in items]
    if kind is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise Refused(f"must be a list of {len(args)} values, such as {value_text(key.default)}")
        return tuple(_allowed(_scalar(item, arg), key) for item, arg in zip(value, args, strict=True))
    return _allowed(_scalar(value, key.type), key)


def _section(cls: type, nested: Any, *, prefix: str, root: type, problems: list[str]) -> Any:
    """Fill one section; a value that is refused leaves its default and a line in `problems`."""
    if not isinstance(nested, Mapping):
        problems.append(
            f"{prefix}={value_text(nested)}: this is a group of settings; set one of its keys, such as "
            f"{prefix}.{fields(cls)[0].name}"
        )
        return cls()
    known, values = keys(root), {}
    for field in fields(cls):
        if field.name not in nested:
            continue
        name, value = dotted(prefix, field.name), nested[field.name]
        if is_section(field):
            values[field.name] = _section(field.default_factory, value, prefix=name, root=root, problems=problems)
            continue
        try:
            values[field.name] = convert(value, known[name])
        except Refused as refused:
            problems.append(f"{name}={value_text(value)}: {refused}")
    unknown = nested.keys() - {field.name for field in fields(cls)}
    problems.extend(unknown_key(dotted(prefix, str(name)), known) for name in nested if name in unknown)
    return cls(**values)


def _scalar(value: Any, kind: type) -> Any:
    """Return `value` as a `kind`; a bool is never a number, and a number becomes another type only if none of it is
    lost.
    """
    is_bool, is_int = isinstance(value, bool), isinstance(value, int) and not isinstance(value, bool)
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if is_int and kind in (float, str):
        return kind(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, float | bool):
        raise Refused(f"must be text; quote it twice: '\"{value_text(value)}\"'")
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise Refused(f"must be {INSTEAD[kind]}")
    if value == "":
        raise Refused("is empty (an unset shell variable?)")
    return value


def _allowed(value: Any, key: Key) -> Any:
    if key.choices and value not in key.choices:
        raise Refused(f"must be {key.range_text}")
    if isinstance(value, float) and math.isnan(value):
        raise Refused("must be a number")
    if not all(WITHIN[sign](value, limit) for sign, limit in key.bounds.items()):
        raise Refused(f"must be {' and '.join(f'{BOUND_SIGNS[sign]} {limit:g}' for sign, limit in key.bounds.items())}")
    return value


def _wanted(key: Key) -> str:
    return INSTEAD.get(key.type, f"a {key.type_name}")


def _dots(name: str) -> Iterator[int]:
    return (index for index, letter in enumerate(name) if letter == ".")
