"""Groups of rows that are computed together: parts of equal work, micro-batches, trees of rows that begin alike.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for: only some runs share prefixes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
