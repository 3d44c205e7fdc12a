"""Role trainer: PPO on the episodes that the role environment plays."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from examples.control_task.environment import EnvironmentWorker, Episode
from examples.control_task.policy import ActorCritic
from hybridrl.algos import agg_loss, get_adv_estimator, get_policy_loss, log_probs_and_entropy
from hybridrl.sdk import RoleGroup

GAMMA, LAMBDA = 0.99, 0.95


class Trainer:
    """Trains one network. Shape letters: B episodes, T steps of the longest one."""

    def __init__(self, config: Mapping[str, Any]):
        torch.set_num_threads(1)
        torch.manual_seed(config["seed"])
        self.config, self.network = config, ActorCritic()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config["learning_rate"])
        self.environments = RoleGroup("environment")

    def run(self) -> None:
        for step in range(1, self.config["num_steps"] + 1):
            episodes = self.play(step)
            self.learn(episodes)
            mean_length = sum(map(len, episodes)) / len(episodes)
            print(f"step {step:3d}  mean return {mean_length:6.1f}", flush=True)

    def play(self, step: int) -> list[Episode]:
        """Return the episodes of a step, which the environment processes share."""
        count = self.config["num_episodes"]
        first_seed = self.config["seed"] * 1_000_003 + step * count
        seeds = list(range(first_seed, first_seed + count))
        return list(self.environments.call_batch(EnvironmentWorker.play, count, seeds, self.network.state_dict()))

    def learn(self, episodes: Sequence[Episode]) -> None:
        """Apply `num_epochs` optimizer steps of PPO (arXiv:1707.06347)."""
        observations_BT4 = pad_sequence([e.observations for e in episodes], batch_first=True)
        actions_BT = pad_sequence([e.actions for e in episodes], batch_first=True)
        mask_BT = pad_sequence([torch.ones(len(e)) for e in episodes], batch_first=True)
        with torch.no_grad():
            old_log_probs_BT, values_BT = self._evaluate(observations_BT4, actions_BT)
            rewards_BT = mask_BT + self._value_behind_the_limit(episodes, mask_BT)
        advantages_BT, returns_BT = get_adv_estimator("gae")(
            rewards_BT, mask_BT, values_BT=values_BT, gamma=GAMMA, lam=LAMBDA
        )
        for _ in range(self.config["num_epochs"]):
            log_probs_BT, values_BT = self._evaluate(observations_BT4, actions_BT)
            loss = get_policy_loss("vanilla")(
                log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, clip_low=0.2, clip_high=0.2, clip_c=3.0
            )
            value_losses_BT = 0.5 * (values_BT - returns_BT) ** 2
            counts: dict[str, Any] = {"num_tokens": mask_BT.sum(), "num_seqs": len(episodes)}
            total = agg_loss(loss.losses_BT, mask_BT, "token-mean", **counts)
            total = total + self.config["value_coef"] * agg_loss(value_losses_BT, mask_BT, "token-mean", **counts)
            self.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), max_norm=0.5)
            self.optimizer.step()

    def _evaluate(self, observations_BT4: torch.Tensor, actions_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs of the actions (B, T) and the values (B, T)."""
        logits_BT2, values_BT = self.network(observations_BT4)
        log_probs_N, _ = log_probs_and_entropy(logits_BT2.flatten(0, 1), actions_BT.flatten())
        return log_probs_N.view(actions_BT.shape), values_BT

    def _value_behind_the_limit(self, episodes: Sequence[Episode], mask_BT: torch.Tensor) -> torch.Tensor:
        """Return what an episode would still earn where the limit of steps cut it, 0 elsewhere (B, T)."""
        _, values_B = self.network(torch.stack([episode.last_observation for episode in episodes]))
        rest_BT = torch.zeros_like(mask_BT)
        for row, episode in enumerate(episodes):
            if episode.is_cut:
                rest_BT[row, len(episode) - 1] = GAMMA * values_B[row]
        return rest_BT
