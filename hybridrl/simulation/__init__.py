"""The controller on a virtual clock: `hybridrl simulate`, see docs/simulation.md. Nothing is generated or trained.

The trainer, its stages, the rollout pipeline, weight pushes, dispatch and the ledger are those of a run. Workers are
stand-ins (`worker.py`) that return batches at once and say how long a device would take (`costs.py`). A group of them
(`group.py`) advances the clock.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
