"""Functions of the user's that change the stages of the loop: `trainer.middleware=[path.py:fn]`.

    def use(task, trainer):
        task.insert_after("adv", clip_advantages)       # or insert_before, replace, use_wrapper, on_exit

The context of a step whose batch is a `DataProto`: stages that run side by side each work on a shallow copy of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.import_path import load_object
from hybridrl.errors import ConfigError
from hybridrl.framework import OnlineRLContext, StageSpec, Task
from hybridrl.framework.context import set_changed
from hybridrl.framework.stage import with_spec
from hybridrl.protocol import DataProto

Middleware = Callable[[Task, Any], None]


def load_middleware(paths: Sequence[str]) -> list[Middleware]:
    """Return the functions named as `path.py:fn` or `package.module:fn`.

    Raises ConfigError for what is not there or no function.
    """
    return [_load(path) for path in paths]


def _load(path: str) -> Middleware:
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ConfigError(f"trainer.middleware={path}: write it as path.py:fn or package.module:fn")
    try:
        loaded = load_object(place, name)
    except ConfigError as error:
        raise ConfigError(f"trainer.middleware={path}: {error}") from error
    if not callable(loaded):
        raise ConfigError(f"trainer.middleware={path}: is {type(loaded).__name__}, not a function of (task, trainer)")
    return loaded


def apply_middleware(task: Task, trainer: Any) -> None:
    """Let the trainer's middleware change its loop."""
    for change in trainer.middleware:
        change(task, trainer)


def changed_stages(specs: Iterable[StageSpec], config: PPOConfig) -> list[StageSpec]:
    """Return what the stages say about themselves once `trainer.middleware` has changed the loop. Nothing is run."""
    task = Task()
    for spec in specs:
        task.use(with_spec(_nothing, spec))
    for change in load_middleware(config.trainer.middleware):
        change(task, Outline(config))
    return task.stages


class Outline:
    """Stands for the trainer where the loop is looked at and not run: it has the settings and nothing else."""

    def __init__(self, config: PPOConfig):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"trainer.middleware: trainer.{name} is there when the loop runs and not before; use it inside of a stage"
        )


def _nothing(ctx: Any) -> None:
    pass


@dataclass(repr=False, eq=False)
class BatchContext(OnlineRLContext):
    """`OnlineRLContext` for stages that run beside others. Columns are added or replaced, never changed in place."""

    def copied(self, value: Any) -> Any:
        if not isinstance(value, DataProto):
            return super().copied(value)
        batch = None if value.batch is None else value.batch.clone(recurse=False)
        return DataProto(batch, dict(value.non_tensor_batch), dict(value.meta_info))

    def take_changes(self, mine: Any, before: Any, theirs: Any) -> bool:
        if not all(isinstance(value, DataProto) for value in (mine, before, theirs)) or len(mine) != len(theirs):
            return super().take_changes(mine, before, theirs)
        if theirs.batch is not None:
            _set_changed_columns(mine, before, theirs)
        set_changed(mine.non_tensor_batch, before.non_tensor_batch, theirs.non_tensor_batch)
        set_changed(mine.meta_info, before.meta_info, theirs.meta_info)
        return True


def _set_changed_columns(mine: DataProto, before: DataProto, theirs: DataProto) -> None:
    if mine.batch is None:
        mine.batch = theirs.batch
        return
    set_changed(mine.batch, {} if before.batch is None else before.batch, theirs.batch)
