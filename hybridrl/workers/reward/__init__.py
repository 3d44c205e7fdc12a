"""Rewards of a batch: managers that call reward functions in killable processes. The functions themselves are in `reward_score`."""

from hybridrl.workers.reward.load import load_reward_manager
from hybridrl.workers.reward.manager import (
    REWARD_MANAGERS,
    BatchRewardManager,
    DAPORewardManager,
    RewardManager,
    RewardOutput,
)
from hybridrl.workers.reward.processes import ScoreProcesses
from hybridrl.workers.reward.score_function import ScoreFunction
from hybridrl.workers.reward.score_process import CallResult

__all__ = [
    "REWARD_MANAGERS",
    "BatchRewardManager",
    "CallResult",
    "DAPORewardManager",
    "RewardManager",
    "RewardOutput",
    "ScoreFunction",
    "ScoreProcesses",
    "load_reward_manager",
]
