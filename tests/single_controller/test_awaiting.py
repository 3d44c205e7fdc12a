"""How the death of a worker is described, from Ray's report or from the master's."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.single_controller.awaiting import broken_connection, describe_exit_report, is_late_peer
from hybridrl.single_controller.monitoring.process import mark_lost
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.driver.ray_head import free_port
from tests.support.single_controller.sample_workers import Adder, LatePeer

ROOT = Path(__file__).parents[2]

# as Ray 2.60 words it
REPORT = """The actor died unexpectedly before finishing this task.
	class_name: rollout-0
	actor_id: 5f6c2f1a8e2f6d2b5a3f4c0001000000
	pid: 19260
	name: job/rollout-0
	namespace: 7a4f
	ip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: {kind} \
Worker exit detail: {detail} Some common causes include: \
(1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called."""


def test_a_killed_process_is_reported_as_killed():
    report = REPORT.format(
        kind="SYSTEM_ERROR", detail="Worker unexpectedly exits with a connection error code 2. End of file."
    )
    assert describe_exit_report(report).startswith(
        "its process (19260 on 192.0.2.2) ended without a message: it was killed by a signal, crashed or"
    )


def test_a_specific_report_of_ray_is_quoted_without_identifiers():
    text = describe_exit_report(REPORT.format(kind="USER_ERROR", detail="Worker exits with an exit code 4."))
    assert text.endswith("Worker exit type: USER_ERROR Worker exit detail: Worker exits with an exit code 4.")
    assert "pid: 19260" in text and not any(name in text for name in ("actor_id", "namespace", "OOM killer"))


def test_a_lost_node_is_reported_and_a_closed_connection_leaves_open_what_is_gone():
    report = (
        REPORT.partition("The actor is dead")[0] + "The actor died because its node has died. Node Id: a03b37cc49a9"
    )
    assert describe_exit_report(report) == "its node is gone (19260 on 192.0.2.2)"
    report = (
        "The actor 3b06ee is unavailable: The actor is temporarily unavailable: RpcError: RPC error: Socket "
        "closed rpc_code: 14."
    )
    assert describe_exit_report(report) == "the connection to its process ended: the process or its node is gone"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_call_fails_at_once_when_its_worker_is_marked_lost_and_the_replacement_is_not_affected():
    with RayResourcePool([1]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder") as group:
        mark_lost(group.workers[0]._actor_id.hex(), "its machine does not answer")
        start = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            group.doze(80.0)
        assert time.monotonic() - start < 60
        assert str(caught.value) == "worker adder-0 was lost while running doze(): its machine does not answer"
        group.respawn(0)
        assert group.own([4]) == [40]


GLOO = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3473. "
    "This is typically caused by a remote worker crashing."
)
GLOO_TIMEOUT = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 500ms for recv operation"
    " to complete"
)
GLOO_CHECK = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. "
    "Unable to find address for: eth9"
)
NCCL = "NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RuntimeError(GLOO),
            "a connection of its process group has ended (Connection closed by peer [127.0.0.1]:3473)",
        ),
        (RuntimeError(NCCL), "a connection of its process group has ended (remote process exited or there was"),
        (ConnectionResetError(104, "Connection reset by peer"), ""),  # of the user's own code
        (RuntimeError("Connection closed by peer"), ""),
        (RuntimeError(GLOO_CHECK), ""),
        (RuntimeError(GLOO_TIMEOUT), ""),
        (ValueError(GLOO), ""),
    ],
)
def test_a_broken_process_group_is_told_from_other_errors(error, cause):
    found = broken_connection(error)
    assert found.startswith(cause) and bool(found) == bool(cause)


NCCL_TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) "
    "ran for 600016 milliseconds before timing out."
)


@pytest.mark.parametrize("text", [GLOO_TIMEOUT, NCCL_TIMEOUT, "wait timeout after 2000ms, keys: /0//1//cpu//0/1"])
def test_a_collective_that_timed_out_is_told_from_an_error_of_the_user_and_from_an_ended_connection(text):
    assert is_late_peer(RuntimeError(text)) and not is_late_peer(ValueError(text))
    assert not any(is_late_peer(RuntimeError(other)) for other in (GLOO, NCCL, GLOO_CHECK, "Timed out waiting for me"))
    assert not broken_connection(RuntimeError(text))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_collective_that_times_out_before_its_call_is_a_timeout_that_names_the_rank_which_is_not_there():
    with RayResourcePool([2]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(LatePeer), role="peer") as group:
        start = time.monotonic()
        with pytest.raises(
            CallTimeout, match=r"rank 0 waited for a peer in a collective .*2000ms.*without an answer: peer-1"
        ) as found:
            group.sum_without(1)
        assert (found.value.role, found.value.ranks, found.value.method) == ("peer", (1,), "sum_without")
        assert time.monotonic() - start < 60  # the call's own deadline is an hour


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_both_ends_of_a_connection_that_ended_in_a_live_group_say_so():
    command = [sys.executable, "-m", "tests.support.single_controller.cut_group"]
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err in ends:
        assert out.startswith("a connection of its process group has ended ("), err
