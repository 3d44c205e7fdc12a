"""The SDK: DLRover's two styles of writing the trainer and the roles of a submitted job.

First generation: `BaseTrainer`, `BaseWorkload`, `trainer_invocation`. Unified style: `rpc`, `RoleGroup`,
`current_worker`. Both call a `WorkerGroup`; nothing here starts a process or sends a message by itself.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
