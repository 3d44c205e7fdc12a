"""Events from silence and ended connections of processes on another machine."""

import socket
import time
from contextlib import ExitStack

import pytest

from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.monitor import Monitor
from hybridrl.master.state.events import Kind, WorkerFailed, WorkerSilent
from hybridrl.master.state.reducer import JobState, WorkerState
from hybridrl.master.state.tables import WorkerPhase
from hybridrl.system.process_stat import ProcessStat

SILENT_S = 0.6  # much longer than the steps of a test before its silence


@pytest.fixture
def sockets():
    with ExitStack() as stack:
        yield stack


def join(monitor, sockets, slot, node):
    """Connect a process of another machine: hello, then a heartbeat."""
    ours, theirs = map(sockets.enter_context, socket.socketpair())
    hello = {"slot": slot, "name": f"run/{slot}", "pid": 1, "node": node, "machine": "elsewhere"}
    connection = Connection(ours, hello)
    monitor.handle_message(connection, {"hello": hello})
    monitor.handle_message(connection, {"beat": {"doing": "actor.update", "elapsed_s": 3.0, "calls": 1}})
    return connection


def test_all_processes_of_a_machine_that_disappeared_are_lost_with_it(sockets):
    gone, probed = set(), []

    def node_loss_reason(node):
        return f"{node} is gone" if node in gone else ""

    monitor = Monitor(
        "here", lambda process, callback: probed.append(process.slot), node_loss_reason, silence_timeout_s=SILENT_S
    )
    for slot, node in (("actor-0", "a"), ("actor-1", "a"), ("actor-2", "b")):
        join(monitor, sockets, slot, node)
    assert monitor.check() == []
    gone.add("a")
    time.sleep(1.5 * SILENT_S)
    failed = monitor.check()
    assert [(type(event), event.kind, event.slot) for event in failed] == [
        (WorkerFailed, Kind.NODE, "actor-0"),
        (WorkerFailed, Kind.NODE, "actor-1"),
    ]
    assert failed[0].evidence == "a is gone; in actor.update for 3.0 s at its last heartbeat"
    assert probed == ["actor-2"]  # its node is alive, so its process is probed
    assert list(monitor.processes) == ["actor-2"]


def test_a_restarted_master_knows_no_activity_of_a_process_before_its_first_heartbeat(sockets):
    monitor = Monitor("here", lambda process, callback: None, lambda node: "")
    known = WorkerState(WorkerPhase.ALIVE, "run/actor-0", 1, "a", "elsewhere")
    monitor.expect_workers(JobState(workers={"actor-0": known}))
    assert monitor.activities() == []
    join(monitor, sockets, "actor-0", "a")
    [activity] = monitor.activities()
    assert activity.slot == "actor-0" and 3.0 <= activity.elapsed_s < 60.0


def test_a_silent_process_on_a_live_machine_is_probed_there(sockets):
    monitor = Monitor(
        "here", lambda process, callback: callback(ProcessStat("S", 0.0)), lambda node: "", silence_timeout_s=SILENT_S
    )
    connection = join(monitor, sockets, "actor-0", "a")
    time.sleep(1.5 * SILENT_S)
    [silenced] = monitor.check()
    assert isinstance(silenced, WorkerSilent) and "its process is in state S" in silenced.evidence
    [recovered] = monitor.handle_message(connection, {"beat": {}})
    assert (recovered.slot, recovered.pid) == ("actor-0", 1)


def test_a_connection_that_ended_with_its_machine_is_reported_without_delay(sockets):
    monitor = Monitor("here", lambda process, callback: None, lambda node: "its node a is gone")
    monitor.handle_message(join(monitor, sockets, "actor-0", "a"), None)
    [failed] = monitor.check()
    assert (failed.kind, failed.evidence) == (
        Kind.NODE,
        "its node a is gone; in actor.update for 3.0 s at its last heartbeat",
    )


@pytest.mark.parametrize(("driver", "expected"), [("trainer", WorkerSilent), ("supervisor", WorkerFailed)])
def test_a_stopped_supervisor_is_frozen_and_a_stopped_driver_may_be_in_a_terminal(sockets, driver, expected):
    monitor = Monitor(
        "here", lambda process, callback: callback(ProcessStat("T", 0.0)), lambda node: "", silence_timeout_s=SILENT_S
    )
    join(monitor, sockets, driver, "a")
    time.sleep(1.5 * SILENT_S)
    [event] = monitor.check()
    assert type(event) is expected and event.slot == driver
    assert driver == "trainer" or (event.kind == Kind.FROZEN and "stopped (SIGSTOP)" in event.evidence)
