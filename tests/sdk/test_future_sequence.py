"""`FutureSequence`: its length at once, its elements when they are read, from the right part."""

import pickle
import threading
from concurrent.futures import Future

import pytest

from hybridrl.data_plane.chunking import even_bounds
from hybridrl.sdk import FutureSequence


def parts_of(*parts):
    """A sequence of parts, and the futures of the parts that are None."""
    futures = [Future() for _ in parts]
    for future, part in zip(futures, parts, strict=True):
        if part is not None:
            future.set_result(part)
    return futures


@pytest.mark.parametrize(("size", "parts"), [(5, 4), (9, 8), (8, 8), (3, 4), (0, 2), (10, 3)])
def test_parts_differ_by_one_and_the_length_is_the_size(size, parts):
    # DLRover: 5 over 4 gives [2, 2, 1, -1] and length 4; 9 over 8 gives length 0
    sizes = [stop - start for start, stop in even_bounds(size, parts)]
    assert sum(sizes) == size and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert len(FutureSequence(parts_of(*[None] * parts), sizes)) == size


def test_five_over_four_is_two_one_one_one():
    assert [stop - start for start, stop in even_bounds(5, 4)] == [2, 1, 1, 1]


@pytest.mark.parametrize("index", range(-5, 5))
def test_every_index_also_negative_is_that_of_the_list(index):
    # DLRover: [-1] is an element of the wrong part
    sequence = FutureSequence(parts_of("ab", "c", "", "de"), [2, 1, 0, 2])
    assert sequence[index] == list("abcde")[index]


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_outside_is_named(index):
    with pytest.raises(IndexError, match=f"index {index} of a FutureSequence with 5 elements"):
        FutureSequence(parts_of("ab", "cde"), [2, 3])[index]


@pytest.mark.parametrize("cut", [slice(None), slice(1, 4), slice(None, None, -1), slice(-2, None), slice(9, 12)])
def test_slices_are_those_of_the_list(cut):
    assert FutureSequence(parts_of("ab", "c", "de"), [2, 1, 2])[cut] == list("abcde")[cut]


def test_reading_waits_only_for_the_part_that_has_the_element():
    first, second = parts_of("ab", None)
    sequence = FutureSequence([first, second], [2, 3])
    assert len(sequence) == 5 and sequence[1] == "b" and sequence[0:2] == ["a", "b"] and not sequence.done()
    threading.Timer(0.1, second.set_result, ["cde"]).start()
    assert sequence[-1] == "e" and list(sequence) == list("abcde") and sequence.done()
    assert "c" in sequence and sequence.index("d") == 3


def test_wait_has_a_deadline():
    sequence = FutureSequence(parts_of("ab", None), [2, 1])
    with pytest.raises(TimeoutError):
        sequence.wait(timeout=0.05)
    sequence._parts[1].set_result("c")
    assert sequence.wait() == ["a", "b", "c"]


def test_reading_raises_what_its_part_raised():
    good, bad = parts_of("ab", None)
    bad.set_exception(ArithmeticError("in the worker"))
    sequence = FutureSequence([good, bad], [2, 1])
    assert sequence[0] == "a"
    for read in (lambda: sequence[2], lambda: list(sequence), sequence.wait):
        with pytest.raises(ArithmeticError, match="in the worker"):
            read()


@pytest.mark.parametrize(("part", "what"), [("abc", "is 3, for 2 elements"), (7, "is no sequence but int")])
def test_a_part_of_another_length_is_an_error_and_not_shifted_elements(part, what):
    with pytest.raises(ValueError, match=f"part 1 of a batch call {what}"):
        list(FutureSequence(parts_of("ab", part), [2, 2]))


def test_sent_to_another_process_it_is_a_list():
    assert pickle.loads(pickle.dumps(FutureSequence(parts_of("ab", "c"), [2, 1]))) == ["a", "b", "c"]
