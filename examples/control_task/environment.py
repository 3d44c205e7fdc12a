"""Role environment: processes that play episodes of CartPole with the weights that a call brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import gymnasium
import torch

from examples.control_task.policy import ActorCritic
from hybridrl.sdk import rpc


@dataclass(frozen=True)
class Episode:
    """One episode of T steps: observations (T, 4) float, actions (T,) int64. Every step has reward 1.

    is_cut: The episode reached the environment's limit of steps. last_observation (4,): what follows the last step.
    """

    observations: torch.Tensor
    actions: torch.Tensor
    is_cut: bool
    last_observation: torch.Tensor

    def __len__(self) -> int:
        return len(self.actions)


class EnvironmentWorker:
    """One process with one environment."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.environment = gymnasium.make("CartPole-v1")
        self.policy = ActorCritic()

    # The same seeds and weights give the same episodes: a call whose process was lost may be repeated.
    @rpc(idempotent=True)
    def play(self, seeds: Sequence[int], weights: Mapping[str, torch.Tensor]) -> list[Episode]:
        """Return one episode per seed."""
        self.policy.load_state_dict(weights)
        return [self._episode(seed) for seed in seeds]

    @torch.no_grad()
    def _episode(self, seed: int) -> Episode:
        random = torch.Generator().manual_seed(seed)
        observation, _ = self.environment.reset(seed=seed)
        observations, actions, is_over, is_cut = [], [], False, False
        while not (is_over or is_cut):
            observations.append(torch.from_numpy(observation))
            logits, _ = self.policy(observations[-1])
            actions.append(int(torch.multinomial(logits.softmax(-1), 1, generator=random)))
            observation, _, is_over, is_cut, _ = self.environment.step(actions[-1])
        return Episode(
            torch.stack(observations), torch.tensor(actions), is_cut and not is_over, torch.from_numpy(observation)
        )
