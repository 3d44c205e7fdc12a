"""Stage wrappers under DI-engine's import path."""

from hybridrl.framework.step_timer import StepTimer

__all__ = ["StepTimer"]
