"""Training engines: the interface (`base`), the FSDP2 engine (`fsdp`) and the Megatron-core engine (`megatron`).

A worker imports the engine that its settings name.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
