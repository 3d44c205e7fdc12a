"""A fixture of the files whose engines start a process group of one in the process of the tests."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """End the group that an engine of this file has started."""
    mine = not dist.is_initialized()
    yield
    if mine and dist.is_initialized():
        dist.destroy_process_group()
