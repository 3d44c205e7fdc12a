"""Serve the page about a run (`hybridrl view`) while the run lasts, for `trainer.page_port`.

The page is a process of its own, so that it takes no time of the driver. It ends with the program that runs the driver.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

from hybridrl.errors import ConfigError
from hybridrl.system.child_process import ChildProcess

HOST = "127.0.0.1"


@contextlib.contextmanager
def served_page(directory: str, port: int) -> Iterator[None]:
    """Serve the page of the run that writes to `directory` for the duration of the block, on loopback.

    Raises:
        ConfigError: The port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"trainer.page_port={port}: cannot listen there ({error.strerror}); choose another port, or 0 for any "
                "free one"
            ) from error
    command = [sys.executable, "-m", "hybridrl.cli", "view", os.path.abspath(directory), "--port", str(port)]
    page = ChildProcess([*command, "--host", HOST])
    try:
        yield
    finally:
        page.end()
