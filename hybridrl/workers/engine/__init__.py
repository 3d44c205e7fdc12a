"""Training engines: what one is (`base`) and the FSDP2 one (`fsdp`), imported by whoever chooses it."""

from hybridrl.workers.engine.base import Engine, EngineConfig, LossFn, MicroBatching

__all__ = ["Engine", "EngineConfig", "LossFn", "MicroBatching"]
