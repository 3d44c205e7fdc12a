"""The controller on a virtual clock (`python -m benchmarks.simulation`, docs/simulation.md). Trains nothing.

The trainer, its stages, the rollout pipeline, weight pushes, dispatch and the ledger are those of a run. Workers are
stand-ins (`worker.py`) that return batches at once and say how long a device would take (`costs.py`). A group of them
(`group.py`) advances the clock.
"""

from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.run import Simulation, SimulationResult, simulate
from hybridrl.planning.costs import DEVICES, MODELS, Costs, Device, Model

__all__ = [
    "DEVICES",
    "MODELS",
    "Costs",
    "Device",
    "Lengths",
    "Model",
    "Simulation",
    "SimulationResult",
    "simulate",
]
