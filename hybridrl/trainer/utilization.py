"""Model FLOPs utilization (MFU) of the stages of a step: `perf/mfu/*`, beside the seconds of `timing_s/*`.

    MFU = FLOPs that the rows of a stage need / (seconds of the stage * FLOPs per second of the devices of its role)

What rows need is in `workers/engine/utilization/model_flops.py`, what devices do in `matmul_peak.py` beside it. The
seconds are those of the driver, so they include dispatch, transfer of rows, and waiting for the slowest rank. Every
trainer makes a `Utilization` when its workers are ready, and asks it when a step ends. Runs in the driver.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from hybridrl.trainer.run.metrics import MFU_NAMES
from hybridrl.workers.engine.utilization.model_flops import FORWARD, ModelFlops, Passes


@dataclass(frozen=True)
class ModelUse:
    """What a stage computes with a model.

    Attributes:
        role: Whose processes compute.
        model: None if the FLOPs of the model are unknown.
        dtype: Setting of the computation, "auto" for one.
        passes: Forward pass or update.
        times: How often each row is computed.
    """

    role: str
    model: ModelFlops | None
    dtype: str
    passes: Passes = FORWARD
    times: int = 1


class SequenceRows(NamedTuple):
    """Tokens (B,) of the rows that a stage computes, and of how many of these tokens the model's output is read."""

    lengths_B: torch.Tensor
    num_outputs: int

    @classmethod
    def of(cls, columns: Any, which: Any = slice(None)) -> Self:
        """Return those of some rows of a batch with `attention_mask` and `response_mask`."""
        lengths = columns["attention_mask"][which].sum(-1)
        return cls(lengths, int(columns["response_mask"][which].sum()))


class Utilization:
    """Returns MFU by stage, for stages whose model and devices are known.

    Args:
        uses: Stage -> what it computes.
        peaks: (role, dtype) -> FLOPs per second of the device of each rank.
    """

    def __init__(self, uses: Mapping[str, ModelUse], peaks: Mapping[tuple[str, str], Sequence[float]]):
        self._uses, self._peaks = uses, {kind: sum(ranks) for kind, ranks in peaks.items()}

    @classmethod
    def measure(cls, uses: Mapping[str, ModelUse], groups: Mapping[str, Any]) -> Self:
        """Ask the roles' ranks for their peaks, all ranks of a role at the same time. They measure once per process."""
        asked = dict.fromkeys((use.role, use.dtype) for use in uses.values() if use.model is not None)
        can = {role for role, group in groups.items() if "matmul_peak" in group.invocations}
        return cls(uses, {(role, dtype): groups[role].matmul_peak(dtype) for role, dtype in asked if role in can})

    def metrics(self, timing: Mapping[str, float], rows: Mapping[str, SequenceRows]) -> dict[str, float]:
        """Return `perf/mfu/{name}` of the stages of a step, 1 for all that the devices can do.

        Args:
            timing: Stage -> seconds.
            rows: Stage -> rows that it computed. A stage that is missing computed none.
        """
        found = {}
        for stage in self._uses.keys() & timing.keys() & rows.keys():
            use = self._uses[stage]
            peak = self._peaks.get((use.role, use.dtype))
            if use.model is not None and peak:
                flops = use.times * use.model.of_rows(*rows[stage], use.passes)
                found[f"perf/mfu/{MFU_NAMES[stage]}"] = flops / (timing[stage] * peak)
        return found
