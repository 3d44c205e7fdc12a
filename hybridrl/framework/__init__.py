"""The training loop: named stages over a context, in one process or several.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for. The room imports no
reinforcement-learning code and no torch.
"""

import lazy_loader

from hybridrl.framework.stage import stage as stage  # here, because its module has the same name

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
