"""The loop: named stages over a context. Knows no reinforcement learning, no torch and no ray."""

from hybridrl.framework.context import Context, OnlineRLContext
from hybridrl.framework.stage import StageSpec, spec_of, stage
from hybridrl.framework.step_timer import StepTimer
from hybridrl.framework.task import Task

__all__ = ["Context", "OnlineRLContext", "StageSpec", "StepTimer", "Task", "spec_of", "stage"]
