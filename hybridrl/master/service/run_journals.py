"""Finds the journals of runs on this machine: of a run or job by its name, or those in a directory.

`hybridrl job` reads them when no cluster has the job any more.
"""

import os
from pathlib import Path

from hybridrl.errors import JournalError
from hybridrl.master.service.journal import EVENTS, replay
from hybridrl.master.service.private_directory import check_private, private_root
from hybridrl.single_controller.cluster import MASTER

JOURNAL_ROOT = os.path.join(private_root(), "jobs")  # of submitted jobs


def journals_in(directory: str) -> list[str]:
    """Return the journals in a directory, newest first.

    A journal is the directory itself, or RUN in the directory that was given as `submit(journal=...)`, or master/RUN
    below the directory of a run of `main_ppo`.
    """
    root = Path(directory)
    found = {path.parent for path in root.rglob(f"{EVENTS}*")}
    return _newest_first([path for path in found if root in (path, path.parent) or path.parent.name == MASTER])


def journals_of(job: str) -> list[str]:
    """Return the journals in `JOURNAL_ROOT` of a run, or of all runs of a job, newest first.

    Args:
        job: A name.

    Raises:
        ConfigError: Another user has made the directory of `JOURNAL_ROOT`.
    """
    if "/" in job:
        return []
    check_private(private_root())
    run = Path(JOURNAL_ROOT, job)
    if run.is_dir():
        return journals_in(str(run))
    return _newest_first([path for path in Path(JOURNAL_ROOT).glob(f"{job}-*") if _is_of_job(path, job)])


def _is_of_job(journal: Path, job: str) -> bool:
    try:
        return replay(str(journal))[0].job == job
    except JournalError:  # of another run, perhaps; named by itself it is reported
        return False


def _newest_first(journals: list[Path]) -> list[str]:
    return [str(path) for path in sorted(journals, key=lambda path: path.stat().st_mtime, reverse=True)]
