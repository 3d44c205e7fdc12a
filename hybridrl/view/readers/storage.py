"""Files of a run that may still grow, on a local disk or any fsspec path.

`LineTail` reads the lines that a file has gained, by byte offset, so that no file is loaded whole or twice. Used by all
readers of this room. Nothing here writes.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import fsspec

BLOCK_BYTES = 1 << 20  # read at once
MAX_LINE_BYTES = 64 << 20  # a longer line is not of ours; the file is not read further
MARK_BYTES = 64  # of the text before the offset, kept to recognize a replaced file


class Folder:
    """A directory to read.

    Args:
        url: A path, or an fsspec URL such as `s3://bucket/run`.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self.url, self._root = url.rstrip("/"), str(root).rstrip("/")

    @property
    def name(self) -> str:
        return self._root.rsplit("/", 1)[-1]

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    def exists(self) -> bool:
        return bool(self._fs.isdir(self._root))

    def below(self, path: str) -> "Folder":
        """Return a directory below this one."""
        return Folder(f"{self.url}/{path}")

    def names(self) -> list[str]:
        """Return the names of files and directories in it; none if it does not exist."""
        self._fs.invalidate_cache(self._root)
        try:
            return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        except OSError:
            return []

    def stat(self, name: str) -> tuple[int, str] | None:
        """Return size in bytes and a text that changes with the file; None if there is no such file."""
        try:
            found = self._fs.info(f"{self._root}/{name}")
        except OSError:
            return None
        if found.get("type") != "file":
            return None
        changed = next((str(found[key]) for key in ("mtime", "LastModified", "updated", "ETag") if key in found), "")
        return int(found["size"] or 0), changed

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from `start` to `end` of a file.

        Raises:
            OSError: It cannot be read.
        """
        return bytes(self._fs.cat_file(f"{self._root}/{name}", start=start, end=end))


class LineTail:
    """Reads a file of lines that grows.

    A last line without a newline is half-written: it is read when it is whole.

    Attributes:
        offset: Bytes read so far.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self.offset = 0
        self._mark = b""

    def lines(self, *, on_replaced: Callable[[], None] = lambda: None) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line) of the lines that are new since the last call.

        Args:
            on_replaced: Called if the file is another one than before, or is shorter. All its lines follow.
        """
        found = self._folder.stat(self._name)
        size = 0 if found is None else found[0]
        if not self._continues(size):
            on_replaced()
            self.offset, self._mark = 0, b""
        length = BLOCK_BYTES
        while self.offset < size and length <= MAX_LINE_BYTES:
            block = self._folder.read(self._name, self.offset, min(size, self.offset + length))
            *whole, rest = block.split(b"\n")
            for line in whole:
                begin = self.offset
                self.offset += len(line) + 1
                self._mark = (line + b"\n")[-MARK_BYTES:]
                yield begin, line
            if not whole:
                if len(rest) < length:  # a half-written line ends the file
                    return
                length *= 2

    def _continues(self, size: int) -> bool:
        """Return whether the file still has what was read of it last."""
        if not self.offset:
            return True
        if size < self.offset:
            return False
        return self._folder.read(self._name, self.offset - len(self._mark), self.offset) == self._mark


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
