"""`DataProtoItem`: one row, the result of indexing a batch with an integer."""

from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict


@dataclass
class DataProtoItem:
    """One row: a TensorDict without batch dimension, {column: value}, and the batch's meta_info."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
