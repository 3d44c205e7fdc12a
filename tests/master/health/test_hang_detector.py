"""Tests of hybridrl/master/health/hang_detector.py: which process blocks a call that missed its deadline."""

import socket
from contextlib import ExitStack

import pytest

from hybridrl.master.health.hang_detector import STACKS_TIMEOUT_S, HangDetector
from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.monitor import Monitor


def dump(*lines):
    frames = "\n".join(f'  File "{path}", line {number} in {name}' for path, number, name in lines)
    return f"Current thread 0x02 (most recent call first):\n{frames}\n"


WAITS = dump(("torch/distributed/distributed_c10d.py", 10, "all_reduce"), ("actor.py", 3, "send_weights"))
SLEEPS = dump(("data.py", 7, "read"), ("actor.py", 2, "send_weights"))
RECEIVES = dump(("channel.py", 5, "receive"), ("rollout.py", 4, "receive_weights"))


@pytest.fixture
def monitor():
    """A monitor of two actors that send weights and a rollout that receives them."""
    found = Monitor("here", lambda process, callback: None, lambda node: "")
    with ExitStack() as stack:
        for slot, method in (
            ("actor-0", "actor.send_weights"),
            ("actor-1", "actor.send_weights"),
            ("rollout-0", "rollout.receive_weights"),
        ):
            ours, _ = map(stack.enter_context, socket.socketpair())
            hello = {"slot": slot, "name": f"run/{slot}", "pid": 1, "node": "a", "machine": "elsewhere"}
            connection = Connection(ours, hello)
            found.handle_message(connection, {"hello": hello})
            found.handle_message(connection, {"beat": {"doing": method, "elapsed_s": 30.0, "calls": 1}})
        yield found


def inspected(monitor, tmp_path, stacks, overdue):
    asked = []
    hangs = HangDetector(monitor, asked.append, journal=str(tmp_path), hang_s=300.0)
    hangs.inspect_now(overdue, "rollout.receive_weights")
    assert hangs.findings == {} and asked == list(overdue)
    for slot, text in stacks.items():
        hangs.add_stacks(slot, text)
    return hangs, hangs.check()


def test_the_process_that_blocks_a_call_may_have_another_role_than_the_called_one(monitor, tmp_path):
    stacks = {"rollout-0": RECEIVES, "actor-0": WAITS, "actor-1": SLEEPS}
    hangs, warning = inspected(monitor, tmp_path, stacks, ("rollout-0", "actor-0", "actor-1"))
    found = hangs.findings["rollout.receive_weights"]
    assert found.culprit == warning.slot == "actor-1" and "data.py:7 in read" in found.evidence


def test_a_call_without_a_known_culprit_has_an_answer_too(monitor, tmp_path):
    stacks = {"actor-0": WAITS, "actor-1": WAITS}
    hangs, warning = inspected(monitor, tmp_path, stacks, ("actor-0", "actor-1"))
    assert hangs.findings == {"rollout.receive_weights": None}
    assert warning.slot == "actor-0" and "is past its deadline: it is at torch/distributed/" in warning.text


def test_the_only_process_that_has_not_answered_blocks_the_call(monitor, tmp_path):
    hangs, warning = inspected(monitor, tmp_path, {"rollout-0": RECEIVES}, ("rollout-0",))
    found = hangs.findings["rollout.receive_weights"]
    assert found.culprit == warning.slot == "rollout-0"
    assert found.evidence == "it alone has not answered, and it is at channel.py:5 in receive"


@pytest.mark.parametrize("stacks", [{"actor-0": WAITS, "actor-1": WAITS}, {}])
def test_a_role_that_does_not_advance_is_reported_once_also_if_no_process_of_it_is_at_fault(monitor, tmp_path, stacks):
    asked = []
    hangs = HangDetector(monitor, asked.append, journal=str(tmp_path), hang_s=20.0)
    hangs.check()
    assert asked == ["actor-0", "actor-1"]
    for slot, text in stacks.items():
        hangs.add_stacks(slot, text)
    hangs._inquiry.since -= STACKS_TIMEOUT_S
    warning = hangs.check()
    where = "it is at torch/distributed/" if stacks else "it sent no stack"
    assert "no process of its role (2) advances in actor.send_weights: " + where in warning.text
    assert hangs.check() is None and asked == ["actor-0", "actor-1"]
