"""Shared by the scripts of this package: flags, row format, and atomic files."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_preprocess.raw import RawDataError, RawRow, read_splits


def make_parser(description: str, *, default_dir: str, default_source: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--local_dir`, and with `--data_source` if the dataset has a default source."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", default=default_dir, help=f"directory of the parquet files (default: {default_dir})"
    )
    if default_source is not None:
        parser.add_argument(
            "--data_source",
            default=default_source,
            help="raw data: a .jsonl or .jsonl.gz file, a directory of them, or a Hugging Face dataset name "
            f"(default: {default_source})",
        )
    return parser


def run_command(work: Callable[[], None]) -> int:
    """Run `work` and return the exit code, 0 or 2.

    2 follows one line on standard error about the data or the disk.
    """
    try:
        work()
    except (RawDataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class ToRow(Protocol):
    """Converts a raw row to verl's format; None leaves the row out."""

    def __call__(self, raw: RawRow, *, split: str, index: int) -> dict | None: ...


def convert(
    argv: list[str] | None, to_row: ToRow, *, description: str, stem: str, hub_name: str, hub_config: str | None = None
) -> int:
    """Run a script that writes one parquet file per split; return the exit code."""
    args = make_parser(description, default_dir=f"~/data/{stem}", default_source=hub_name).parse_args(argv)

    def work() -> None:
        splits = {
            split: [
                row for index, raw in enumerate(raw_rows) if (row := to_row(raw, split=split, index=index)) is not None
            ]
            for split, raw_rows in read_splits(args.data_source, stem=stem, hub_config=hub_config).items()
        }
        usable = {split: rows for split, rows in splits.items() if rows}
        if not usable:
            raise RawDataError(f"{args.data_source} has no rows with an answer")
        for split, rows in usable.items():
            write_parquet(rows, Path(args.local_dir).expanduser() / f"{split}.parquet")

    return run_command(work)


def rl_row(*, data_source: str, question: str, ability: str, reward_model: dict, extra_info: dict) -> dict:
    """Return one row in verl's format.

    The question as one user message, and the inputs of its reward function.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": reward_model,
        "extra_info": extra_info,
    }


def write_parquet(rows: list[dict], path: Path) -> None:
    """Write rows (all with the same columns) and print their number.

    The file appears by a rename, so it is always complete.
    """
    if not rows:
        raise RawDataError(f"there are no rows for {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows), temporary, write_page_checksum=True)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{path}: {len(rows)} rows")
