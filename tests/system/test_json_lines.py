"""Messages over a socket, and the identity of a machine."""

import socket
import subprocess
import sys
import time

import pytest

from hybridrl.system.json_lines import MessageReader, send_message
from hybridrl.system.machine import boot_id, machine_id, shared_memory_id


def test_messages_arrive_in_order_however_their_bytes_are_cut():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for number in range(3):
            send_message(ours, {"number": number, "text": "a\nb"})
        data = theirs.recv(65536)
    for size in (1, 7, len(data)):
        reader, received = MessageReader(), []
        for start in range(0, len(data), size):
            received += reader.messages(data[start : start + size])
        assert [message["number"] for message in received] == [0, 1, 2] and received[0]["text"] == "a\nb"
        assert reader.num_pending == 0


def test_half_a_message_is_pending():
    reader = MessageReader()
    assert list(reader.messages(b'{"a": 1}\n{"b')) == [{"a": 1}] and reader.num_pending == 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello\n", "Expecting value"),
        (b"[1]\n", "a list, not an object"),
        (b"[" * 30_000 + b"\n", "nested too deeply|longer than"),
        (b'{"a": "' + b"a" * 50_000, "longer than 40000 bytes"),
        (b'{"a": "' + b"a" * 50_000 + b'"}\n', "longer than 40000 bytes"),
        (b"\xff\n", "decode|utf-8"),
    ],
)
def test_a_line_that_is_no_message_is_an_error(line, reason):
    with pytest.raises(ValueError, match=reason):
        list(MessageReader(40_000).messages(line))


def test_a_long_message_arrives_in_linear_time():
    reader, part = MessageReader(), b"a" * 1000
    start = time.process_time()
    list(reader.messages(b'{"a": "'))
    for _ in range(4000):
        assert not list(reader.messages(part))
    [message] = reader.messages(b'"}\n')
    assert len(message["a"]) == 4_000_000 and time.process_time() - start < 1.0


def test_two_processes_of_one_machine_agree_on_its_ids():
    code = "from hybridrl.system.machine import machine_id, shared_memory_id; print(machine_id(), shared_memory_id())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == f"{machine_id()} {shared_memory_id()}" and boot_id() in machine_id()
