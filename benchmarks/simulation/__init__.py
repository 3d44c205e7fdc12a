"""The controller on a virtual clock (`python -m benchmarks.simulation`, docs/simulation.md). Trains nothing.

The trainer, its stages, the rollout pipeline, weight pushes, dispatch and the ledger are those of a run. Workers are
stand-ins (`worker.py`) that return batches at once and say how long a device would take
(`hybridrl/planning/costs.py`). A group of them (`group.py`) advances the clock.
"""

from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.run import Simulation, SimulationResult, simulate
from hybridrl.planning.costs import DEVICES, Costs, Device, Model

MODELS = {
    "qwen2.5-1.5b": Model(1.54e9, 28, 1536, 256),
    "qwen2.5-7b": Model(7.62e9, 28, 3584, 512),
    "qwen2.5-14b": Model(14.8e9, 48, 5120, 1024),
    "qwen2.5-32b": Model(32.8e9, 64, 5120, 1024),
}
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
