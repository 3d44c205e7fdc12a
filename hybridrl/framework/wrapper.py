"""Wrappers of stages, where DI-engine's users look for them."""

from hybridrl.framework.step_timer import StepTimer

__all__ = ["StepTimer"]
