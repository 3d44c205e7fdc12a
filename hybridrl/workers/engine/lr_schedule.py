"""Learning rate as a pure function of the optimizer step.

The engine counts the steps. There is no scheduler object and no state.
"""

import math

from hybridrl.config.schema.workers import OptimConfig


def learning_rate(optim: OptimConfig, step: int, *, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of a run of `total_steps`."""
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    return optim.lr * lr_factor(
        step,
        shape=optim.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
    )


def lr_factor(step: int, *, shape: str, warmup_steps: int, total_steps: int, min_lr_ratio: float) -> float:
    """Return the learning rate of optimizer step `step` (from 0) as a fraction of the peak.

    Warm-up: (step + 1) / warmup_steps, so that no step runs at 0 and the last warm-up step has the peak. After it, with
    x = (step - warmup_steps) / (total_steps - warmup_steps) and m = min_lr_ratio:

        constant  1
        linear    m + (1 - m) (1 - x)
        cosine    m + (1 - m) (1 + cos(pi x)) / 2

    x stays 1 after `total_steps`, so a longer run keeps the smallest rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    x = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    decay = {"linear": 1.0 - x, "cosine": (1.0 + math.cos(math.pi * x)) / 2}[shape]
    return min_lr_ratio + (1.0 - min_lr_ratio) * decay
