"""Padding and unpadding, folding and unfolding, and uneven chunks with auto padding."""

import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.protocol import (
    DataProto,
    DataProtoConfig,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from tests.support.data_plane.sample_batches import labels, obs, three_rows

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("divisor", "padded"), [(2, "abca"), (3, "abc"), (7, "abcabca")])
def test_padding_to_a_divisor_repeats_from_the_first_row_and_is_undone(divisor, padded):
    data, added = pad_dataproto_to_divisor(three_rows(k=1), divisor)
    assert labels(data) == list(padded) and added == len(padded) - 3 and data.meta_info == {"k": 1}
    assert labels(unpad_dataproto(data, added)) == ["a", "b", "c"]


def test_padding_more_rows_than_there_are_to_drop_is_refused():
    with pytest.raises(ValueError, match="pad_size=4"):
        unpad_dataproto(three_rows(), 4)
    with pytest.raises(ValueError, match="size_divisor=0"):
        pad_dataproto_to_divisor(three_rows(), 0)
    assert pad_dataproto_to_divisor(three_rows()[:0], 4)[1] == 0


def test_fold_and_unfold_are_inverse():
    folded = fold_batch_dim(three_rows(k=1).repeat(2), new_batch_size=3)
    assert obs(folded) == [[[1, 2], [1, 2]], [[3, 4], [3, 4]], [[5, 6], [5, 6]]] and labels(folded)[1] == ["b", "b"]
    folded.reorder([1, 2, 0])
    assert labels(unfold_batch_dim(folded)) == ["b", "b", "c", "c", "a", "a"]
    with pytest.raises(DataError, match="3 rows cannot be folded into 2"):
        fold_batch_dim(three_rows(), 2)
    with pytest.raises(DataError, match="first 2 dimensions"):
        unfold_batch_dim(three_rows())


def test_auto_padding_lets_chunk_make_full_pieces_first(monkeypatch):
    rows = {"obs": torch.arange(5)}
    data = DataProto.from_dict(rows, auto_padding=True)
    assert data.is_padding_enabled() and [obs(batch) for batch in data.chunk(4)] == [[0, 1], [2, 3], [4], []]
    assert not DataProto.from_dict(rows).is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "TRUE")
    assert DataProto.from_dict(rows).is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    try:
        assert DataProto.from_dict(rows).is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
