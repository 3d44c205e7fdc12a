"""The address at which rank 0 of a group listens for torch.distributed.

It is reserved when the group is set up.

    host, port = reserve_address("127.0.0.1")    # in rank 0's process, before the other ranks get the address
    listener = take_listener(port)               # there, when the process group is made

A socket holds the port in between, so that no other process gets it. It does not listen yet: code of users may also
call `init_process_group()` itself, and torch can listen at the port all the same (SO_REUSEADDR).
"""

import socket

_RESERVED: dict[int, socket.socket] = {}  # port -> the socket of this process that holds it


def reserve_address(host: str) -> tuple[str, int]:
    """Reserve a port of this process at an address of this machine; return host and port."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(address)
    port: int = held.getsockname()[1]
    _RESERVED[port] = held
    return host, port


def take_listener(port: int) -> socket.socket | None:
    """Return the socket that listens at a reserved port, once; None if this process has not reserved it."""
    held = _RESERVED.pop(port, None)
    if held is not None:
        held.listen()
    return held
