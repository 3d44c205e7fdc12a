"""Handle an update whose loss or gradient is not finite (`trainer.nonfinite`).

Under every policy the workers skip such an optimizer step on all ranks: parameters, optimizer and schedule stay as they
were. So no checkpoint ever contains it. The policy decides what the driver does then:

    skip      continue; after some steps in a row without one applied update the run ends
    rollback  load the newest checkpoint and train on from there; after some rollbacks to the same one the run ends
    stop      end the run

`failure_policy.py` has both limits. The trainers make a guard when the first such update appears; runs in the driver.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from hybridrl.errors import NonFiniteError
from hybridrl.failure_policy import Budgets, Failure, FailureKind, Refill
from hybridrl.single_controller.monitoring.process import report_decision

logger = logging.getLogger(__name__)
HINTS = {
    "actor": "critic/advantages/*, actor/ppo_kl and actor/grad_norm of the steps before (metrics.jsonl), then lower "
    "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip",
    "critic": "critic/returns/* and critic/grad_norm of the steps before (metrics.jsonl), then lower "
    "critic.optim.lr or critic.grad_clip",
    "train": "train/loss and train/grad_norm of the steps before (metrics.jsonl), then lower optim.lr or grad_clip",
}


class NonFiniteGuard:
    """Checks updates against the policy `trainer.nonfinite`, from the first one that is not finite on."""

    def __init__(self, policy: str):
        self.policy = policy
        self._budgets = Budgets()  # steps in a row without an applied update, by metric prefix, and rollbacks
        self._rolled_back_to: str | None = None

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
        has_update = not (skipped.size and skipped.all())
        if has_update:
            self._budgets.reset(FailureKind.UPDATE_SKIPPED, prefix)
        if not skipped.any():
            return
        found = f"step {step}: {_describe_update(updates, prefix)}; that optimizer step is skipped on all ranks"
        if self.policy != "skip":
            raise NonFiniteError(f"{found}, and trainer.nonfinite={self.policy}. Check {HINTS[prefix]}")
        if has_update:
            logger.warning("%s; training continues with the others (trainer.nonfinite=skip)", found)
        else:
            self._skip_step(found, prefix)

    def _skip_step(self, found: str, prefix: str) -> None:
        """Count a step without an applied update. Raises NonFiniteError beyond the limit."""
        target = f"an update of {_owner(prefix)}"
        decision = self._budgets.spend(Failure(FailureKind.UPDATE_SKIPPED, found, subject=prefix, target=target))
        report_decision(decision)
        if not decision.is_granted:
            raise NonFiniteError(
                f"{found}, as in each of the {decision.limit} steps before: nothing is learnt. Check {HINTS[prefix]}"
            )
        logger.warning("%s", decision)

    def check_rollback(self, error: NonFiniteError, path: str | None) -> str:
        """Return the checkpoint to roll back to after an error.

        Args:
            error: Raised again if the policy, or the limit, does not allow a rollback.
            path: The newest checkpoint, None if there is none.
        """
        if self.policy != "rollback":
            raise error
        if path is None:
            error.add_note("there is no checkpoint to roll back to yet; trainer.save_freq=N commits one every N steps")
            raise error
        if path != self._rolled_back_to:
            self._budgets.refill(Refill.OTHER_CHECKPOINT)
        self._rolled_back_to = path
        decision = self._budgets.spend(Failure(FailureKind.UPDATE_REJECTED, str(error), target=path))
        report_decision(decision)
        if not decision.is_granted:
            error.add_note(f"it happened again after each of {decision.limit} rollbacks to {path}")
            raise error
        logger.warning("%s", decision)
        return path


def _describe_update(updates: Mapping[str, Sequence[float]], prefix: str) -> str:
    """Return whose loss or gradient is not finite, and in which share of the update's optimizer steps."""
    skipped, by_loss = (_values(updates, f"{prefix}/{name}") for name in ("skipped", "nonfinite_loss"))
    norms = _values(updates, f"{prefix}/grad_norm")[skipped > 0]
    what = "loss" if by_loss.any() else "gradient"
    share = f"{skipped.mean():.0%} of its optimizer steps"
    return f"{_owner(prefix)}'s {what} is not finite (grad_norm {norms[0]:g}) in {share}"


def _owner(prefix: str) -> str:
    return {"train": "the model"}.get(prefix, f"the {prefix}")


def _values(updates: Mapping[str, Sequence[float]], name: str) -> np.ndarray:
    return np.asarray(updates.get(name, ()), dtype=np.float64).ravel()
