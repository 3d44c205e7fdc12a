"""The context of a step whose batch is a `DataProto`: stages that run side by side each work on a shallow copy of it."""

from dataclasses import dataclass
from typing import Any

from hybridrl.framework import OnlineRLContext
from hybridrl.framework.context import set_changed
from hybridrl.protocol import DataProto


@dataclass(repr=False, eq=False)
class BatchContext(OnlineRLContext):
    """`OnlineRLContext` for stages that run beside others. Columns are added or replaced, never changed in place."""

    def copied(self, value: Any) -> Any:
        if not isinstance(value, DataProto):
            return super().copied(value)
        batch = None if value.batch is None else value.batch.clone(recurse=False)
        return DataProto(batch, dict(value.non_tensor_batch), dict(value.meta_info))

    def take_changes(self, mine: Any, before: Any, theirs: Any) -> bool:
        if not all(isinstance(value, DataProto) for value in (mine, before, theirs)) or len(mine) != len(theirs):
            return super().take_changes(mine, before, theirs)
        if theirs.batch is not None:
            _set_changed_columns(mine, before, theirs)
        set_changed(mine.non_tensor_batch, before.non_tensor_batch, theirs.non_tensor_batch)
        set_changed(mine.meta_info, before.meta_info, theirs.meta_info)
        return True


def _set_changed_columns(mine: DataProto, before: DataProto, theirs: DataProto) -> None:
    if mine.batch is None:
        mine.batch = theirs.batch
        return
    set_changed(mine.batch, {} if before.batch is None else before.batch, theirs.batch)
