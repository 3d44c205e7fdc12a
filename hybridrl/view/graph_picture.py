"""The picture of a run's stages, drawn by `hybridrl job graph` in a child process, because drawing loads torch.

Settings that may name code are left out: to look at a run must not run code that came with it. So stages of
`trainer.middleware` are not in the picture.
"""

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import yaml

from hybridrl.system.child_process import ChildProcess, ProcessLimits

SECTIONS = ("algorithm.", "actor_rollout_ref.", "critic.", "reward_model.", "distillation.", "trainer.", "data.")
NAMES_CODE = ("path", "middleware", "external_lib", "name", "class_path", "plugins", "worker", "files", "dir")
MAX_WORDS = 300
TIMEOUT_S = 120.0
_DRAWING = threading.Lock()  # one child at a time
MEMORY_MB = 4096


def graph_picture(settings: Mapping[str, Any]) -> bytes | str:
    """Return the picture as SVG, or why there is none."""
    if "algorithm.adv_estimator" not in settings:
        return "only runs of PPO and its relatives have a graph of stages; this run's settings are of another kind"
    with _DRAWING:
        return _drawn(tuple(_words(settings)))


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that decide about stages as words of a command line."""
    words = []
    for name, value in settings.items():
        is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and value.isidentifier())
        if is_plain and name.startswith(SECTIONS) and not name.endswith(NAMES_CODE):
            words.append(f"{name}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
    return [*words[:MAX_WORDS], "data.train_files=[train]", "data.val_files=[val]"]  # nothing reads them


@functools.lru_cache(maxsize=8)
def _drawn(words: tuple[str, ...]) -> bytes | str:
    with tempfile.TemporaryDirectory(prefix="hybridrl-view-") as folder:
        path = os.path.join(folder, "graph.svg")
        command = [sys.executable, "-m", "hybridrl.cli", "job", "graph", "--output", path, *words]
        child = ChildProcess(command, limits=ProcessLimits(memory_mb=MEMORY_MB))
        try:
            child.wait(TIMEOUT_S)
        finally:
            child.end()
        if not os.path.exists(path):
            return "the graph could not be drawn from the run's settings; the terminal of `hybridrl view` says why"
        with open(path, "rb") as file:
            return file.read()
