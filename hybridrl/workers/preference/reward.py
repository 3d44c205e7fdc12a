"""`RewardTrainingWorker`: one process of a reward model that learns from pairs. `RMTrainer` calls it."""

from hybridrl.config.schema.preference import RMConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import register
from hybridrl.workers.mini_batch import MINI_BATCH_COMPUTE
from hybridrl.workers.preference.losses import reward_loss
from hybridrl.workers.sft import SupervisedWorker


class RewardTrainingWorker(SupervisedWorker):
    """One process of the trained reward model: a sequence classifier with one output, read at the last token.

    `RewardModelWorker` loads its export as `reward_model.model.path`.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    kind = "score"
    sequences_per_row = 2

    def __init__(self, config: RMConfig, role: str = "rm"):
        super().__init__(config, role)

    @register(MINI_BATCH_COMPUTE)
    def update(self, data: DataProto) -> DataProto:
        """Take one optimizer step on a batch of pairs."""
        return self._train(data, reward_loss, outputs=("scores",))

    @register(MINI_BATCH_COMPUTE)
    def evaluate(self, data: DataProto) -> DataProto:
        """Return the loss and its statistics without training, as `meta_info["metrics"]`."""
        return self._evaluate(data, reward_loss, outputs=("scores",))
