"""The seconds of a part are split among the parts inside it, and their sum stays."""

import pytest

from hybridrl.single_controller.monitoring.part_times import PartTimes


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        ({"group": 2.0}, {"group": 2.0, "model": 5.0}),
        ({"group": 2.0, "load": 4.0}, {"group": 2.0, "load": 4.0, "model": 1.0}),
        ({"group": 9.0}, {"group": 7.0, "model": 0.0}),  # a process began to measure before its caller did
        ({}, {"model": 7.0}),
    ],
)
def test_the_parts_inside_a_part_are_counted_once_and_come_before_it(inner, found):
    times = PartTimes(start=1.0, model=7.0)
    times.split("model", inner)
    assert list(times.items()) == [("start", 1.0), *found.items()]


def test_a_part_is_counted_also_if_it_fails_and_draining_starts_again():
    times = PartTimes()
    with pytest.raises(KeyError), times.part("kill"):
        raise KeyError
    assert list(times) == ["kill"] and times["kill"] >= 0
    assert list(times.drain()) == ["kill"] and times == {}
