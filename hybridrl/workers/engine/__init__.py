"""Training engines: the interface (`base`), the FSDP2 engine (`fsdp`) and the Megatron-core engine (`megatron`).

A worker imports the engine that its settings name. This package imports neither of them.
"""

from hybridrl.workers.engine.base import Engine, EngineSetup, LossFn, MeshPosition, MicroBatching, StateTensors

__all__ = ["Engine", "EngineSetup", "LossFn", "MicroBatching", "MeshPosition", "StateTensors"]
