"""`RewardModelWorker`: scores whole sequences with a Hugging Face sequence classifier with one output.

It runs in a worker process. The trainer's stage `reward` calls it.
"""

import torch

from hybridrl.config.engines import reward_model_engine_settings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.workers.engine_worker import EngineWorker, engine_setup, make_engine, micro_batching, required_path
from hybridrl.workers.mini_batch import ENGINE_COMPUTE


class RewardModelWorker(EngineWorker):
    """One process of the reward model.

    The model must be an `AutoModelForSequenceClassification` that reads the policy's tokens. For another kind, map
    `Role.RewardModel` to a worker of your own with a `compute_rm_score`.

    Args:
        config: Settings of the whole job.
        role: Name of the role.
    """

    def __init__(self, config: PPOConfig, role: str = "rm"):
        self.config, self.role = config, role

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_optimizer_steps: int = 0) -> None:
        """Load the reward model onto the device. It is not trained."""
        self._start_process()
        policy, path = self.config.actor_rollout_ref.model, self.config.reward_model.model.path
        check_same_tokens(required_path(policy.path), required_path(path), trust_remote_code=policy.trust_remote_code)
        settings = reward_model_engine_settings(self.config)
        setup = engine_setup(self.config, kind="score", path=path, settings=settings, device=self.device)
        self.model = self._set_up(make_engine(self.config.actor_rollout_ref.actor.strategy, setup))

    @register(ENGINE_COMPUTE)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return `rm_scores` (B, R) float32: the sequence's score at its last response token, zero elsewhere."""
        settings = self.config.reward_model
        micro = micro_batching(False, settings.forward_max_token_len_per_gpu, settings.micro_batch_size_per_gpu)
        scores_B = self.model.forward(data, micro, outputs=("scores",))["scores"]
        mask_BT = data.batch["response_mask"]
        last_B = (mask_BT * torch.arange(mask_BT.size(-1))).argmax(-1, keepdim=True)
        rm_scores = torch.zeros(mask_BT.shape, dtype=torch.float32).scatter_(-1, last_B, scores_B.unsqueeze(-1))
        return DataProto.from_dict(tensors={"rm_scores": rm_scores})


def check_same_tokens(policy_path: str, reward_path: str, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError unless both models read the same token ids."""
    from transformers import AutoTokenizer

    ours, theirs = (
        AutoTokenizer.from_pretrained(p, trust_remote_code=trust_remote_code).get_vocab()
        for p in (policy_path, reward_path)
    )
    if ours != theirs:
        raise ConfigError(
            f"reward_model.model.path={reward_path} has another vocabulary than the policy {policy_path}; use a reward "
            "model with the same tokenizer, or a reward function that calls it on text"
        )
