"""Gathering the rows of all ranks on every rank, with two real processes and gloo."""

import pickle
import subprocess
import sys

import pytest

from tests.support.data_plane.gathering_rank import NUM_ROWS, as_lists, rows_of, share

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """The batch of each rank after each case."""
    folder = tmp_path_factory.mktemp("gathering")
    command = [sys.executable, "-m", "tests.support.data_plane.gathering_rank"]
    ranks = [subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
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
