"""Store rows of a Python program as a file of prompts, see docs/data.md.

`GRPOTrainer` does so, in the driver.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridrl.errors import DataError, reason_of
from hybridrl.system.atomic_write import replaced_file
from hybridrl.workers import images as row_images

logger = logging.getLogger(__name__)
COLUMNS = ("prompt", "data_source", "reward_model", "ability", "agent_name", "images", "image")
"""Columns that keep their place; all others become entries of `extra_info`."""
IMAGES = ("images", "image")
SOURCE = "python"
"""`data_source` of rows without one."""


def prompt_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return the rows in verl's format.

    Args:
        rows: Each has `prompt`, and `ground_truth` or verl's `reward_model`.

    Raises:
        DataError: There is no row, a row has no prompt, or a column has values of several types.
    """
    found = [_prompt_row(row, number) for number, row in enumerate(rows)]
    if not found:
        raise DataError("the dataset has no rows; give at least one with a prompt")
    if all(_truth(row) is None for row in found):
        logger.warning(
            "no row has a ground_truth, so reward functions get None: name the column ground_truth, or read it from "
            "extra_info, which has %s",
            ", ".join(found[0]["extra_info"]),
        )
    try:
        return pa.Table.from_pylist(found)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"the rows cannot be stored as columns of one type each: {reason_of(error):.300}") from error


def _stored_images(value: Any) -> Any:
    """Return images of Pillow as mappings with PNG; what a file can hold is returned as it is."""
    if isinstance(value, list):
        return [_stored_images(image) for image in value]
    return {"bytes": row_images.as_encoded(value), "path": None} if hasattr(value, "tobitmap") else value


def _truth(row: Mapping[str, Any]) -> Any:
    truth = row["reward_model"]
    return truth.get("ground_truth") if isinstance(truth, Mapping) else truth


def write_table(table: pa.Table, path: str) -> None:
    """Write a table to a parquet file, whose directory is created. An older file is replaced when all is written."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with replaced_file(path) as unfinished:
        pq.write_table(table, unfinished, write_page_checksum=True)


def _prompt_row(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a row in verl's format."""
    if not isinstance(row, Mapping) or "prompt" not in row:
        has = f"columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"type {type(row).__name__}"
        raise DataError(f"row {number} has {has}; each row is a mapping with a prompt, a text or a list of messages")
    if not isinstance(row["prompt"], str | list):
        kind = type(row["prompt"]).__name__
        raise DataError(f"row {number}: prompt is of type {kind}; give a text or a list of messages")
    extra = dict(row.get("extra_info") or {})
    extra |= {name: value for name, value in row.items() if name not in (*COLUMNS, "extra_info", "ground_truth")}
    kept = {name: row[name] for name in COLUMNS if name in row}
    kept |= {name: _stored_images(kept[name]) for name in IMAGES if name in kept}
    return {
        "data_source": SOURCE,
        "reward_model": {"style": "rule", "ground_truth": row.get("ground_truth")},
        **kept,
        "extra_info": {"index": number, **extra},
    }
