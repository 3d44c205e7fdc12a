"""What DI-engine's programs use by name: the task of the process, and `ding_init`.

ding_init(cfg)
with task.start(ctx=OnlineRLContext()):
task.use(train).run(max_step=100)
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from hybridrl.framework.context import Context
from hybridrl.framework.loop import Task


class ProcessTask(Task):
    """The task of a process, for programs with one loop; it unpickles as that of the receiving process."""

    def start(
        self,
        async_mode: bool = False,
        n_async_workers: int = 3,
        ctx: Context | None = None,
        labels: Iterable[str] | None = None,
        **options: Any,
    ) -> Self:
        """Reset the task as if newly constructed: `with task.start(): ...`.

        As in DI-engine v0.5.3 no context is sent to the peers, unless `auto_sync_ctx=True` is given.
        """
        self.stop()
        vars(self).clear()
        options.setdefault("auto_sync_ctx", False)
        self.__init__(async_mode, n_async_workers, ctx=ctx, labels=labels, **options)  # type: ignore[misc]
        return self

    def __reduce__(self) -> tuple:
        return process_task, ()


task = ProcessTask()


def process_task() -> ProcessTask:
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
