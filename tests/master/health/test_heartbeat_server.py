"""The master's port: whatever strangers send or do not send, the processes of the job are heard."""

import json
import resource
import socket
import time

import pytest

from hybridrl.master.health import heartbeat_server
from hybridrl.master.health.heartbeat_server import LOOPBACK, HeartbeatServer, needed_host

TOKEN = "the token of this job"
GARBAGE = {
    "brackets": b"[" * 30_000 + b"\n",
    "a list": b"[]\n",
    "no hello": b"{}\n",
    "hello is a number": b'{"hello": 1}\n',
    "another token": b'{"hello": {"token": "other"}}\n',
    "a token that is a list": b'{"hello": {"token": [1]}}\n',
    "not text": bytes(range(256)) + b"\n",
    "without an end": b"a" * 5000,
}


@pytest.fixture
def server():
    server = HeartbeatServer("127.0.0.1", token=TOKEN)
    yield server
    server.close()


def connect(server, data=b""):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    connection.sendall(data)
    return connection


def line(message):
    return json.dumps(message).encode() + b"\n"


def hello(slot):
    return line({"hello": {"slot": slot, "token": TOKEN}})


def messages(server, *, seconds=0.5):
    """Return (slot, message) of all that arrives."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        found += [(connection.hello.get("slot"), message) for connection, message in server.poll(0.02)]
    return found


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_closes_its_own_connection_only(server, kind):
    with connect(server, GARBAGE[kind]) as stranger, connect(server, hello("actor-0") + line({"beat": 1})) as actor:
        found = messages(server)
        assert found == [("actor-0", {"hello": {"slot": "actor-0", "token": TOKEN}}), ("actor-0", {"beat": 1})]
        assert stranger.recv(1) == b"" and len(server) == 1
        actor.sendall(line({"beat": 2}))
        assert messages(server) == [("actor-0", {"beat": 2})]


def test_a_process_of_the_job_that_sends_garbage_is_reported_as_gone(server):
    with connect(server, hello("actor-0") + b"garbage\n"):
        assert [message for _, message in messages(server)][1:] == [None]
    assert len(server) == 0


def test_hundreds_of_strangers_do_not_delay_the_messages_of_the_job(server):
    with connect(server, hello("actor-0")) as actor:
        messages(server)
        strangers = [connect(server, GARBAGE["brackets"]) for _ in range(400)]
        actor.sendall(line({"beat": 1}))
        start = time.monotonic()
        while not [1 for connection, message in server.poll(0.02) if message == {"beat": 1}]:
            assert time.monotonic() - start < 60
        for stranger in strangers:
            stranger.close()


def test_a_connection_without_hello_is_closed_after_a_while(server, monkeypatch):
    monkeypatch.setattr(heartbeat_server, "HELLO_TIMEOUT_S", 0.2)
    with connect(server) as silent, connect(server, hello("actor-0")):
        messages(server)
        assert silent.recv(1) == b"" and len(server) == 1


def test_the_oldest_connections_without_hello_are_closed_if_there_are_too_many(server, monkeypatch):
    monkeypatch.setattr(heartbeat_server, "MAX_WITHOUT_HELLO", 3)
    strangers = [connect(server) for _ in range(5)]
    messages(server)
    assert len(server) == 3 and strangers[0].recv(1) == b"" == strangers[1].recv(1)
    with connect(server, hello("actor-0")):
        assert messages(server)[0][0] == "actor-0"
    for stranger in strangers:
        stranger.close()


def test_out_of_file_descriptors_the_job_is_heard_and_later_ones_are_accepted(server, monkeypatch, caplog):
    monkeypatch.setattr(heartbeat_server, "ACCEPT_PAUSE_S", 0.3)
    with connect(server, hello("actor-0")) as actor, connect(server) as waiting:
        messages(server, seconds=0.1)
        late = [connect(server) for _ in range(5)]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno(), before[1]))
        try:
            actor.sendall(line({"beat": 1}))
            assert ("actor-0", {"beat": 1}) in messages(server, seconds=0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert caplog.text.count("no new connection is accepted") == 1
        late[0].sendall(hello("critic-0"))
        assert "critic-0" in dict(messages(server, seconds=1.0))
        for connection in late:
            connection.close()


def node(address, *, alive=True):
    return {"NodeManagerAddress": address, "Alive": alive}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ([node("10.0.0.1")], LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.1")], LOOPBACK),  # two nodes of one machine
        ([node("10.0.0.1"), node("10.0.0.2", alive=False)], LOOPBACK),
        ([node("10.0.0.1"), node("10.0.0.2")], "10.0.0.1"),
    ],
)
def test_a_master_listens_beyond_its_machine_only_if_the_cluster_has_another(nodes, host):
    assert needed_host("10.0.0.1", nodes) == host


def test_a_server_that_moves_keeps_its_connections_and_closes_the_old_address(server):
    with connect(server, hello("actor-0")) as actor:
        assert len(messages(server)) == 1
        old_port = server.port
        server.move("127.0.0.2")
        assert server.host == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", old_port), timeout=5)
        with socket.create_connection((server.host, server.port), timeout=5) as critic:
            critic.sendall(hello("critic-0"))
            actor.sendall(line({"beat": 1}))
            assert sorted(slot for slot, _ in messages(server)) == ["actor-0", "critic-0"]
        assert len(server) == 2


def test_a_server_that_cannot_move_listens_where_it_did(server):
    for _ in range(2):
        with pytest.raises(OSError):
            server.move("192.0.2.1")  # of no machine (RFC 5737)
    with connect(server, hello("actor-0")):
        assert dict(messages(server)).keys() == {"actor-0"}
