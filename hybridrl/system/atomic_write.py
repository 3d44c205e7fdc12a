"""Files that appear complete or not at all, also when the machine loses power.

Every durable file of the library is written through `atomic_write`; directories appear by a rename of their own, after
`fsync_path` of what they contain.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w", *, private: bool = False) -> Iterator[IO[Any]]:
    """Open a file beside `path` that replaces `path` when the block ends.

    The new file is on the disk before it gets its name. If the block raises, `path` is as it was and nothing is left
    beside it. Two writers of one path do not mix their files: the last one wins.

    Args:
        path: The file to create or replace. Its directory exists.
        mode: "w" for text in UTF-8, "wb" for bytes.
        private: Only this user may read the file.

    Raises:
        OSError: The file cannot be written; `path` is as it was.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode={mode!r} must be 'w' or 'wb': a durable file is always written as a whole")
    encoding, bits = "utf-8" if mode == "w" else None, 0o600 if private else 0o666  # less the process's umask
    opener = functools.partial(os.open, mode=bits)
    with replaced_file(path) as partial, open(partial, mode, encoding=encoding, opener=opener) as file:
        yield file


@contextmanager
def replaced_file(path: str | os.PathLike) -> Iterator[Path]:
    """Return the name of a file beside `path`, for code that opens files itself; see `atomic_write`."""
    target = Path(path)
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        yield partial
        fsync_path(partial)
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    fsync_path(target.parent)


def fsync_path(path: str | os.PathLike) -> None:
    """Return when the kernel has written a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
