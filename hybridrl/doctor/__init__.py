"""`hybridrl doctor`: what is wrong with this machine, or with a run, and which setting to change.

Loads neither torch nor Ray, and reads a run's files only. docs/monitoring.md has the sources of the thresholds.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
