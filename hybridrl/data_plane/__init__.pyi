from . import merging as merging
from . import tensordict_utils as tensordict_utils
from .batch import DataProto as DataProto
from .chunking import DataProtoConfig as DataProtoConfig
from .futures import DataProtoFuture as DataProtoFuture
from .reshaping import (
    all_gather_data_proto as all_gather_data_proto,
)
from .reshaping import (
    fold_batch_dim as fold_batch_dim,
)
from .reshaping import (
    pad_dataproto_to_divisor as pad_dataproto_to_divisor,
)
from .reshaping import (
    unfold_batch_dim as unfold_batch_dim,
)
from .reshaping import (
    unpad_dataproto as unpad_dataproto,
)
from .rows import DataProtoItem as DataProtoItem
