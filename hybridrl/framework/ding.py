"""Names that DI-engine's programs use: the task of the process, and `ding_init`.

ding_init(cfg)
with task.start(ctx=OnlineRLContext()):
task.use(train).run(max_step=100)
"""

import logging
from pathlib import Path
from typing import Any

from hybridrl.framework.tasks import Task


class ProcessTask(Task):
    """The task of a process, for programs with one loop; it unpickles as that of the receiving process."""

    def __reduce__(self) -> tuple:
        return process_task, ()


task = ProcessTask()
if task.loaded("events"):  # no group waits for a task that its program has not started
    task.events.close()
    del task.events


def process_task() -> Task:
    """Return the task of this process."""
    return task


def ding_init(cfg: Any) -> Path:
    """Create the folder of the experiment and show log lines from INFO on.

    DI-engine also opens a TensorBoard writer there. Here a stage of the program writes what it wants to keep.

    Args:
        cfg: Settings with the attribute or key `exp_name`, the folder.

    Returns:
        The folder.

    Raises:
        ValueError: `cfg` has no `exp_name`.
    """
    name = cfg.get("exp_name") if hasattr(cfg, "get") else getattr(cfg, "exp_name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"ding_init: cfg.exp_name={name!r} must be the folder of the experiment")
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO)
    return folder
