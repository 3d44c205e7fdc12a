"""Encoded images to what a model reads.

Datasets in the driver and requests of agents use it. Where the images come from is not its concern.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
