"""`hybridrl doctor` on names, interfaces, ports and the address of a cluster."""

import socket

import pytest

from hybridrl.doctor.network import examine_network


def findings(**environment: str) -> dict:
    return {finding.name: finding for finding in examine_network(environment)}


@pytest.mark.parametrize(
    ("setting", "value", "is_right"),
    [
        ("NCCL_SOCKET_IFNAME", "l", True),  # a beginning
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "nowhere,lo", True),
        ("NCCL_SOCKET_IFNAME", "^nowhere", True),
        ("NCCL_SOCKET_IFNAME", "ib9", False),
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
    ],
)
def test_a_setting_that_names_no_interface_is_a_problem(setting, value, is_right):
    found = findings(**{setting: value})[setting]
    assert found.is_problem != is_right
    assert is_right or "lo" in found.change


def test_an_address_where_nothing_answers_is_a_problem():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not findings(RAY_ADDRESS=address)["RAY_ADDRESS"].is_problem
        bracketed = f"[127.0.0.1]:{server.getsockname()[1]}"  # as IPv6 is written, which not every machine has
        assert not findings(RAY_ADDRESS=bracketed)["RAY_ADDRESS"].is_problem
    closed = findings(RAY_ADDRESS=address)["RAY_ADDRESS"]
    assert closed.is_problem and address in closed.seen
    assert findings(RAY_ADDRESS="my-cluster")["RAY_ADDRESS"].is_problem
    assert not findings(RAY_ADDRESS="auto")["RAY_ADDRESS"].is_problem


def test_without_settings_the_host_name_and_the_ports_are_examined():
    assert [*findings()] == ["host name", "ports"]
