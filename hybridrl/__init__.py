"""hybridrl: reinforcement-learning post-training of language models.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for. Importing the package costs nothing
beyond Python.
"""

import os

import lazy_loader

# Before torch is loaded, and inherited by worker processes: idle OpenMP threads sleep. Threads that spin take the cores
# from the threads that they wait for, as soon as the machine has other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
