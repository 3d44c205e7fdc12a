"""What every `python -m hybridrl.main_*` does around its work: log, and say what went wrong in a line a person can act
on.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable

from hybridrl.driver.termination import EXIT_CODE, NOTICE, Terminated
from hybridrl.errors import ConfigError, DataError, HybridRLError, PlacementError

logger = logging.getLogger(__name__)


def run_front_end(
    work: Callable[[], None],
    *,
    log_directory: Callable[[], str | None],
    newest_checkpoint: Callable[[str], str | None] = lambda directory: None,
) -> int:
    """Run `work` and return the exit code: 0, 2 for a mistake in the command, 1 for a failure, 130 for Ctrl-C, 143 for
    SIGTERM.

    A run that SIGTERM finds in training commits first, see `driver/termination.py`. An error is one readable line, with
    the way out in it. The whole traceback, a remote worker's included, goes into `error.log` in the directory that
    `log_directory()` returns, if there is one; without one, only what is not our own error shows its traceback.
    newest_checkpoint: finds what is committed in that directory.
    """
    try:
        with NOTICE.heard():
            work()
        return 0
    except (ConfigError, DataError, PlacementError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (KeyboardInterrupt, Terminated) as error:
        how = "terminated" if isinstance(error, Terminated) else "interrupted"
        sys.stderr.write(f"{_interrupted(log_directory(), newest_checkpoint, how)}\n")
        return EXIT_CODE if isinstance(error, Terminated) else 130
    except Exception as error:
        directory = log_directory()
        if NOTICE.received:  # whoever sent it may have sent it to the workers, too
            sys.stderr.write(f"{_interrupted(directory, newest_checkpoint, 'terminated')} ({describe(error)})\n")
            return EXIT_CODE
        expected = isinstance(error, HybridRLError) and directory is None
        sys.stderr.write(f"{describe(error)}\n" + ("" if expected else f"{_keep_traceback(error, directory)}\n"))
        return 1


def _interrupted(directory: str | None, newest_checkpoint: Callable[[str], str | None], how: str) -> str:
    """Say where the next run begins."""
    newest = None if directory is None else newest_checkpoint(directory)
    if newest is not None:
        return (
            f"{how}; {newest} is committed, and the next run goes on from it unless trainer.resume_mode says otherwise"
        )
    return f"{how}; nothing was committed, the next run starts anew" + (
        "" if directory is None else " (trainer.save_freq=N commits every N steps)"
    )


def describe(error: Exception) -> str:
    """Return an error in one line: its type, its message, and the notes that say where it happened."""
    notes = "; ".join(getattr(error, "__notes__", []))
    name = "" if isinstance(error, HybridRLError) else f"{type(error).__name__}: "
    return f"error: {name}{error}" + (f" ({notes})" if notes else "")


def _keep_traceback(error: Exception, directory: str | None) -> str:
    text = getattr(error, "remote_traceback", "") + "".join(traceback.format_exception(error))
    if directory is None or not os.path.isdir(directory):
        return text
    path = os.path.join(directory, "error.log")
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError:  # a full disk, perhaps the very error that is to be kept
        return text
    return f"the whole traceback is in {path}"


def set_up_logging() -> None:
    """Log our own sentences at INFO, everybody else's from WARNING, and show no other library's progress bars."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hybridrl").setLevel(logging.INFO)
