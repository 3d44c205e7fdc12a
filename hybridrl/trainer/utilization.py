"""Model FLOPs utilization (MFU) of the stages of a step: `perf/mfu/*`, beside the seconds of `timing_s/*`.

    MFU = FLOPs that a stage has done / (seconds of the stage * FLOPs per second of the devices of its role)

The FLOPs are in `workers/engine/utilization/model_flops.py`, what devices do in `matmul_peak.py` beside it. The
seconds are those of the driver, so they include dispatch, transfer of rows, and waiting for the slowest rank. Every
trainer makes a `Utilization` when its workers are ready, and asks it when a step ends. Runs in the driver.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from hybridrl.trainer.run.metrics import MFU_NAMES
from hybridrl.workers.engine.base import COMPUTED_PAIRS, COMPUTED_TOKENS
from hybridrl.workers.engine.utilization.model_flops import FORWARD, ModelFlops, Passes

COMPUTED = (COMPUTED_TOKENS, COMPUTED_PAIRS)
"""Metrics of a call of engines that share prefixes: a value per rank."""


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

    def flops(self, rows: "SequenceRows") -> float:
        """Return the FLOPs of a stage that computed these rows."""
        assert self.model is not None, "the caller has asked"
        if rows.computed is None:
            return self.times * self.model.of_rows(rows.lengths_B, rows.num_outputs, self.passes)
        return self.model.of_tokens(*rows.computed, self.times * rows.num_outputs, self.passes)


class SequenceRows(NamedTuple):
    """The rows that a stage computes.

    Attributes:
        lengths_B: Tokens of each row.
        num_outputs: Of how many of these tokens the model's output is read.
        computed: Tokens that were computed, and pairs of a token and one that it sees, in all passes of the stage. None
            if every row was computed alone.
    """

    lengths_B: torch.Tensor
    num_outputs: int
    computed: tuple[float, float] | None = None

    @classmethod
    def of(cls, columns: Any, which: Any = slice(None)) -> Self:
        """Return those of some rows of a batch with `attention_mask` and `response_mask`."""
        lengths = columns["attention_mask"][which].sum(-1)
        return cls(lengths, int(columns["response_mask"][which].sum()))

    @classmethod
    def generated(cls, batch: Any) -> Self:
        """Return those of generation: each prompt is computed once for all its samples, a last token never."""
        mask, responses = batch.batch["attention_mask"].double(), batch.batch["response_mask"]
        first = np.unique(batch.non_tensor_batch["uid"], return_index=True)[1]
        prompts, lengths = mask[:, : -responses.shape[-1]].sum(-1), mask.sum(-1)
        ends = torch.maximum(lengths - 1, prompts)
        shared, own = prompts[first], ends - prompts
        pairs = (shared * (shared + 1) / 2).sum() + (ends * (ends + 1) / 2 - prompts * (prompts + 1) / 2).sum()
        return cls(lengths, int(responses.sum()), (float(shared.sum() + own.sum()), float(pairs)))

    def with_computed(self, metrics: Mapping[str, Any]) -> Self:
        """Return these rows with what the engines of all ranks computed, if a call's metrics have it."""
        if not {*COMPUTED} <= metrics.keys():
            return self
        tokens, pairs = (float(np.sum(metrics[name])) for name in COMPUTED)
        return self._replace(computed=(tokens, pairs))


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
                found[f"perf/mfu/{MFU_NAMES[stage]}"] = use.flops(rows[stage]) / (timing[stage] * peak)
        return found
