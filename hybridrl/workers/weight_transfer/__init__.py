"""Transport of weights from the trainer to rollouts in other processes: one interface (`base`), four transports.

    stored     object_store   Ray's object store; training continues, and receivers fetch later
               disk           safetensors in a directory that all machines can access; other programs can read them, too
    streaming  shared_memory  one machine; bytes are written once and read in place, and on a GPU they never leave it
               broadcast      any number of machines; a collective on a process group of its own (NCCL or gloo)

`ActorRolloutRefWorker` uses `make_sender` and `Receivers`. The setting
`actor_rollout_ref.rollout.weight_sync.transport` chooses the transport, also a `Transport` of your own by its import
path. `benchmarks/weight_sync.py` measures the cost of each. Inside one process there is no transport: the rollout
iterates over the engine's weights.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
