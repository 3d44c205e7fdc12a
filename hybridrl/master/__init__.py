"""The master and submitted jobs: monitoring, failure decisions, job descriptions, placement and restarts.

Knows no algorithm and does not import torch.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
