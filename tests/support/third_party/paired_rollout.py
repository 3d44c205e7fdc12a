"""A tensor-parallel rollout without tensor parallelism: each of its processes computes everything, as `hf` does.

Its processes do not communicate while they compute, so that nothing but `EnginePeers` keeps them together. The second
one is slower, and one step has a few tokens, so that their own clocks would end a time slice after different steps.
"""

import os
import time
from dataclasses import replace

from hybridrl.workers.rollout import BatchedRequestEngine, HFRollout, batched_request_engine
from hybridrl.workers.rollout.requests import TokenOutput

PAUSE_S = 0.02


class UnevenEngine(BatchedRequestEngine):
    def step(self) -> list[TokenOutput]:
        batched_request_engine.CHUNK_TOKENS = 4
        time.sleep(PAUSE_S * (1 + int(os.environ["RANK"]) % 2))
        return super().step()


class PairedRollout(HFRollout):
    """Declares that several processes share it."""

    engine_name = "paired"
    capabilities = replace(HFRollout.capabilities, tensor_parallel=True)

    def request_engine(self) -> UnevenEngine:
        return UnevenEngine(self)
