"""Merge dictionaries of batches: overlapping columns, meta information, metrics of many workers.

A key in two places must have equal values; nothing is silently overwritten. Joining rows is in `columns.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hybridrl.data_plane.columns import C, concat_rows, deep_equal
from hybridrl.data_plane.conversion import TensorDict, plain_value
from hybridrl.errors import DataError

D = TypeVar("D", bound=dict)

METRICS = "metrics"


def check_union(kind: str, first: Mapping, second: Mapping) -> None:
    """Raise DataError for the first key whose values differ (NaN equals NaN)."""
    for key in second:
        if key in first and not deep_equal(first[key], second[key]):
            raise DataError(f"{kind} {key!r} is in both batches with different content; rename or drop one of them")


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the second TensorDict's entries to the first, in place, and return it.

    Raises:
        DataError: Entries in both differ.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise DataError(
            f"batches of {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)} rows cannot be merged"
        )
    first, second = ({key: plain_value(entry) for key, entry in td.items()} for td in (tensor_dict1, tensor_dict2))
    check_union("tensor column", first, second)
    for key in second:
        if key not in first:
            tensor_dict1.set(key, tensor_dict2.get(key))
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the second dict's arrays to the first, in place, and return it.

    Raises:
        DataError: Arrays in both differ, compared recursively.
    """
    return _union("non-tensor column", tensor_dict1, tensor_dict2)


def union_two_dict(dict1: dict, dict2: dict) -> dict:
    """Add the second dict's entries to the first, in place, and return it.

    Raises:
        DataError: Entries in both differ, compared recursively.
    """
    return _union("meta_info key", dict1, dict2)


def _union(kind: str, first: D, second: D) -> D:
    check_union(kind, first, second)
    first.update({key: value for key, value in second.items() if key not in first})
    return first


def concat_columns(parts: Sequence[Mapping[str, C]]) -> dict[str, C]:
    """Return each column's rows of all parts.

    Raises:
        DataError: The parts have different columns; the message names them.
    """
    for number, part in enumerate(parts):
        differing = part.keys() ^ parts[0].keys()
        if differing:
            raise DataError(
                f"parts 0 and {number} cannot be concatenated: only one of them has the columns {sorted(differing)}"
            )
    return {name: concat_rows(name, [part[name] for part in parts]) for name in parts[0]}


def merge_meta_info(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the meta information of a concatenation.

    `metrics` (a dict, or a list of dicts) becomes one dict of lists over all parts.

    Raises:
        DataError: Another key has different values; the message has both.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for part in parts:
        for key, value in part.items():
            if key == METRICS:
                metrics += [] if value is None else value if isinstance(value, list) else [value]
            elif key in merged and not deep_equal(merged[key], value):
                raise DataError(
                    f"conflicting values for meta_info key {key!r}: {_short_repr(merged[key])} and {_short_repr(value)}"
                )
            else:
                merged[key] = value
    if metrics:
        merged[METRICS] = _flatten_metrics(metrics)
    return merged


def _flatten_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Return {key: values of all parts}.

    Keys may differ, since a worker without rows reports no metrics. A list counts as that many values.
    """
    flat: dict[str, list] = {}
    for part in metrics:
        for key, value in part.items():
            flat.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return flat


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Return {key: [value in each dict]}.

    Raises:
        DataError: The dicts have different keys; the message names them.
    """
    for number, entry in enumerate(list_of_dict):
        differing = entry.keys() ^ list_of_dict[0].keys()
        if differing:
            raise DataError(f"dicts 0 and {number} differ in the keys {sorted(differing)}")
    return {key: [entry[key] for entry in list_of_dict] for key in (list_of_dict[0] if list_of_dict else ())}


def select_entries(kind: str, entries: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the named entries (None: all) in the order of the names.

    Raises:
        DataError: One does not exist.
    """
    missing = [name for name in names or () if name not in entries]
    if missing:
        raise DataError(f"{kind} {missing[0]!r} is not in the batch; there are {sorted(entries) or 'none'}")
    return dict(entries) if names is None else {name: entries[name] for name in names}


def rename_keys(names: Sequence[str], old_keys: str | list[str] | None, new_keys: str | list[str] | None) -> list[str]:
    """Return the names with the old keys replaced by the new ones, all at once.

    Raises:
        DataError: An old key does not exist, or a name would be used twice.
    """
    old, new = ([keys] if isinstance(keys, str) else keys for keys in (old_keys, new_keys))
    if not isinstance(old, list) or not isinstance(new, list):
        raise TypeError(
            f"keys must be a string or a list of strings, got {type(old_keys).__name__} and {type(new_keys).__name__}"
        )
    if len(old) != len(new):
        raise ValueError(f"{len(old)} old and {len(new)} new keys: {old} and {new}")
    select_entries("batch column", dict.fromkeys(names), old)
    after = [dict(zip(old, new, strict=True)).get(name, name) for name in names]
    if len(set(after)) < len(after):
        raise DataError(f"after renaming {old} to {new} two columns would have the same name: {after}")
    return after


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
