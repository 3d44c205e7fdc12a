"""An output file that is written in parts, so that a repeated command writes only the missing ones.

Parts are files beside the output, in a directory of its name with the suffix `.parts`. `finish` joins them into the
output, which appears complete or not at all, and removes them. Parts and output name the settings that made them.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridrl.errors import ConfigError
from hybridrl.trainer.data.row_files import write_table

IDENTITY = b"hybridrl.generation"  # key of the parquet metadata
KEY = "data.output_path"


def prepare_folder(file: str, key: str) -> None:
    """Make the directory of a file. Raises ConfigError that names the setting `key` if that is impossible."""
    try:
        Path(file).expanduser().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={file}: cannot be written ({error.strerror}); choose another directory") from error


class OutputParts:
    """The parts of one output.

    Args:
        output: The file to write.
        num_rows: Its rows.
        size: Rows of a part.
        made_from: What decides the content. Parts and output made from something else are refused.

    Raises:
        ConfigError: The output cannot be written, or it or parts of it exist and were made from something else.
    """

    def __init__(self, output: str, *, num_rows: int, size: int, made_from: Mapping[str, Any]):
        self.output, self.num_rows, self.size = Path(output).expanduser(), num_rows, size
        self.folder = self.output.with_name(f"{self.output.name}.parts")
        text = json.dumps({**made_from, "size": size}, sort_keys=True, default=str)
        self._identity = hashlib.sha256(text.encode()).hexdigest().encode()
        for file in [self.output, *self.folder.glob("*.parquet")]:
            if file.exists() and self._identity_of(file) != self._identity:
                raise ConfigError(
                    f"{KEY}={output}: {file} was made with other settings, data or model; remove it, or choose another "
                    "file"
                )
        prepare_folder(output, KEY)

    @property
    def is_complete(self) -> bool:
        """Return whether the output has been written."""
        return self.output.exists()

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield the first row and the row after the last one of every part that is missing."""
        for start in range(0, self.num_rows, self.size):
            if not self._part(start).exists():
                yield start, min(start + self.size, self.num_rows)

    def write(self, start: int, rows: pa.Table) -> None:
        """Write the part that begins at row `start`."""
        write_table(self._marked(rows), str(self._part(start)))

    def finish(self) -> None:
        """Join all parts into the output, and remove them."""
        parts = [pq.read_table(self._part(start)) for start in range(0, self.num_rows, self.size)]
        write_table(self._marked(pa.concat_tables(parts, promote_options="permissive")), str(self.output))
        shutil.rmtree(self.folder)

    def _part(self, start: int) -> Path:
        return self.folder / f"{start:09d}.parquet"

    def _marked(self, rows: pa.Table) -> pa.Table:
        return rows.replace_schema_metadata({IDENTITY: self._identity})

    def _identity_of(self, file: Path) -> bytes | None:
        try:
            return (pq.read_schema(file).metadata or {}).get(IDENTITY)
        except (pa.ArrowException, OSError):
            return None
