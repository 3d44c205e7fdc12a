"""The training loop: named stages over a context, in one process or several.

Public names of the room. It imports no reinforcement-learning code and no torch.
"""

from hybridrl.framework.context import Context, OfflineRLContext, OnlineRLContext
from hybridrl.framework.parallel.event_loop import EventLoop
from hybridrl.framework.parallel.labels import Role, VoidMiddleware
from hybridrl.framework.parallel.runner import Parallel
from hybridrl.framework.stage import StageSpec, spec_of, stage
from hybridrl.framework.step_timer import StepTimer
from hybridrl.framework.task import Task, task

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
    "spec_of",
    "stage",
    "task",
]
