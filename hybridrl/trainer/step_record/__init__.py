"""Steps that a run keeps, and their repetition in one process: `recorder.py` keeps, `replay.py` repeats.

The names in `__init__.pyi` are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
