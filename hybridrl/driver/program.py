"""Run a command line program: logging, exit codes, and one readable line for an error.

Every `python -m hybridrl.main_*` and the `hybridrl` command run their work through `run_program`, in the driver
process. Knows nothing about training.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable

from hybridrl.driver.run_context import RunContext
from hybridrl.driver.signals import EXIT_CODE, INTERRUPT_EXIT_CODE, Terminated, acknowledged_interrupts
from hybridrl.driver.terminal import TerminalFormatter, show_error
from hybridrl.errors import ConfigError, DataError, HybridRLError, PlacementError

logger = logging.getLogger(__name__)
ERROR_FILE = "error.log"  # in a run's directory: the traceback of the error that its newest attempt ended with


def run_program(
    work: Callable[[], int | None],
    *,
    context: RunContext | None = None,
    newest_checkpoint: Callable[[str], str | None] = lambda directory: None,
) -> int:
    """Run `work` and return the exit code.

    A training run that receives SIGTERM or Ctrl-C commits first (`driver/signals.py`). An error is
    one readable line that names the fix. The full traceback, a remote worker's included, goes to `error.log` in the
    run's directory. Without one, only errors that are not hybridrl's own show their traceback.

    Args:
        work: The program; may return an exit code.
        context: The run's state in this process; None for a program that does not train.
        newest_checkpoint: Returns the newest committed checkpoint in the run's directory.

    Returns:
        0; 2 for a mistake in the command; 1 for a failure; 130 for Ctrl-C; 143 for SIGTERM; or what `work` returned.
    """
    run, trains = context or RunContext(), context is not None
    termination = run.termination
    try:
        with termination.handle_sigterm(), acknowledged_interrupts(termination, enabled=trains):
            return work() or 0
    except (ConfigError, DataError, PlacementError) as error:
        show_error(f"{error}\n")
        return 2
    except (KeyboardInterrupt, Terminated) as error:
        code, why = EXIT_CODE if isinstance(error, Terminated) else INTERRUPT_EXIT_CODE, ""
    except Exception as error:
        if not termination.received:
            more = _traceback_or_its_place(error, run.directory, newest_checkpoint)
            show_error(f"{format_error(error)}\n" + (f"{more}\n" if more else ""))
            return 1
        # The workers may have received the signal too, and their loss is then no failure.
        code, why = termination.exit_code, f" ({format_error(error)})"
    about = f"; {_progress(run.directory, newest_checkpoint)}" if trains else ""
    show_error(f"{'terminated' if code == EXIT_CODE else 'interrupted'}{about}{why}\n")
    return code


def _progress(directory: str | None, newest_checkpoint: Callable[[str], str | None]) -> str:
    newest = None if directory is None else newest_checkpoint(directory)
    if newest is not None:
        return f"{newest} is committed; the next run resumes from it unless trainer.resume_mode says otherwise"
    return "nothing was committed, the next run starts from step 0" + (
        "" if directory is None else " (trainer.save_freq=N commits every N steps)"
    )


def format_error(error: Exception) -> str:
    """Return an error in one line: its type, its message, and the notes that say where it happened."""
    notes = "; ".join(getattr(error, "__notes__", []))
    name = "" if isinstance(error, HybridRLError) else f"{type(error).__name__}: "
    return f"error: {name}{error}" + (f" ({notes})" if notes else "")


def _traceback_or_its_place(
    error: Exception, directory: str | None, newest_checkpoint: Callable[[str], str | None]
) -> str:
    """Return the traceback, or the place where it is saved.

    With the place comes what the next run starts from. An error of hybridrl's own needs no traceback: without a
    directory the text is empty.
    """
    is_own = isinstance(error, HybridRLError)
    text = getattr(error, "remote_traceback", "") + "".join(traceback.format_exception(error))
    if directory is None or not os.path.isdir(directory):
        return "" if is_own and directory is None else text
    path = os.path.join(directory, ERROR_FILE)
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError as refused:  # the disk may be full: perhaps that is the error to save
        if not is_own:
            return text
        place = f"{path} cannot be written ({refused.strerror})"
    else:
        place = f"the full traceback is in {path}"
    try:
        return f"{place}; {_progress(directory, newest_checkpoint)}"
    except Exception:  # of the storage, and perhaps the error itself
        return place


def set_up_logging() -> None:
    """Log hybridrl at INFO and other libraries from WARNING, without other libraries' progress bars."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("hybridrl").setLevel(logging.INFO)
    for client in ("httpx", "httpx2"):  # a line per request, also where something else has set the root logger to INFO
        logging.getLogger(client).setLevel(logging.WARNING)
