"""Checks that processes of this machine can reach one another, and those of other machines."""

import importlib.metadata
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridrl.doctor.finding import Finding

CONNECT_TIMEOUT_S = 2.0
MIN_PORTS = 2000  # Ray takes several per process, and torch one per process group
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
INFINIBAND = Path("/sys/class/infiniband")
INTERFACE_SETTINGS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def examine_network(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what was found about names, interfaces, ports and the cluster.

    Args:
        environment: `RAY_ADDRESS` and the settings of NCCL and Gloo are read from it.
    """
    yield _host_name()
    interfaces = [name for _, name in socket.if_nameindex()]
    yield from (
        _interfaces(name, environment[name], interfaces) for name in INTERFACE_SETTINGS if environment.get(name)
    )
    yield _ports(PORT_RANGE.read_text())
    if address := environment.get("RAY_ADDRESS"):
        yield _cluster(address)


def examine_nccl(environment: Mapping[str, str] = os.environ) -> Finding:
    """Return what NCCL, which a machine with GPUs needs, has here."""
    installed = [
        f"{found.name} {found.version}"
        for found in importlib.metadata.distributions()
        if (found.name or "").startswith("nvidia-nccl")
    ]
    devices = sorted(path.name for path in INFINIBAND.glob("*"))
    disabled = environment.get("NCCL_IB_DISABLE", "0") != "0"
    seen = f"{', '.join(installed) or 'no package'}; InfiniBand: {', '.join(devices) or 'none'}"
    if not installed:
        return Finding("NCCL", seen, "install torch for CUDA: it brings NCCL")
    if devices and disabled:
        return Finding("NCCL", f"{seen}; NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE: traffic takes TCP")
    return Finding("NCCL", seen)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding("host name", f"{name} has no address ({error})", f"add a line for {name} to /etc/hosts")
    return Finding("host name", f"{name} is {address}")


def _interfaces(setting: str, value: str, interfaces: list[str]) -> Finding:
    """Return whether a setting names an interface: Gloo takes names, NCCL beginnings, "=name" and "^beginning"."""
    is_excluded, names = value.startswith("^"), value.lstrip("^=").split(",")
    is_exact = setting.startswith("GLOO") or value.startswith("=")
    chosen = [
        interface
        for interface in interfaces
        if any(interface == name if is_exact else interface.startswith(name) for name in names) != is_excluded
    ]
    change = "" if chosen else f"unset {setting}, or name one of {', '.join(interfaces)}"
    return Finding(setting, f"{value} chooses {', '.join(chosen) or 'no interface'}", change)


def _ports(text: str) -> Finding:
    low, high = map(int, text.split())
    change = f"widen it: sysctl net.ipv4.ip_local_port_range='32768 60999' (at least {MIN_PORTS})"
    return Finding("ports", f"programs get ports {low} to {high}", change if high - low < MIN_PORTS else "")


def _cluster(address: str) -> Finding:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        is_name = address in ("auto", "local")
        change = "" if is_name else "RAY_ADDRESS=HOST:PORT, as `ray start` prints it"
        return Finding("RAY_ADDRESS", address, change)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        change = "start the cluster (`ray start --head`), open the port in the firewall, or unset RAY_ADDRESS"
        return Finding("RAY_ADDRESS", f"nothing answers at {address} ({error})", change)
    return Finding("RAY_ADDRESS", f"{address} answers")
