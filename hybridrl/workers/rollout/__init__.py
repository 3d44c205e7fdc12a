"""Rollouts: engines that generate with a copy of the policy, inside a worker process.

`make_rollout(name, RolloutSetup(...))` starts one: `hf`, `vllm`, or a class of your own by its import path. A class of
your own derives from `Rollout`; `docs/extending.md` has a complete one.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hybridrl.config.capabilities import RolloutCapabilities
from hybridrl.workers.rollout.base import (
    Rollout,
    RolloutHealth,
    RolloutSetup,
    make_rollout,
    register_rollout,
)
from hybridrl.workers.rollout.batched_request_engine import BatchedRequestEngine
from hybridrl.workers.rollout.hf import HFRollout
from hybridrl.workers.rollout.responses import GeneratedTokens
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from hybridrl.workers.weight_transfer.fingerprint import fingerprint

if TYPE_CHECKING:
    from hybridrl.workers.rollout.vllm.rollout import VLLMRollout

__all__ = [
    "BatchedRequestEngine",
    "GeneratedTokens",
    "HFRollout",
    "Rollout",
    "RolloutCapabilities",
    "RolloutHealth",
    "RolloutSetup",
    "SamplingParams",
    "VLLMRollout",
    "fingerprint",
    "make_rollout",
    "register_rollout",
]


def __getattr__(name: str) -> object:
    if name == "VLLMRollout":  # an optional room, loaded when it is asked for
        return import_module("hybridrl.workers.rollout.vllm.rollout").VLLMRollout
    raise AttributeError(f"module 'hybridrl.workers.rollout' has no attribute {name!r}")
