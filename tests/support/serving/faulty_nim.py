"""Nim where a share of the episodes goes wrong: the process dies, hangs, or answers nonsense.

`benchmarks/environment_faults.py` trains with it. Faults do not depend on the row, so another try may end well.
"""

import os
import signal
import time
from random import SystemRandom
from typing import Any

from examples.two_agent_game.nim import Nim
from hybridrl.serving.environments import Answer

FAULTS = ("dies", "hangs", "nonsense")


class FaultyNim(Nim):
    """Nim with a fault in the first move of a `rate` of the episodes."""

    def __init__(self, rate: float = 0.2, skill: float = 1.0):
        super().__init__(skill=skill)
        self.rate, self.numbers = rate, SystemRandom()

    def reset(self, row: dict[str, Any]) -> str:
        self.fault = self.numbers.choice(FAULTS) if self.numbers.random() < self.rate else None
        return super().reset(row)

    def step(self, action: str) -> Answer:
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            time.sleep(3600)
        if self.fault == "nonsense":
            return Answer("more", float("nan"), False)
        return super().step(action)
