"""Small batches that several tests share, and pickle 5 round trips."""

import pickle

import numpy as np
import torch

from hybridrl.protocol import DataProto


def three_rows(**meta_info) -> DataProto:
    """Rows [1, 2], [3, 4], [5, 6] under `obs`, labels a, b, c, weights 0.5, 1.5, 2.5."""
    return DataProto.from_dict(
        tensors={"obs": torch.tensor([[1, 2], [3, 4], [5, 6]])},
        non_tensors={"labels": ["a", "b", "c"], "weight": np.array([0.5, 1.5, 2.5])},
        meta_info=meta_info,
    )


def jagged(*rows: list[float], **kwargs) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, **kwargs) for row in rows], layout=torch.jagged)


def obs(data: DataProto) -> list:
    return data.batch["obs"].tolist()


def labels(data: DataProto) -> list:
    return data.non_tensor_batch["labels"].tolist()


def round_trip(data: DataProto, *, freeze: bool = False) -> DataProto:
    """Return the batch after pickle 5 with buffers out of band.

    Frozen buffers are read-only, like those of Ray.
    """
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[bytes(b.raw()) if freeze else bytearray(b.raw()) for b in buffers])


def two_readers(data: DataProto) -> tuple[DataProto, DataProto]:
    """Two readers of the same read-only bytes."""
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(b.raw()) for b in buffers]
    return pickle.loads(payload, buffers=shared), pickle.loads(payload, buffers=shared)
