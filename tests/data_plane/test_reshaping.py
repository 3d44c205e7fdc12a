"""Padding, folding, uneven chunks with auto padding, and gathering with two real processes and gloo."""

import pickle

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
from tests.support.data_plane.gathering_rank import NUM_ROWS, as_lists, rows_of, share
from tests.support.data_plane.sample_batches import labels, obs, three_rows
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


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


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """The batch of each rank after each case."""
    folder = tmp_path_factory.mktemp("gathering")
    run_ranks("tests.support.data_plane.gathering_rank", 2, folder, log=folder / "log", timeout_s=100)
    return [pickle.loads((folder / f"rank_{rank}").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize("case", NUM_ROWS)
def test_every_rank_holds_the_rows_of_all_in_rank_order_and_its_own_meta_info(found, case):
    columns, dtypes, _ = as_lists(rows_of(range(0), 0)) if not sum(NUM_ROWS[case]) else expected(NUM_ROWS[case])
    assert [rank[case] for rank in found] == [(columns, dtypes, {"rank": 0}), (columns, dtypes, {"rank": 1})]


def expected(sizes: tuple[int, int]) -> tuple[dict, dict, dict]:
    """The rows of both ranks as lists, one after the other."""
    (first, dtypes, meta_info), (second, _, _) = as_lists(share(sizes, 0)), as_lists(share(sizes, 1))
    return {name: first[name] + second[name] for name in first}, dtypes, meta_info


def test_a_rank_without_rows_does_not_need_the_columns(found):
    columns, dtypes, _ = expected((3, 0))
    assert found[0]["unaware of the columns"] == (columns, dtypes, {"rank": 0})
    assert found[1]["unaware of the columns"] == (columns, dtypes, {"rank": 1})


def test_batches_of_arrays_alone_are_gathered_too(found):
    assert found[0]["only arrays"] == found[1]["only arrays"] == ({"x": [0, 1, 1]}, {"x": "object"}, {})


def test_a_process_group_names_the_ranks_that_take_part(found):
    for rank in (0, 1):
        assert found[rank]["a group of its own"] == as_lists(share((1, 2), rank))


def test_gathering_a_received_batch_leaves_the_memory_of_others_alone(found):
    columns, _, _ = found[0]["received"]
    assert columns["wide"] == [[0.0, 0.0]] * 4 and columns["strided"] == [[1, -1], [2, -2], [3, -3], [4, -4]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("other columns", "['x', 'y']"),
        (
            "other dtypes",
            "column 'x' cannot be concatenated: rows of part 0 are torch.int64 (), of part 1 torch.float32 ()",
        ),
        (
            "other widths",
            "column 'x' cannot be concatenated: rows of part 0 are torch.float32 (2,), of part 1 torch.float32 (3,)",
        ),
        (
            "jagged here, dense there",
            "column 'x' cannot be concatenated: rows of part 0 are torch.float32 (2,), of part 1 torch.float16 jagged",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused_by_name_on_both(found, case, message):
    assert found[0][case] == found[1][case] and message in found[0][case]
