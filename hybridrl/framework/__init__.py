"""The training loop: named stages over a context, in one process or several.

Public names of the room. It imports no reinforcement-learning code and no torch. `Parallel` is loaded when it is first
asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hybridrl.framework.context import Context, OfflineRLContext, OnlineRLContext
from hybridrl.framework.events.event_loop import EventLoop
from hybridrl.framework.events.labels import Role, VoidMiddleware
from hybridrl.framework.experiment import ding_init
from hybridrl.framework.stage import StageSpec, spec_of, stage
from hybridrl.framework.step_timer import StepTimer
from hybridrl.framework.task import Task, task

if TYPE_CHECKING:
    from hybridrl.framework.parallel.runner import Parallel

__all__ = [
    "Context",
    "EventLoop",
    "OfflineRLContext",
    "OnlineRLContext",
    "Parallel",
    "Role",
    "StageSpec",
    "StepTimer",
    "Task",
    "VoidMiddleware",
    "ding_init",
    "spec_of",
    "stage",
    "task",
]


def __getattr__(name: str) -> object:
    if name == "Parallel":
        return import_module("hybridrl.framework.parallel.runner").Parallel
    raise AttributeError(f"module 'hybridrl.framework' has no attribute {name!r}")
