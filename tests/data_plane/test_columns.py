"""Rows of every kind of column, against a plain list of row numbers."""

from functools import partial
from itertools import compress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.protocol import DataProto, pad_dataproto_to_divisor
from tests.data_plane.sample_batches import round_trip

pytestmark = pytest.mark.timeout(60)


def batch_of(rows: list[int]) -> DataProto:
    """A batch in which every column of a row follows from the row's number."""
    number = torch.tensor(rows, dtype=torch.int64)
    lengths = number % 4
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return DataProto.from_dict(
        {
            "wide": torch.stack([number, number * 10], dim=1).to(torch.bfloat16),
            "strided": torch.stack([number, -number]).t(),
            "flag": number % 2 == 0,
            "jagged": torch.nested.nested_tensor_from_jagged(number.repeat_interleave(lengths).float(), offsets),
        },
        {"object": np.array([{"n": n} for n in rows], dtype=object), "numeric": np.array(rows, dtype=np.int32)},
        {"k": 1},
    )


def assert_rows(data: DataProto, rows: list[int]) -> None:
    assert len(data) == len(rows) and data.meta_info == {"k": 1}
    assert data.batch["wide"].dtype == torch.bfloat16 and data.batch["wide"].tolist() == [[n, n * 10] for n in rows]
    assert data.batch["strided"].tolist() == [[n, -n] for n in rows]
    assert data.batch["flag"].tolist() == [n % 2 == 0 for n in rows]
    assert [row.tolist() for row in data.batch["jagged"].unbind()] == [[float(n)] * (n % 4) for n in rows]
    assert data.non_tensor_batch["object"].tolist() == [{"n": n} for n in rows]
    assert data.non_tensor_batch["numeric"].dtype == np.int32 and data.non_tensor_batch["numeric"].tolist() == rows


def cut(draw, data: DataProto, rows: list[int]):
    bound = st.none() | st.integers(-len(rows) - 1, len(rows) + 1)
    window = slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, -1, -2])))
    return data[window], rows[window]


def pick(draw, data: DataProto, rows: list[int]):
    index = draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=6)) if rows else []
    form = draw(st.sampled_from([list, partial(np.array, dtype=np.int64), partial(torch.tensor, dtype=torch.int32)]))
    return data[form(index)], [rows[i] for i in index]


def mask(draw, data: DataProto, rows: list[int]):
    keep = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    form = draw(st.sampled_from([partial(np.array, dtype=bool), partial(torch.tensor, dtype=torch.bool)]))
    return data.select_idxs(form(keep)), list(compress(rows, keep))


def repeat(draw, data: DataProto, rows: list[int]):
    times = draw(st.integers(0, 3))
    return data.repeat(times), [row for row in rows for _ in range(times)]


def tile(draw, data: DataProto, rows: list[int]):
    times = draw(st.integers(0, 3))
    return data.repeat(times, interleave=False), rows * times


def repeat_each(draw, data: DataProto, rows: list[int]):
    counts = draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    return data.sample_level_repeat(counts), [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]


def chunk_and_concat(draw, data: DataProto, rows: list[int]):
    pieces = data.chunk_uneven(draw(st.integers(1, 5)))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    return DataProto.concat(pieces), rows


def split_and_concat(draw, data: DataProto, rows: list[int]):
    return DataProto.concat(data.split(draw(st.integers(1, 4))) or [data]), rows


def send(draw, data: DataProto, rows: list[int]):
    return round_trip(data, freeze=draw(st.booleans())), rows


def reorder(draw, data: DataProto, rows: list[int]):
    order = draw(st.permutations(range(len(rows))))
    data.reorder(order)
    return data, [rows[i] for i in order]


def pad(draw, data: DataProto, rows: list[int]):
    padded, added = pad_dataproto_to_divisor(data, draw(st.integers(1, 4)))
    return padded, [*rows, *rows * 4][: len(rows) + added]


METHODS = [cut, pick, mask, repeat, tile, repeat_each, chunk_and_concat, split_and_concat, send, reorder, pad]


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_every_chain_of_row_methods_does_what_it_does_to_a_list(draws):
    rows = draws.draw(st.lists(st.integers(0, 12), max_size=6))
    data = batch_of(rows)
    for method in draws.draw(st.lists(st.sampled_from(METHODS), min_size=1, max_size=5)):
        data, rows = method(draws.draw, data[:40], rows[:40])
    assert_rows(data, rows)
