"""Memory of a training engine, predicted from the model's shape and the settings; and settings that fit a budget.

Pure arithmetic: no process, no device, no torch. Sizes are bytes of one process, without Python, libraries and the
allocator's fragments. docs/figures.md has what was measured: FSDP2 and Megatron on one process. Terms of several
processes, mixtures of experts and offload follow from how the engines work, and were not measured.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
