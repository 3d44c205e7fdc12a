"""`lock_directory`: one program at a time writes to a run's directory.

The lock is the kernel's (`flock`): it belongs to the open file, so a forked process shares it, a started program does
not, and it ends with the last process that has it, however that process ends.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import IO, Any

from hybridrl.errors import ConfigError
from hybridrl.system.machine import machine_id

logger = logging.getLogger(__name__)
LOCK_FILE = ".lock"
ENDING_TIMEOUT_S = 60.0  # a killed program's driver may still commit
POLL_PERIOD_S = 0.1
UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


@contextlib.contextmanager
def lock_directory(directory: str, *, timeout_s: float = ENDING_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of `directory`, which exists, for the duration of the block.

    If the program that took the lock has ended, its last processes are waited for. A file system without locks is used
    without one, which is logged.

    Args:
        directory: The directory to lock.
        timeout_s: How long to wait for the processes of a program that has ended, in seconds.

    Raises:
        ConfigError: Another program holds the lock; names its host and process id. Or the lock's file cannot be opened.
    """
    with _open(os.path.join(directory, LOCK_FILE)) as file:
        try:
            _acquire(file, directory, deadline=time.monotonic() + timeout_s)
            _describe_holder(file)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            logger.warning(
                "%s: its file system has no locks (%s); start no second run there", directory, error.strerror
            )
        yield


def _open(path: str) -> IO[str]:
    try:
        return open(path, "a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the run's lock cannot be opened ({error.strerror}); remove it") from error


def _acquire(file: IO[str], directory: str, *, deadline: float) -> None:
    told = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            if not _has_ended(holder) or time.monotonic() > deadline:
                who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
                raise ConfigError(
                    f"{directory} is in use by a run of {who}; wait for its end or stop it, or set "
                    "trainer.experiment_name or trainer.default_local_dir to a new value"
                ) from None
            if holder and not told:
                logger.info(
                    "%s: waiting for the last processes of process %d, which has ended", directory, holder["pid"]
                )
                told = True
            time.sleep(POLL_PERIOD_S)


def _describe_holder(file: IO[str]) -> None:
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "machine": machine_id()}))
    file.flush()


def _holder(file: IO[str]) -> dict[str, Any]:
    """Return what the holder wrote about itself, or an empty dict if it has not yet."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        return {"pid": int(found["pid"]), "host": str(found["host"]), "machine": str(found["machine"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _has_ended(holder: dict[str, Any]) -> bool:
    if not holder:
        return True  # it took the lock a moment ago, or its disk is full: look again
    return holder["machine"] == machine_id() and not os.path.exists(f"/proc/{holder['pid']}")
