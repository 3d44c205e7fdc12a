"""Rewards of a batch: managers that call reward functions in killable processes.

The functions themselves are in `reward_score`.
"""

from hybridrl.config.plugs import REWARD_MANAGERS
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.load import load_reward_manager
from hybridrl.rewards.manager import (
    BatchRewardManager,
    DAPORewardManager,
    RewardManager,
    RewardOutput,
    Scorer,
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
    "Scorer",
    "ScoreProcessPool",
    "load_reward_manager",
]
