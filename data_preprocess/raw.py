"""Read raw rows of a dataset: local JSON-lines files, or the Hugging Face hub.

A local source is a file, or a directory that holds `{stem}*{split}*.jsonl[.gz]` or `{split}.jsonl[.gz]`. The split of a
file is the word `train`, `validation` or `test` in its name. A row's own `split` column (HellaSwag) takes precedence.
"""

import gzip
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPLIT_WORDS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
HUB_TIMEOUT_S = 10.0
FILE_SUFFIXES = (".jsonl", ".jsonl.gz")


class RawDataError(Exception):
    """The raw data cannot be used.

    The message names the file, the row and the column.
    """


@dataclass(frozen=True)
class RawRow:
    """One raw row and its location, for error messages."""

    columns: dict
    location: str

    def __getitem__(self, column: str):
        if column not in self.columns:
            raise RawDataError(
                f"{self.location} has no column {column!r}; it has {', '.join(sorted(self.columns)) or 'none'}"
            )
        return self.columns[column]


def read_splits(source: str, *, stem: str, hub_config: str | None = None) -> dict[str, list[RawRow]]:
    """Return the rows of every split that `source` has, in file order.

    Args:
        source: A file, a directory or a dataset name on the hub.
        stem: Prefix of this dataset's files in a directory with several datasets.
        hub_config: Configuration of the dataset on the hub.

    Raises:
        RawDataError: There is no such source, a line is not a JSON object, or no rows were found.
    """
    path = Path(source).expanduser()
    if path.is_file():
        splits = read_files([path])
    elif path.is_dir():
        splits = read_files(find_files(path, stem))
    elif is_path_like(source):
        raise RawDataError(f"no file or directory {source}")
    else:
        splits = read_hub(source, hub_config)
    if not any(splits.values()):
        raise RawDataError(f"{source} has no rows")
    return splits


def is_path_like(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.endswith(FILE_SUFFIXES) or source.count("/") > 1


def find_files(directory: Path, stem: str) -> list[Path]:
    """Return the JSON-lines files of one dataset.

    Those named after it, or else those named after a split.
    """
    files = sorted(path for path in directory.iterdir() if path.name.endswith(FILE_SUFFIXES))
    named = [path for path in files if path.name.startswith(stem)] or [
        path for path in files if path.name.split(".")[0] in SPLIT_WORDS
    ]
    if not named:
        found = ", ".join(path.name for path in files) or "no .jsonl or .jsonl.gz files"
        raise RawDataError(f"{directory} has no {stem}*.jsonl[.gz] and no train.jsonl[.gz]; it has {found}")
    return named


def split_of(path: Path) -> str:
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "train")


def read_files(paths: list[Path]) -> dict[str, list[RawRow]]:
    splits: dict[str, list[RawRow]] = {}
    for path in paths:
        default = split_of(path)
        for row in read_json_lines(path):
            split = SPLIT_WORDS.get(str(row.columns.get("split", default)), default)
            splits.setdefault(split, []).append(row)
    return splits


def read_json_lines(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a file, each with its line. Raises RawDataError for a line that is none."""
    opener = gzip.open if path.name.endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield parse_line(line, f"{path} line {number}")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise RawDataError(f"{path} cannot be read after line {number}: {error}") from error


def parse_line(line: str, location: str) -> RawRow:
    try:
        columns = json.loads(line)
    except json.JSONDecodeError as error:
        raise RawDataError(f"{location} is not JSON: {error}") from error
    if not isinstance(columns, dict):
        raise RawDataError(f"{location} is not a JSON object with columns")
    return RawRow(columns, location)


def read_hub(name: str, config: str | None) -> dict[str, list[RawRow]]:
    """Download a dataset with `datasets`.

    An error of the hub or the network becomes one line.

    If the hub does not answer, an earlier download is used. Otherwise the client would retry for half a minute, with a
    warning each time.
    """
    unreachable = hub_error()
    if unreachable:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the client is imported
    import datasets

    try:
        splits = datasets.load_dataset(name, config)
    except Exception as error:  # the client has no common base for "no such dataset", "no network" and "not allowed"
        reason = unreachable or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RawDataError(
            f"{name} is not a local path, and cannot be loaded from the Hugging Face hub: {reason}"
        ) from error
    return {
        split: [RawRow(row, f"{name} {split} row {index}") for index, row in enumerate(rows)]
        for split, rows in splits.items()
    }


def hub_error() -> str | None:
    """Return why the hub cannot be reached, or None if it answers at all."""
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(address, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{address} does not answer ({getattr(error, 'reason', error)})"
    return None
