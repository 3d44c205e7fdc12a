"""hybridrl: reinforcement-learning post-training of language models.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for. Importing the package costs nothing
beyond Python.
"""

import os

import lazy_loader

# Before torch is loaded, and inherited by worker processes: idle OpenMP threads spin for about 0.1 ms and then sleep.
# Without the spin, each small operation waits for a thread to wake up. Threads that spin for longer take the cores from
# the threads that they wait for, as soon as the machine has other work.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # libgomp's, and stronger than its wait policy

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
