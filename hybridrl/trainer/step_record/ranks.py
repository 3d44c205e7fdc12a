"""The ranks of a run, one after the other in this process, for `hybridrl replay`.

`RanksInTurn` is a local group that splits a batch as a group of `num_ranks` processes would. It computes the parts in
turn, so every row is in the same micro-batch as in the run. An update sums the gradients of the parts, as the ranks'
collective does. Its sums have the run's bits if every rank has one micro-batch per optimizer step, there are at most
two ranks, and the gradient is not clipped; otherwise the last bits may differ. Runs in the driver, without Ray.
"""

import functools
import pdb
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.references import OutputRefs
from hybridrl.single_controller.worker_group import Arguments

UPDATES = ("update_actor", "update_critic")
RANK = "replayed_rank"
Report = Callable[[str], None]


class RanksInTurn(LocalWorkerGroup):
    """A local group that computes what several ranks did. It is a plain one until `repeat_ranks`."""

    _stop_at: int | None = None
    _role_calls = 0

    def repeat_ranks(self, num_ranks: int, *, report: Report, stop_at: int | None) -> None:
        """Compute the parts of this many ranks from now on.

        Args:
            num_ranks: Data-parallel size of the group in the run.
            report: Called with a line for each part of an update whose loss is not finite.
            stop_at: Rank before whose parts the debugger stops; None for none.
        """
        self.world_size, self._stop_at = num_ranks, stop_at
        engine = getattr(self.worker, "trained_engine", None)
        if engine is not None:
            parts = functools.partial(_each_rank, engine.forward_backward, num_ranks, report, stop_at)
            engine.forward_backward = parts

    def dp_layout(self, mesh_name: str) -> tuple[list[int], list[bool]]:
        return list(range(self.world_size)), [True] * self.world_size

    def start_calls(
        self, method: str, ranks: Sequence[int], arguments: Sequence[Arguments], **options: Any
    ) -> OutputRefs:
        def call(given: Sequence[Arguments]) -> OutputRefs:
            return LocalWorkerGroup.start_calls(self, method, [0], given, **options)

        record = options.get("invocation") or self.invocations.get(method)
        if method in UPDATES:
            return _shared_output(call([_joined(arguments)]), len(ranks))
        if record is None or record.dispatch in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            return _shared_output(call(arguments[:1]), len(ranks))
        outputs, sizes = [], []
        for rank, one in zip(ranks, arguments, strict=True):
            if rank == self._stop_at:
                pdb.set_trace()  # the user asked for it: `s` steps into the call of this rank
            done = call([one])
            outputs += list(done)
            sizes += done.sizes or []
        return OutputRefs(outputs, ranks=list(ranks), fetch=list, sizes=sizes if options.get("with_num_rows") else None)


def _shared_output(done: OutputRefs, number: int) -> OutputRefs:
    """Return one output for all ranks. Rows, if it has any, are those of the first one."""
    first = list(done)[0]
    has_rows = isinstance(first, DataProto) and len(first) > 0
    others = [first[:0] if has_rows else first] * (number - 1)
    sizes = None if done.sizes is None else [*done.sizes, *(len(other) for other in others if has_rows)]
    return OutputRefs([first, *others], ranks=list(range(number)), fetch=list, sizes=sizes)


def _joined(arguments: Sequence[Arguments]) -> Arguments:
    """Return the arguments of an update with the rows of all ranks.

    The column `RANK` says whose a row is.
    """
    shards = []
    for rank, ((shard, *_), _) in enumerate(arguments):
        rows = shard.select()
        rows.batch[RANK] = torch.full((len(shard),), rank, dtype=torch.int64)
        shards.append(rows)
    (_, *others), named = arguments[0]
    return (DataProto.concat(shards), *others), named


def _each_rank(
    forward_backward: Callable[..., list[dict[str, float]]],
    num_ranks: int,
    report: Report,
    stop_at: int | None,
    batch: DataProto,
    *arguments: Any,
    **named: Any,
) -> list[dict[str, float]]:
    """Add the gradients of each rank's rows; return the statistics of all micro-batches."""
    stats: list[dict[str, float]] = []
    for rank in range(num_ranks):
        rows = batch.select_idxs(batch.batch[RANK] == rank)
        rows.batch.pop(RANK)
        if rank == stop_at:
            pdb.set_trace()  # the user asked for it: `s` steps into this rank's part of the update
        own = forward_backward(rows, *arguments, **named)
        for number, one in enumerate(own, 1):
            wrong = [name for name, value in one.items() if name.endswith("loss") and not abs(value) < float("inf")]
            if wrong:
                report(f"rank {rank}, micro-batch {number} of {len(own)}: {wrong[0]} is {one[wrong[0]]:g}")
        stats += own
    return stats
