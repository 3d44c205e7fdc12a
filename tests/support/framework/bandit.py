"""A small training problem with objects like DI-engine's: find the best of three arms. Imports no framework.

The linear model predicts the payoff of each arm from an observation. A collector pulls arms, sometimes at random. A
learner regresses the model on the payoffs. An evaluator counts how often the model chooses the best arm. Collecting and
training have their own generators, so that the weights after n rounds do not depend on evaluation.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch

SIGHT, ARMS = 6, 3
BATCH_SIZE = 16
UPDATES_PER_COLLECT = 2
TARGET = 0.95  # share of the best arms named
MAX_ITERATION = 20_000  # rounds; about 40 are needed
PAYS = torch.randn(ARMS, SIGHT, generator=torch.Generator().manual_seed(1))

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # what was seen [N, SIGHT], arms [N], what they paid [N]


def make_model() -> torch.nn.Linear:
    model = torch.nn.Linear(SIGHT, ARMS, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def get_epsilon_greedy_fn(start: float, end: float, decay: int) -> Callable[[int], float]:
    return lambda envstep: end + (start - end) * math.exp(-envstep / decay)


class Policy:
    def __init__(self, model: torch.nn.Linear) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def get_attribute(self, name: str) -> int:
        return {"batch_size": BATCH_SIZE}[name]


class Learner:
    def __init__(self, policy: Policy, folder: Path) -> None:
        self.policy, self.folder = policy, folder
        self.train_iter = 0

    def train(self, rows: Rows, envstep: int) -> None:
        seen, arms, paid = rows
        guess = self.policy.model(seen).gather(1, arms[:, None])[:, 0]
        self.policy.optimizer.zero_grad()
        ((guess - paid) ** 2).mean().backward()
        self.policy.optimizer.step()
        self.train_iter += 1

    def save_checkpoint(self) -> None:
        torch.save(self.policy.model.state_dict(), self.folder / f"iteration_{self.train_iter}.pt")


class Collector:
    def __init__(self, model: torch.nn.Linear) -> None:
        self.model = model
        self.envstep = 0
        self.generator = torch.Generator().manual_seed(2)

    @torch.no_grad()
    def collect(self, train_iter: int, policy_kwargs: dict) -> Rows:
        seen = torch.randn(BATCH_SIZE, SIGHT, generator=self.generator)
        at_random = torch.rand(BATCH_SIZE, generator=self.generator) < policy_kwargs["eps"]
        arms = torch.randint(ARMS, (BATCH_SIZE,), generator=self.generator).where(at_random, self.model(seen).argmax(1))
        self.envstep += BATCH_SIZE
        return seen, arms, (seen @ PAYS.T).gather(1, arms[:, None])[:, 0]


class ReplayBuffer:
    def __init__(self) -> None:
        self.pushed: list[Rows] = []
        self.generator = torch.Generator().manual_seed(3)

    def push(self, rows: Rows, cur_collector_envstep: int) -> None:
        self.pushed.append(rows)

    def sample(self, batch_size: int, train_iter: int) -> Rows | None:
        seen, arms, paid = map(torch.cat, zip(*self.pushed[-50:], strict=True)) if self.pushed else ([], [], [])
        if len(seen) < batch_size:
            return None
        chosen = torch.randint(len(seen), (batch_size,), generator=self.generator)
        return seen[chosen], arms[chosen], paid[chosen]


class Evaluator:
    """Evaluates at once and then every 10 iterations.

    `evaluations` has an entry (train_iter, envstep, reward) for each evaluation.
    """

    def __init__(self, model: torch.nn.Linear, target: float = TARGET) -> None:
        self.model, self.target = model, target
        self.last_iter: int | None = None
        self.evaluations: list[tuple[int, int, float]] = []

    def should_eval(self, train_iter: int) -> bool:
        return self.last_iter is None or train_iter - self.last_iter >= 10

    @torch.no_grad()
    def eval(self, save_checkpoint: Callable[[], None] | None, train_iter: int, envstep: int) -> tuple[bool, float]:
        self.last_iter = train_iter
        seen = torch.randn(500, SIGHT, generator=torch.Generator().manual_seed(4))
        reward = (self.model(seen).argmax(1) == (seen @ PAYS.T).argmax(1)).float().mean().item()
        self.evaluations.append((train_iter, envstep, reward))
        stop = reward >= self.target
        if stop and save_checkpoint is not None:
            save_checkpoint()
        return stop, reward
