"""Split and join batches of either kind: `DataProto`, or a TensorDict with one batch dimension.

Dispatch uses these functions in the driver, and workers when they answer. This module loads neither torch nor
tensordict: a process that has not loaded them has no batch.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hybridrl import data_plane


@dataclass(frozen=True, eq=False)
class SplitBatch(Sequence[Any]):
    """A `DataProto` to be split over workers, as a sequence of their parts. Reading an entry cuts it.

    Attributes:
        batch: All rows.
        bounds: [start, stop) of each part in `order`.
        order: Row numbers, (B,) int64; None for the order of the batch.
        part_of: Part of each worker; workers may share one. Default: a worker per part.
    """

    batch: Any
    bounds: Sequence[tuple[int, int]]
    order: Any = None
    part_of: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "part_of", self.part_of or range(len(self.bounds)))

    def __len__(self) -> int:
        return len(self.part_of)

    def __getitem__(self, worker: Any) -> Any:
        if isinstance(worker, slice):
            return [self[i] for i in range(*worker.indices(len(self)))]
        return self._rows([self.bounds[self.part_of[worker]]])

    def parts(self) -> list[Any]:
        """Return all parts, cut at once: views of the batch, or of one copy in `order`."""
        return self._rows(self.bounds).split_at(self.bounds)

    def shared_by(self, part_of: Sequence[int]) -> "SplitBatch":
        """Return the same parts for other workers, of which worker i gets part `part_of[i]`."""
        return SplitBatch(self.batch, self.bounds, self.order, part_of)

    def of(self, workers: Sequence[int]) -> "SplitBatch":
        """Return the entries of some workers, with their rows only."""
        parts = sorted({self.part_of[worker] for worker in workers})
        runs = [self.bounds[part] for part in parts]
        ends = [0, *accumulate(stop - start for start, stop in runs)]
        place = {part: i for i, part in enumerate(parts)}
        return SplitBatch(
            self._rows(runs), list(pairwise(ends)), part_of=[place[self.part_of[worker]] for worker in workers]
        )

    def _rows(self, runs: Sequence[tuple[int, int]]) -> Any:
        """Return the rows of some parts, one after the other."""
        start, stop = runs[0][0], runs[-1][1]
        if self.order is None and all(end == begin for (_, end), (begin, _) in pairwise(runs)):
            return self.batch[start:stop]
        rows = [row for run in runs for row in range(*run)]
        return self.batch.select_idxs(rows if self.order is None else self.order[rows])


@dataclass(frozen=True, eq=False)
class JoinedBatches:
    """`DataProto`s of several workers as one, which can be separated again into the same ones.

    A relay joins the outputs of its ranks, so that the driver receives and concatenates one batch per node.

    Attributes:
        batch: Rows of all, without meta_info.
        sizes: Rows of each.
        meta_infos: Of each; of all together if they are equal and hold no metrics.
    """

    batch: Any
    sizes: Sequence[int]
    meta_infos: list[dict[str, Any]]

    @classmethod
    def of(cls, batches: Sequence[Any]) -> "JoinedBatches | None":
        """Return the batches as one; None unless they are `DataProto`s of one class with columns of one kind."""
        if not batches or not all(map(is_data_proto, batches)) or not _are_alike(batches):
            return None
        metas = [batch.meta_info for batch in batches]
        first, merging = metas[0], data_plane.merging
        if merging.METRICS not in first and all(data_plane.columns.deep_equal(meta, first) for meta in metas):
            metas = [first]
        joined = concat_batches([batch.select(meta_info_keys=[]) for batch in batches])
        return cls(joined, [len(batch) for batch in batches], metas)

    def separate(self) -> list[Any]:
        """Return the batches; their columns are views."""
        ends = [0, *accumulate(self.sizes)]
        batches = self.batch.split_at(list(pairwise(ends)))
        metas = self.meta_infos if len(self.meta_infos) > 1 else self.meta_infos * len(batches)
        for batch, meta_info in zip(batches, metas, strict=True):
            batch.meta_info = dict(meta_info)
        return batches


def concat_joined(joined: Sequence[JoinedBatches]) -> Any:
    """Return the rows of all batches, as `concat_batches` of the separated ones does; None if columns differ in kind.

    Raises:
        DataError: as `concat_batches`, for meta information.
    """
    if not _are_alike([each.batch for each in joined]):
        return None
    meta_info = data_plane.merging.merge_meta_info(meta for each in joined for meta in each.meta_infos)
    batch = concat_batches([each.batch for each in joined])
    batch.meta_info = meta_info
    return batch


def _are_alike(batches: Sequence[Any]) -> bool:
    """Return whether concatenating these `DataProto`s changes no column's kind, and they are of one class."""
    first = batches[0]
    kinds = first.column_kinds()
    return kinds is not None and all(type(b) is type(first) and b.column_kinds() == kinds for b in batches)


def is_batch(value: Any) -> bool:
    """Return whether the value is a `DataProto` or a TensorDict with one batch dimension."""
    return is_data_proto(value) or (_is_tensordict(value) and len(value.batch_size) == 1)


def is_data_proto(value: Any) -> bool:
    """Return whether the value is a `DataProto`."""
    return _is_instance(value, "hybridrl.data_plane.sharing", "CopyOnWrite")


def chunk_rows(batch: Any, parts: int) -> list:
    """Return `parts` batches of consecutive rows whose sizes differ by at most one.

    A batch may be empty and keeps the columns.
    """
    _check(batch)
    if not _is_tensordict(batch):
        return batch.chunk_uneven(parts)
    return data_plane.tensordict_utils.chunk_tensordict(batch, parts)


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return the rows of all batches, copied, in the class of the first.

    See `DataProto.concat`, also for the meta information.

    Raises:
        TypeError: No batch, not a batch, or batches of both kinds.
    """
    if not batches:
        raise TypeError("concatenation needs one or more batches, got none")
    for batch in batches:
        _check(batch)
    if not _is_tensordict(batches[0]):
        return type(batches[0]).concat(batches)
    if not all(map(_is_tensordict, batches)):
        raise TypeError(f"concatenation needs batches of one kind, got {[type(batch).__name__ for batch in batches]}")
    meta = data_plane.merging.merge_meta_info(data_plane.tensordict_utils.meta_of(batch) for batch in batches)
    return data_plane.tensordict_utils.concat_with_meta(batches, meta)


def size_in_bytes(batch: Any) -> int:
    """Return the size of the tensor columns."""
    return batch.bytes() if _is_tensordict(batch) else batch.nbytes


def _check(batch: Any) -> None:
    if not is_batch(batch):
        shape = f" of batch_size {tuple(batch.batch_size)}" if _is_tensordict(batch) else ""
        raise TypeError(
            f"a batch is a DataProto or a TensorDict with one batch dimension, got {type(batch).__name__}{shape}"
        )


def _is_tensordict(value: Any) -> bool:
    return _is_instance(value, "tensordict", "TensorDict")


def _is_instance(value: Any, module: str, class_name: str) -> bool:
    # Without the module there is no instance; while another thread loads it, the class may be absent.
    return isinstance(value, getattr(sys.modules.get(module), class_name, ()))
