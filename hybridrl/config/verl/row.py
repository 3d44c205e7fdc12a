"""`Row`: what becomes of some of verl's keys. The tables of this folder consist of rows.

A row names its keys with braces for alternatives (`{actor,ref}.x`) and covers the keys below them, too. The first row
that fits key and value decides. All rows say what a key of verl means; none changes a key of ours that is valid.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hybridrl.config.introspection import value_text


class RowKind(StrEnum):
    """What becomes of a key of verl; the value is the phrase in reports."""

    RENAMED = "have another name or value here"
    DONE = "say what is done anyway"
    ELSEWHERE = "concern launching, logging or storage"
    NO_EFFECT = "change speed or memory only, and have no effect here"
    REFUSED = "are refused"


@dataclass(frozen=True)
class Row:
    """What becomes of some keys, with all values or with some.

    Attributes:
        keys: The keys, with braces for alternatives; those below them are covered too.
        kind: What becomes of them.
        text: The reason; of a refusal also the way out.
        to: Keys of ours that get the value, for RENAMED.
        when: Values that the row covers, as `text_of` writes them; None covers all.
        same_as: The row covers the value that this key of ours has, if it is given.
        values: Values of verl to values of ours; others are taken over as they are.
        convert: Name of a conversion of `take_over`, for values that depend on the rest of the command line.
    """

    keys: str
    kind: RowKind
    text: str = ""
    to: tuple[str, ...] = ()
    when: tuple[str, ...] | None = None
    same_as: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    convert: str | None = None


def renamed(keys: str, *to: str, **options: Any) -> Row:
    """Return a row for keys that have another name here."""
    return Row(keys, RowKind.RENAMED, to=to, **options)


def done(keys: str, text: str, *when: str, same_as: str | None = None) -> Row:
    """Return a row for keys whose value says what is done anyway; without `when`, any value does."""
    return Row(keys, RowKind.DONE, text, when=when or None, same_as=same_as)


def elsewhere(keys: str, text: str, *when: str) -> Row:
    """Return a row for keys of launchers, loggers and storage."""
    return Row(keys, RowKind.ELSEWHERE, text, when=when or None)


def no_effect(keys: str, text: str, *when: str) -> Row:
    """Return a row for performance settings that this release does not have."""
    return Row(keys, RowKind.NO_EFFECT, text, when=when or None)


def refused(keys: str, text: str, *when: str) -> Row:
    """Return a row for keys that would change the result; the text has reason and way out."""
    return Row(keys, RowKind.REFUSED, text, when=when or None)


def expanded(keys: str) -> Iterator[str]:
    """Yield the keys that a pattern with braces means: `{a,b}.c` is a.c and b.c."""
    parts = [part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", keys)]
    return map("".join, itertools.product(*parts))


def text_of(value: Any) -> str:
    """Return a value as rows write it: lower case, `null`, `true`, `1`, `0.5`, without blanks and quotes."""
    return re.sub(r"[\s'\"]", "", value_text(value)).lower()
