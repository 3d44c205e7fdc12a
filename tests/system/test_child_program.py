"""The program of foreign code, and the parent's half of its protocol, with calls of this test alone."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hybridrl.system.child_process import ChildProgram, ProcessLimits, ProtocolError, frame_of_request, pickled_call
from hybridrl.system.child_program import plain

CALLS = """
class SampleCalls:
    lenient = False

    def __init__(self, loaded, *, factor):
        self.about, self.loaded, self.factor = ["about", factor], loaded, factor

    def times(self, number):
        return self.loaded(number) * self.factor

    async def later(self, number):
        return self.times(number)

    def wait(self, seconds):
        import time
        time.sleep(seconds)

    def fork(self):
        import os
        os.fork()
        return "once"

    def imported_in_helper(self):
        import os
        end, start = os.pipe()
        if os.fork() == 0:
            import colorsys
            os.write(start, colorsys.__name__.encode())
            os._exit(0)
        os.close(start)
        return os.read(end, 100).decode()

    def write(self, data):
        import os
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{name}") and "socket" in os.readlink(f"/proc/self/fd/{name}"):
                os.write(int(name), data)
                import time
                time.sleep(600)
"""
FOREIGN = """
import beside

class Box:
    @staticmethod
    def opened(number):
        if number < 0:
            raise LookupError("below\\nzero")
        return number + beside.ONE
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a child and returns it with the answer to its request."""
    started = []
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "boxes.py").write_text(FOREIGN)
    (tmp_path / "foreign" / "beside.py").write_text("ONE = 1\n")

    def start(path="boxes.py", name="Box.opened", *, python=None, sys_path=None, pickled=None, **arguments):
        path = path and (str(tmp_path / "foreign" / path) if path.endswith(".py") else path)
        child = ChildProgram(
            f"{tmp_path / 'calls.py'}:SampleCalls",
            python=python,
            limits=ProcessLimits(processes=8),
            environment=dict(os.environ),
        )
        child.socket.settimeout(60)
        started.append(child)
        request = pickle.dumps(arguments or {"factor": 10})
        child.socket.sendall(
            frame_of_request(path=path, name=name, pickled=pickled, arguments=request, sys_path=sys_path)
        )
        return child, received(child)[-1]

    yield start
    for child in started:
        child.end()


def received(child):
    """Return the answers until the child is idle, or has not loaded: kind, value and name of the call."""
    answers = []
    while not child.idle and (data := child.socket.recv(1 << 20)):
        answers += child.answers(data)
    return answers


def call(child, *calls):
    """Send calls, each (method, arguments), until all are answered; return kinds and values of the answers."""
    answers = []
    while len(answers) < len(calls):
        rest = range(len(answers), len(calls))
        child.socket.sendall(child.frame_of_calls(rest, [pickled_call(calls[n][0], **calls[n][1]) for n in rest]))
        for kind, value, number in received(child):
            assert number == (None if kind == "importing" else len(answers))
            answers += [(kind, value)] if number is not None else []
        child.pending.clear()
    return answers


def test_calls_are_answered_in_order_and_the_last_one_says_idle(start):
    child, ready = start()
    assert ready == ("ready", ["about", 10], None) and child.loaded and child.idle
    answers = call(child, ("times", {"number": 1}), ("later", {"number": 2}), ("times", {"number": -1}))
    assert answers[:2] == [("ok", 20), ("ok", 30)] and child.idle
    kind, (classes, reason) = answers[2]
    assert kind == "error" and classes == ["LookupError", "Exception"]
    assert reason.startswith("LookupError: below zero (") and "boxes.py:8)" in reason


def test_a_list_ends_early_after_a_slice_and_the_rest_can_be_sent_again(start):
    child, _ = start()
    child.socket.sendall(child.frame_of_calls("abc", [pickled_call("wait", seconds=0.1)] * 3))
    assert received(child) == [("ok", None, "a")]
    assert list(child.pending) == ["b", "c"]


@pytest.mark.parametrize(
    ("request_of", "kind", "reason"),
    [
        ({"path": "absent.py"}, "path", "no such file"),
        ({"path": "absent_package.module"}, "path", "no such module"),
        ({"name": "Bax"}, "name", "no such name there; it has Box"),
        ({"pickled": b"nothing", "path": None}, "import", "UnpicklingError"),
        ({"wrong": 1}, "signature", "TypeError: "),
    ],
)
def test_what_cannot_be_loaded_says_why(start, request_of, kind, reason):
    child, (failed, (kinds, text), _) = start(**request_of)
    assert failed == "failed" and kinds == [kind] and reason in text
    assert not child.loaded and child.wait(60) == 0


def test_the_program_runs_in_an_interpreter_that_has_nothing_installed(start, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=120)
    child, _ = start(python=str(tmp_path / "bare" / "bin" / "python"))
    assert call(child, ("times", {"number": 1})) == [("ok", 20)]


def test_with_the_parents_path_a_child_finds_the_parents_modules(start, tmp_path):
    child, (kind, *_) = start("boxes", sys_path=[str(tmp_path / "foreign"), *sys.path])
    assert kind == "ready" and call(child, ("times", {"number": 1})) == [("ok", 20)]


def test_a_copy_of_the_child_answers_nothing(start):
    child, _ = start()
    assert call(child, ("fork", {}), ("times", {"number": 1})) == [("ok", "once"), ("ok", 20)]


def test_a_copy_that_a_call_makes_for_itself_may_import(start):
    child, _ = start()
    assert call(child, ("imported_in_helper", {})) == [("ok", "colorsys")]


@pytest.mark.parametrize(
    "payload",
    [b"[1, 2]", b"no JSON", b"[" * 100_000, b'[%d, 2, "ready", null, true]', b'[%d, 2, "error", ["text"], true]']
    + [b'[%d, 2, "error", [[], ""], true]', b'[%d, 2, "error", [["A"], 3], true]', b'[%d, 3, "ok", 1, true]']
    + [b'[1, 2, "ok", 1, true]', b'[%d, 2, ["ok"], 1, true]'],
)
def test_a_frame_that_the_program_does_not_send_is_refused(start, payload):
    child, _ = start()
    payload = payload.replace(b"%d", str(child.pid).encode())
    with pytest.raises(ProtocolError):
        call(child, ("write", {"data": len(payload).to_bytes(4, "big") + payload}))


def test_only_an_answer_to_a_call_says_that_the_child_is_idle(start):
    child, _ = start()
    frames = [b'[%d, 2.0, "importing", null, true]' % child.pid, b'[%d, 3, "ok", 1, true]' % child.pid]
    child.frame_of_calls("ab", [])
    [first] = child.answers(len(frames[0]).to_bytes(4, "big") + frames[0])
    assert first == ("importing", None, None) and not child.idle
    [second] = child.answers(len(frames[1]).to_bytes(4, "big") + frames[1])
    assert second == ("ok", 1, "a") and child.idle and list(child.pending) == ["b"]


def test_a_frame_that_claims_gigabytes_is_refused_before_it_is_there(start):
    child, _ = start()
    with pytest.raises(ProtocolError, match="3814 MB; at most 64"):
        call(child, ("write", {"data": (4_000_000_000).to_bytes(4, "big")}))


def test_an_answer_without_a_call_is_refused(start):
    child, _ = start()
    frame = b'[%d, 2, "ok", 1, true]' % child.pid
    with pytest.raises(ProtocolError, match="nobody asked for"):
        list(child.answers(len(frame).to_bytes(4, "big") + frame))


def test_end_kills_a_child_that_works(start):
    child, _ = start()
    child.socket.sendall(child.frame_of_calls("a", [pickled_call("wait", seconds=600)]))
    begun = time.monotonic()
    assert child.end() == -9 and time.monotonic() - begun < 60
    assert not Path(f"/proc/{child.pid}").exists()


def test_keys_and_texts_of_a_result_can_be_written_to_a_file():
    found = plain({"score": 1, "half \ud800": "\udfff", 3: {"\ud800": ["\ud800"]}}, lenient=False)
    assert found == {"score": 1, "half ?": "?", "3": {"?": ["?"]}}


def test_numbers_and_arrays_become_pythons():
    value = (np.float32(0.5), np.array([2]), np.array([1, 2]), True, {1.5})
    assert plain(value, lenient=False) == [0.5, 2, [1, 2], True, [1.5]]


def test_other_values_are_refused_or_become_texts_inside_of_others():
    assert plain([complex(1, 2), 10**400], lenient=True) == ["(1+2j)", "int"]
    for value, error in ((complex(1, 2), TypeError), (10**400, OverflowError)):
        for lenient in (False, True):
            with pytest.raises(error, match="it returned a"):
                plain(value, lenient=lenient)
        with pytest.raises(error, match="it returned a"):
            plain([value], lenient=False)
