"""Recorded runs for `hybridrl view --demo`: `quickstart`, and `soak`, whose workers were killed.

`quickstart` has 40 steps of one process. `soak` has every twentieth step of its first 1000.
`tests/support/view/pack_demo.py` has made the archive.
"""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.resources import as_file, files

ARCHIVE = "demo_run.zip"


@contextlib.contextmanager
def recorded_runs() -> Iterator[str]:
    """Yield a directory with the recorded runs, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hybridrl-view-") as folder:
        directory = os.path.join(folder, "demo")
        with as_file(files("hybridrl.view") / ARCHIVE) as path, zipfile.ZipFile(path) as archive:
            archive.extractall(directory)
        yield directory
