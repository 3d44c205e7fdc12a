"""What a monitor makes of silence and of connections that end, for processes of another machine."""

import socket
import time
from contextlib import ExitStack

import pytest

from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.kernel_process import Condition
from hybridrl.master.health.monitor import Monitor
from hybridrl.master.state.events import Failed, Kind, Silenced

SILENT_S = 0.2


@pytest.fixture
def sockets():
    with ExitStack() as stack:
        yield stack


def join(monitor, sockets, slot, node):
    """A process of another machine says its first words."""
    ours, theirs = map(sockets.enter_context, socket.socketpair())
    hello = {"slot": slot, "name": f"run/{slot}", "pid": 1, "node": node, "machine": "elsewhere"}
    connection = Connection(ours, hello)
    monitor.hear(connection, {"hello": hello})
    monitor.hear(connection, {"beat": {"doing": "actor.update", "for_s": 3.0, "calls": 1}})
    return connection


def test_all_processes_of_a_machine_that_went_without_a_word_are_lost_with_it(sockets):
    gone, asked = set(), []

    def look_at_node(node):
        return f"{node} is gone" if node in gone else ""

    monitor = Monitor("here", lambda presence, tell: asked.append(presence.slot), look_at_node, silent_s=SILENT_S)
    for slot, node in (("actor-0", "a"), ("actor-1", "a"), ("actor-2", "b")):
        join(monitor, sockets, slot, node)
    assert monitor.look() == []
    gone.add("a")
    time.sleep(1.5 * SILENT_S)
    failed = monitor.look()
    assert [(type(event), event.kind, event.slot) for event in failed] == [
        (Failed, Kind.NODE, "actor-0"),
        (Failed, Kind.NODE, "actor-1"),
    ]
    assert failed[0].evidence == "a is gone; in actor.update for 3.0 s when last heard"
    assert asked == ["actor-2"]  # its node answers: what does the process do?
    assert list(monitor.presences) == ["actor-2"]


def test_a_silent_process_whose_machine_answers_is_looked_at_there(sockets):
    monitor = Monitor("here", lambda presence, tell: tell(Condition("S", 0.0)), lambda node: "", silent_s=SILENT_S)
    connection = join(monitor, sockets, "actor-0", "a")
    time.sleep(1.5 * SILENT_S)
    [silenced] = monitor.look()
    assert isinstance(silenced, Silenced) and "its process is in state S" in silenced.evidence
    [spoke] = monitor.hear(connection, {"beat": {}})
    assert (spoke.slot, spoke.pid) == ("actor-0", 1)


def test_a_connection_that_ended_with_its_machine_is_known_without_waiting(sockets):
    monitor = Monitor("here", lambda presence, tell: None, lambda node: "its node a is gone")
    monitor.hear(join(monitor, sockets, "actor-0", "a"), None)
    [failed] = monitor.look()
    assert (failed.kind, failed.evidence) == (
        Kind.NODE,
        "its node a is gone; in actor.update for 3.0 s when last heard",
    )
