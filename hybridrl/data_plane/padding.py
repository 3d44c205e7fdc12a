"""Batches brought to a wanted number of rows and back, by repeated rows that are dropped later.

Dispatch needs none of this (any batch goes to any number of workers); it is here for those who cut batches themselves.
"""

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hybridrl.protocol import DataProto

AUTO_PADDING_KEY = "_verl_auto_padding"


class _AutoPadding(type):
    """Makes `auto_padding` readable and settable on the class itself."""

    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """`auto_padding`: every batch of this process may be chunked unevenly (also by the environment variable VERL_AUTO_PADDING=1)."""


def pad_dataproto_to_divisor(data: "DataProto", size_divisor: int) -> tuple["DataProto", int]:
    """Return (batch, added rows): the rows repeated from the first one on until their number is a multiple of `size_divisor`.

    Nothing is copied when nothing is added. An empty batch stays empty.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor={size_divisor} must be at least 1")
    num_added = -len(data) % size_divisor
    if num_added == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + num_added) % len(data)), num_added


def unpad_dataproto(data: "DataProto", pad_size: int) -> "DataProto":
    """Return the batch without its last `pad_size` rows (a view)."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"pad_size={pad_size} rows cannot be dropped from a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size) if pad_size else data
