"""Rewards of a batch: managers that call reward functions in killable processes.

The functions themselves are in `reward_score`.
"""

from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.load import load_reward_manager
from hybridrl.rewards.manager import (
    REWARD_MANAGERS,
    BatchRewardManager,
    DAPORewardManager,
    RewardManager,
    RewardOutput,
)
from hybridrl.rewards.process import CallResult
from hybridrl.rewards.process_pool import ScoreProcessPool

__all__ = [
    "REWARD_MANAGERS",
    "BatchRewardManager",
    "CallResult",
    "DAPORewardManager",
    "RewardManager",
    "RewardOutput",
    "FunctionAddress",
    "ScoreProcessPool",
    "load_reward_manager",
]
