"""Nim for two players: take one, two or three sticks of a heap; who takes the last one wins.

`NimTable` has no player of its own: each action is the move of the next player (`self_play.py`). `Nim` has a scripted
second player. Both are environments; their processes load this file and nothing else.
"""

import random
from typing import Any

from hybridrl.serving.environments import Answer, TextEnvironment

MOST = 3  # sticks of one move
ILLEGAL = -0.5  # reward of an own move against the rules


def describe(sticks: int) -> str:
    return f"{sticks} sticks"


def best_move(sticks: int) -> int:
    """Return the move that leaves a multiple of four; one stick if there is none."""
    return sticks % (MOST + 1) or 1


def legal_move(text: str, sticks: int) -> int | None:
    word = text.strip()
    return int(word) if word in ("1", "2", "3") and int(word) <= sticks else None


class NimTable(TextEnvironment):
    """A heap. The reward is the first player's: 1 for a won game, 0 for a lost one."""

    def reset(self, row: dict[str, Any]) -> str:
        self.sticks, self.is_first = int(row["kwargs"]["sticks"]), True
        return describe(self.sticks)

    def step(self, action: str) -> Answer:
        move, is_first = legal_move(action, self.sticks), self.is_first
        if move is None:
            return Answer("", ILLEGAL if is_first else 1.0, True)
        self.sticks -= move
        self.is_first = not is_first
        return Answer(describe(self.sticks), float(is_first and self.sticks == 0), self.sticks == 0)


class Nim(NimTable):
    """The second player makes the best move with the probability `skill`, else any."""

    def __init__(self, skill: float = 1.0):
        super().__init__(skill=skill)
        self.skill = skill

    def reset(self, row: dict[str, Any]) -> str:
        self.random = random.Random(row["seed"])
        return super().reset(row)

    def step(self, action: str) -> Answer:
        answer = super().step(action)
        if answer.is_done:
            return answer
        is_best = self.random.random() < self.skill
        return super().step(str(best_move(self.sticks) if is_best else self.random.randint(1, min(MOST, self.sticks))))
