"""Ports of this machine."""

import random
import socket
from contextlib import suppress

RANGE = 20_000, 30_000  # below the ports that Linux gives to connections: such a one could be taken before it is used
_CHOICE = random.SystemRandom()  # not that of a test, which is seeded: tests of other processes draw at the same time


def free_port() -> int:
    """Return a port that nothing listens on."""
    while True:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", _CHOICE.randrange(*RANGE)))
            return probe.getsockname()[1]
