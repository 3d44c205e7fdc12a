"""A recorded run for `hybridrl view --demo`: the reinforcement learning of the quick start, one worker of it killed."""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.resources import as_file, files

ARCHIVE = "demo_run.zip"


@contextlib.contextmanager
def recorded_run() -> Iterator[str]:
    """Yield the directory of the recorded run, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hybridrl-view-") as folder:
        directory = os.path.join(folder, "demo")
        with as_file(files("hybridrl.view") / ARCHIVE) as path, zipfile.ZipFile(path) as archive:
            archive.extractall(directory)
        yield directory
