"""Rows that are in no parquet file: JSON lines, and datasets of the Hugging Face hub.

`ParquetRows` loads this module when `data.train_files` or `data.val_files` names one, in the driver.
"""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_preprocess import raw
from hybridrl.config.schema.data import HubData
from hybridrl.errors import DataError, reason_of


def json_lines_table(path: Path) -> pa.Table:
    """Return the rows of a .jsonl or .jsonl.gz file, one JSON object per line.

    A column that a row lacks is null there.

    Raises:
        DataError: A line is no JSON object, or a column has values of several types.
    """
    try:
        rows = [row.columns for row in raw.read_json_lines(path)]
    except (raw.RawDataError, OSError, ValueError) as error:
        raise DataError(f"{reason_of(error):.300}; write one JSON object with the columns per line") from error
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column(path, name, [row.get(name) for row in rows]) for name in names}
    return pa.table(columns)


def _column(path: Path, name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        reason = f"{reason_of(error):.200}"
        raise DataError(f"{path}: column {name!r} has values of several types ({reason}); use one type") from error


def hub_table(source: HubData) -> pa.Table:
    """Return the rows of a dataset of the hub, downloaded or from the cache of this machine.

    Raises:
        DataError: There is no such file and no such dataset, configuration or split, or the hub does not answer.
    """
    unreachable = None if os.path.isdir(source.name) else raw.hub_error()
    if unreachable:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the client is imported; an earlier download is then used
    import datasets

    try:
        return datasets.load_dataset(source.name, source.config, split=source.split).with_format("arrow")[:]
    except Exception as error:  # the client has no common base for "no such dataset", "no network" and "not allowed"
        reason = unreachable or reason_of(error)
        raise DataError(
            f"{source}: no such file, and the Hugging Face hub gives no dataset {source.name} with split "
            f"{source.split} ({reason:.300}); give a parquet or .jsonl file, or ORG/NAME, ORG/NAME:SPLIT or "
            "ORG/NAME:CONFIG:SPLIT"
        ) from error
