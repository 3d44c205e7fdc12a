"""Rollouts: engines that generate with a copy of the policy, inside a worker process.

`make_rollout("hf" | "vllm", RolloutSetup(...))` starts one.
"""

from hybridrl.workers.rollout.base import (
    Rollout,
    RolloutHealth,
    RolloutSetup,
    SamplingParams,
    make_rollout,
    register_rollout,
)
from hybridrl.workers.rollout.hf import HFRollout
from hybridrl.workers.rollout.vllm.rollout import VLLMRollout
from hybridrl.workers.weight_transfer.fingerprint import fingerprint

__all__ = [
    "HFRollout",
    "Rollout",
    "RolloutHealth",
    "RolloutSetup",
    "SamplingParams",
    "VLLMRollout",
    "fingerprint",
    "make_rollout",
    "register_rollout",
]
