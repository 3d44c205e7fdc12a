"""Micro-batching from the settings."""

import pytest

from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine_worker import micro_batching


@pytest.mark.parametrize(
    ("dynamic", "rows", "cut"),
    [
        (False, 4, MicroBatching(max_rows=4)),
        (False, None, MicroBatching(max_tokens=100)),
        (True, None, MicroBatching(max_tokens=100)),
        (True, 4, MicroBatching(max_tokens=100)),
    ],
)
def test_micro_batches_are_cut_by_tokens_unless_rows_are_set(dynamic, rows, cut):
    assert micro_batching(dynamic, 100, rows) == cut
