"""What a run does with an update whose loss or gradient is not finite (`trainer.nonfinite`).

Workers leave such an optimizer step out under every policy: it touches neither parameters nor optimizer nor schedule,
on any rank. So
no checkpoint ever holds anything of it. The policy says what the driver does then:

    skip      goes on; after MAX_SPOILT_STEPS steps in a row without one whole update it ends the run, which learns
    nothing
    rollback  goes back to the newest commit and trains on from there; after MAX_ROLLBACKS times to the same one it ends
    the run
    stop      ends the run
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hybridrl.errors import NonFiniteError

logger = logging.getLogger(__name__)
MAX_SPOILT_STEPS = 10
MAX_ROLLBACKS = (
    3  # a run is deterministic: what comes a second time from the same state is no accident of the machine's
)
LOOK_AT = {
    "actor": "critic/advantages/*, actor/ppo_kl and actor/grad_norm of the steps before (metrics.jsonl), then lower "
    "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip",
    "critic": "critic/returns/* and critic/grad_norm of the steps before (metrics.jsonl), then lower "
    "critic.optim.lr or critic.grad_clip",
    "train": "train/loss and train/grad_norm of the steps before (metrics.jsonl), then lower optim.lr or grad_clip",
}


class UpdateWatch:
    """Looks at what every update reports. policy: `trainer.nonfinite`."""

    def __init__(self, policy: str):
        self.policy = policy
        self._spoilt: dict[str, int] = {}  # steps in a row without a whole update, by whose

    def look_at(self, updates: Mapping[str, Sequence[float]], *, prefix: str, step: int) -> None:
        """Raise NonFiniteError where the policy does not go on from this update.

        updates: metric -> one value per optimizer step, under `{prefix}/`, as `EngineWorker` reports them. step: of
        training.
        """
        skipped = _values(updates, f"{prefix}/skipped")
        self._spoilt[prefix] = self._spoilt.get(prefix, 0) + 1 if skipped.size and skipped.all() else 0
        if not skipped.any():
            return
        found = f"step {step}: {_what(updates, prefix)}; that optimizer step is not applied on any rank"
        if self.policy != "skip":
            raise NonFiniteError(f"{found}, and trainer.nonfinite={self.policy}. Look at {LOOK_AT[prefix]}")
        if self._spoilt[prefix] >= MAX_SPOILT_STEPS:
            raise NonFiniteError(
                f"{found}, as in each of the {MAX_SPOILT_STEPS} steps before: nothing is learnt. Look at "
                f"{LOOK_AT[prefix]}"
            )
        logger.warning("%s; trainer.nonfinite=skip goes on", found)


def _what(updates: Mapping[str, Sequence[float]], prefix: str) -> str:
    """Say whose loss or gradient it was, and in how many of the update's optimizer steps."""
    skipped, by_loss = (_values(updates, f"{prefix}/{name}") for name in ("skipped", "nonfinite_loss"))
    norms = _values(updates, f"{prefix}/grad_norm")[skipped > 0]
    what = "loss" if by_loss.any() else "gradient"
    whose = {"train": "the model"}.get(prefix, f"the {prefix}")
    return f"{whose}'s {what} is not finite (grad_norm {norms[0]:g}) in {skipped.mean():.0%} of its optimizer steps"


def _values(updates: Mapping[str, Sequence[float]], name: str) -> np.ndarray:
    return np.asarray(updates.get(name, ()), dtype=np.float64).ravel()


def train_with_rollbacks(
    train: Callable[[], None], *, policy: str, newest: Callable[[], str | None], go_back: Callable[[str], None]
) -> None:
    """Run `train`; with the policy rollback, after a NonFiniteError `go_back` to the newest commit and run it again.

    newest: the path of the commit to go back to, None if there is none.
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
                error.add_note("there is no commit to go back to yet; trainer.save_freq=N commits every N steps")
                raise
            if times > MAX_ROLLBACKS:
                error.add_note(f"it came again after each of {MAX_ROLLBACKS} rollbacks to {path}")
                raise
            last = path
            logger.warning("%s; rollback %d of %d to %s", error, times, MAX_ROLLBACKS, path)
            go_back(path)
