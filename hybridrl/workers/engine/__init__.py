"""Training engines: what one is (`base`), the FSDP2 one (`fsdp`) and the Megatron-core one (`megatron`), imported by
whoever chooses it.
"""

from hybridrl.workers.engine.base import Engine, EngineConfig, LossFn, MicroBatching, Place

__all__ = ["Engine", "EngineConfig", "LossFn", "MicroBatching", "Place"]
