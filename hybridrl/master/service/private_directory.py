"""The directory of this user among the temporary files: nobody else can write there, or has prepared it.

Its name is predictable, so that another process finds what is in it. Therefore its owner is checked, not its name.
"""

import os
import stat
import tempfile
from pathlib import Path

from hybridrl.errors import ConfigError


def private_root() -> str:
    """Return the path of this user's directory; it may not exist."""
    return os.path.join(tempfile.gettempdir(), f"hybridrl-{os.getuid()}")


def make_directory(path: str) -> None:
    """Create a directory and its parents; below `private_root` only if that belongs to this user alone.

    Raises:
        ConfigError: Somebody else has made `private_root`.
        OSError: The directory cannot be created.
    """
    root = private_root()
    if Path(root) in (Path(path), *Path(path).parents):
        os.makedirs(root, mode=0o700, exist_ok=True)
        check_private(root)
    os.makedirs(path, exist_ok=True)


def check_private(directory: str) -> None:
    """Return if `directory` is missing, or this user's own; permissions of others are taken away.

    Raises:
        ConfigError: It belongs to another user, or is no directory.
    """
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"{directory}: is not a directory of this user (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}),"
            " so what is in it cannot be trusted; remove it, or set TMPDIR or the journal's directory"
        )
    if found.st_mode & 0o077:
        os.chmod(directory, 0o700)
