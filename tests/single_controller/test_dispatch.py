"""How lists are cut over workers, and the functions that change arguments and results in the caller."""

import pytest

from hybridrl.single_controller.dispatch import Dispatch, Invocation, register, sequence_mode
from tests.support.single_controller.in_process_group import InProcessGroup


class Echo:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @register(Dispatch.AUTO_SHARD)
    def auto(self, *args, **kwargs):
        return args, kwargs

    @register(Dispatch.ONE_TO_ALL, name="rank")
    def get_rank(self):
        return self.rank

    def doubled(self, items, *, scale=2):
        return [item * scale for item in items]

    def seen(self, *args, **kwargs):
        return {"args": args, **kwargs}


@pytest.fixture
def group() -> InProcessGroup:
    return InProcessGroup([Echo(rank) for rank in range(3)])


def test_lists_with_one_entry_per_worker_are_shared_out(group):
    assert group.auto([1, 2, 3], b=["x", "y", "z"]) == [((1,), {"b": "x"}), ((2,), {"b": "y"}), ((3,), {"b": "z"})]


@pytest.mark.parametrize("other", [[1, 2], (1, 2, 3), "abc", 3])
def test_one_argument_that_is_no_such_list_sends_every_argument_to_all(group, other):
    assert group.auto([1, 2, 3], other) == [(([1, 2, 3], other), {})] * 3
    assert group.auto([1, 2, 3], b=other) == [(([1, 2, 3],), {"b": other})] * 3


def test_a_call_without_arguments_reaches_every_worker(group):
    assert group.auto() == [((), {})] * 3


@pytest.mark.parametrize("size", range(8))
def test_the_chunks_of_a_sequence_are_joined_in_order(group, size):
    doubled = group.bind("doubled", Invocation(sequence_mode(size)))
    assert doubled(list(range(size))) == [2 * i for i in range(size)]


def test_chunks_differ_by_one_entry_the_first_are_larger_and_some_may_be_empty(group):
    seen = group.bind("seen", Invocation(sequence_mode(5)))
    outputs = seen([0, 1, 2, 3, 4], ("a", "b", "c", "d", "e"), "abcde", scale=7)
    # 5 entries for 3 workers: 2, 2, 1
    assert [output["args"] for output in outputs] == [
        ([0, 1], ("a", "b"), "abcde"),
        ([2, 3], ("c", "d"), "abcde"),
        ([4], ("e",), "abcde"),
    ]
    assert [output["scale"] for output in outputs] == [7, 7, 7]
    seen = group.bind("seen", Invocation(sequence_mode(1)))
    assert [output["args"] for output in seen([9])] == [([9],), ([],), ([],)]


def test_a_sequence_of_another_length_is_refused_by_the_name_of_its_argument(group):
    doubled = group.bind("doubled", Invocation(sequence_mode(3)))
    with pytest.raises(ValueError, match="scale has 2 entries.* batch has 3"):
        doubled([1, 2, 3], scale=[1, 2])
    with pytest.raises(ValueError, match="argument 0 has 4 entries.* batch has 3"):
        doubled([1, 2, 3, 4])


def test_pre_changes_the_arguments_before_they_are_cut_and_post_the_merged_result(group):
    seen = []

    def pre(text: str):
        return ([int(word) for word in text.split()],), {"scale": 10}

    def post(result):
        seen.append(result)
        return sum(result)

    doubled = group.bind("doubled", Invocation(sequence_mode(4), pre=pre, post=post))
    assert doubled("1 2 3 4") == 100 and seen == [[10, 20, 30, 40]]


def test_post_gets_the_references_of_a_call_that_does_not_wait(group):
    first = group.bind("doubled", Invocation(sequence_mode(3), post=lambda references: references[:1]))
    assert first.submit([1, 2, 3]) == [[2]]


def test_an_endpoint_is_bound_under_its_own_name(group):
    assert group.rank() == [0, 1, 2] and not hasattr(group, "get_rank")
    assert group.rank.__wrapped__ is Echo.get_rank
