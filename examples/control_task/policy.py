"""The policy and its critic: one small network with two heads."""

import torch

OBSERVATION_SIZE, NUM_ACTIONS, HIDDEN_SIZE = 4, 2, 64  # of CartPole


class ActorCritic(torch.nn.Module):
    """Maps observations (..., 4) to logits of the actions (..., 2) and values (...)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(OBSERVATION_SIZE, HIDDEN_SIZE), torch.nn.Tanh())
        self.policy = torch.nn.Linear(HIDDEN_SIZE, NUM_ACTIONS)
        self.value = torch.nn.Linear(HIDDEN_SIZE, 1)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(observations)
        return self.policy(hidden), self.value(hidden).squeeze(-1)
