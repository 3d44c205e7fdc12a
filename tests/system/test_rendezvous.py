"""The port of a process group: held from its choice to its use, and at one address only."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.system.rendezvous import reserve_address, take_listener

ROOT = Path(__file__).parents[2]
JOIN = """
import os, sys
from hybridrl.system.rendezvous import reserve_address
from hybridrl.workers.process_setup import join_process_group, sum_over_ranks
if sys.argv[1] == "0":
    host, port = reserve_address("127.0.0.1")
    print(port, flush=True)
    os.environ["MASTER_PORT"] = str(port)
join_process_group("cpu")
print(sum_over_ranks([1.0], device="cpu"), flush=True)
sys.stdin.readline()
"""


def listening(port: int) -> list[str]:
    """Return the local addresses, in the kernel's hexadecimal form, that listen at a port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


def test_no_other_process_gets_a_reserved_port():
    _, port = reserve_address("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    listener = take_listener(port)
    assert listener.getsockname() == ("127.0.0.1", port) and listening(port) == ["0100007F"]
    listener.close()
    assert take_listener(port) is None


def test_a_user_may_listen_at_the_reserved_port_with_torch_itself():
    from datetime import timedelta

    from torch import distributed as dist

    _, port = reserve_address("127.0.0.1")
    store = dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=20))
    store.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.timeout(120)
def test_rank_0_of_a_group_listens_at_the_given_address_and_nowhere_else():
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks: list[subprocess.Popen] = []

    def start(rank: int, **variables: str) -> subprocess.Popen:
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", JOIN, str(rank)],
                env=os.environ | group | {"RANK": str(rank)} | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
        return ranks[-1]

    try:
        first = start(0)
        port = int(first.stdout.readline())
        second = start(1, MASTER_PORT=str(port))
        assert [rank.stdout.readline() for rank in (first, second)] == ["[2.0]\n"] * 2
        assert listening(port) == ["0100007F"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
