"""Which rows go where: dealt over the ranks of a group, and chosen for an update."""

from collections.abc import Callable, Collection

import torch

from hybridrl.algos.partition import balanced_partition
from hybridrl.protocol import DataProto


def columns_of(batch: DataProto, names: Collection[str]) -> DataProto:
    """Return these columns and nothing else of the batch."""
    return batch.select(batch_keys=list(names), non_tensor_batch_keys=[], meta_info_keys=[])


def on_ranks(method: Callable, data: DataProto, *, num_ranks: int, balance: bool) -> DataProto:
    """Call a pure method of a group with rows dealt so that every rank computes about the same tokens; rows come back in their order.

    The batch itself is not reordered: which rows form a mini-batch must not depend on the number of ranks.
    """
    if num_ranks == 1 or not balance:
        return method(data)
    parts = balanced_partition(data.batch["attention_mask"].sum(-1).tolist(), num_ranks)
    result = method([data.select_idxs(part) for part in parts])
    result.reorder(torch.tensor([row for part in parts for row in part]).argsort())
    return result
