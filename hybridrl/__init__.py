"""hybridrl: reinforcement-learning post-training of language models.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for. Importing the package costs nothing
beyond Python.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
