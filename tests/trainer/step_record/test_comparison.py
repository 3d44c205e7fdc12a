"""What differs between a repeated stage and what the run has kept."""

import copy
import math

import numpy as np

from hybridrl.trainer.step_record.comparison import compare_columns, compare_metrics


def rows(*values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_a_nan_in_one_of_two_metrics_is_a_difference():
    kept = {"actor/pg_loss": 0.25, "actor/kl": math.nan, "a": 1.0, "timing_s/step": 3.0}
    found = kept | {"timing_s/step": 4.0}
    assert compare_metrics(found, kept) == ["equal (3 metrics)"]
    assert compare_metrics(found | {"actor/pg_loss": math.nan}, kept) == [
        "equal (2 metrics)",
        "actor/pg_loss: nan instead of 0.25",
    ]


def test_rows_of_objects_are_compared_by_all_their_values():
    images = [{"pixel_values": (np.arange(4000.0).reshape(40, 100),), "grid": np.array([1, 4, 10])}, None]
    kept, found = rows(*images, {"score": math.nan}), rows(*copy.deepcopy(images), {"score": math.nan})
    assert compare_columns({"images": found}, {"images": kept}) == ["bit-equal (1 column)"]
    found[0]["pixel_values"][0][20, 50] += 1  # str() leaves out the middle of a large array
    assert compare_columns({"images": found}, {"images": kept}) == ["images: 1 of 3 rows differ"]
    assert compare_columns({"images": found[:1]}, {"images": kept}) == ["images: 3 of 3 rows differ"]
