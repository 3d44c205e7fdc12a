"""Functions of the user's that change the stages of the loop: `trainer.middleware=[path.py:fn]`.

    def use(task, trainer):
        task.insert_after("adv", clip_advantages)       # or insert_before, replace, use_wrapper, on_exit
"""

from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.config.import_path import load_object
from hybridrl.errors import ConfigError
from hybridrl.framework import Task

Middleware = Callable[[Task, Any], None]


def load_middleware(paths: Sequence[str]) -> list[Middleware]:
    """Return the functions named as `path.py:fn` or `package.module:fn`. Raises ConfigError for what is not there or no function."""
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
