"""Handle an update whose loss or gradient is not finite (`trainer.nonfinite`).

Under every policy the workers skip such an optimizer step on all ranks: parameters, optimizer and schedule stay as they
were. So no checkpoint ever contains it. The policy decides what the driver does then:

    skip      continue; after MAX_SKIPPED_STEPS steps in a row without one applied update the run ends
    rollback  load the newest checkpoint and train on from there; after MAX_ROLLBACKS to the same one the run ends
    stop      end the run

Used by the PPO and SFT trainers, in the driver.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hybridrl.errors import NonFiniteError

logger = logging.getLogger(__name__)
MAX_SKIPPED_STEPS = 10
MAX_ROLLBACKS = 3  # to one checkpoint; runs are deterministic, so only a hardware fault goes away by a rollback
HINTS = {
    "actor": "critic/advantages/*, actor/ppo_kl and actor/grad_norm of the steps before (metrics.jsonl), then lower "
    "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip",
    "critic": "critic/returns/* and critic/grad_norm of the steps before (metrics.jsonl), then lower "
    "critic.optim.lr or critic.grad_clip",
    "train": "train/loss and train/grad_norm of the steps before (metrics.jsonl), then lower optim.lr or grad_clip",
}


class NonFiniteGuard:
    """Checks every update against the policy `trainer.nonfinite`."""

    def __init__(self, policy: str):
        self.policy = policy
        self._skipped_in_a_row: dict[str, int] = {}  # consecutive steps without an applied update, by metric prefix

    def check(self, updates: Mapping[str, Sequence[float]], *, prefix: str, step: int) -> None:
        """Check one update.

        Args:
            updates: Metric -> one value per optimizer step, under `{prefix}/`, as `EngineWorker` reports them.
            prefix: `actor`, `critic` or `train`.
            step: Training step.

        Raises:
            NonFiniteError: The policy does not continue after this update.
        """
        skipped = _values(updates, f"{prefix}/skipped")
        self._skipped_in_a_row[prefix] = (
            self._skipped_in_a_row.get(prefix, 0) + 1 if skipped.size and skipped.all() else 0
        )
        if not skipped.any():
            return
        found = f"step {step}: {_describe_update(updates, prefix)}; that optimizer step is skipped on all ranks"
        if self.policy != "skip":
            raise NonFiniteError(f"{found}, and trainer.nonfinite={self.policy}. Check {HINTS[prefix]}")
        if self._skipped_in_a_row[prefix] >= MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{found}, as in each of the {MAX_SKIPPED_STEPS} steps before: nothing is learnt. Check {HINTS[prefix]}"
            )
        logger.warning("%s; training continues (trainer.nonfinite=skip)", found)


def _describe_update(updates: Mapping[str, Sequence[float]], prefix: str) -> str:
    """Return whose loss or gradient is not finite, and in which share of the update's optimizer steps."""
    skipped, by_loss = (_values(updates, f"{prefix}/{name}") for name in ("skipped", "nonfinite_loss"))
    norms = _values(updates, f"{prefix}/grad_norm")[skipped > 0]
    what = "loss" if by_loss.any() else "gradient"
    whose = {"train": "the model"}.get(prefix, f"the {prefix}")
    return f"{whose}'s {what} is not finite (grad_norm {norms[0]:g}) in {skipped.mean():.0%} of its optimizer steps"


def _values(updates: Mapping[str, Sequence[float]], name: str) -> np.ndarray:
    return np.asarray(updates.get(name, ()), dtype=np.float64).ravel()


def train_with_rollbacks(
    train: Callable[[], None], *, policy: str, newest: Callable[[], str | None], roll_back: Callable[[str], None]
) -> None:
    """Run `train`; with policy rollback, load the newest checkpoint after a NonFiniteError and run it again.

    Args:
        train: Trains from the current step to the last one.
        policy: `trainer.nonfinite`.
        newest: Returns the path of the checkpoint to roll back to, None if there is none.
        roll_back: Loads the checkpoint at a path.
    """
    last, times = None, 0
    while True:
        try:
            return train()
        except NonFiniteError as error:
            path = newest()
            times = times + 1 if path == last else 1
            if policy != "rollback":
                raise
            if path is None:
                error.add_note(
                    "there is no checkpoint to roll back to yet; trainer.save_freq=N commits one every N steps"
                )
                raise
            if times > MAX_ROLLBACKS:
                error.add_note(f"it happened again after each of {MAX_ROLLBACKS} rollbacks to {path}")
                raise
            last = path
            logger.warning("%s; rollback %d of %d to %s", error, times, MAX_ROLLBACKS, path)
            roll_back(path)
