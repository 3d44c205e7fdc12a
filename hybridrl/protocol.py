"""verl's import path of the data plane: `from hybridrl.protocol import DataProto`.

Re-exports only; the code is in `data_plane`. Few programs use its `reshaping`, which is loaded when asked for.
"""

from typing import TYPE_CHECKING, Any

from hybridrl import data_plane
from hybridrl.data_plane.batch import DataProto, collate_fn
from hybridrl.data_plane.chunking import DataProtoConfig
from hybridrl.data_plane.futures import DataProtoFuture
from hybridrl.data_plane.merging import (
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from hybridrl.data_plane.rows import DataProtoItem
from hybridrl.data_plane.serialization import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

if TYPE_CHECKING:
    from hybridrl.data_plane.reshaping import (
        all_gather_data_proto,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(data_plane, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]
