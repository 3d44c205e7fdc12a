"""Workers of a Ray cluster of the tests, forked from a process that has imported the libraries once.

Ray starts a new interpreter for each worker. With torch, transformers and an engine it takes 5 s of CPU; a fork, 0.4 s.
`ray` itself is imported by the fork: its library reads the variables of a worker when it is loaded.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, process
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.fork_request import ADDRESS
from tests.support.ranks import FORKS


@contextmanager
def forked_workers(folder: Path) -> Iterator[None]:
    """Have the clusters that this process starts in this context fork their workers; `folder` gets the socket.

    They also start neither a log monitor, since no driver prints its workers' lines, nor an autoscaler.
    """
    from ray._private.parameter import RayParams

    def with_request(params: Any, *args: Any, **kwargs: Any) -> None:
        started(params, *args, **kwargs)
        params.setup_worker_path = str(Path(__file__).with_name("fork_request.py"))
        params.include_log_monitor, params.no_monitor = False, True

    started = RayParams.__init__
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "forks"))
        listener.listen(64)
        server = FORKS.Process(target=serve, args=(listener,))
        server.start()
        os.environ[ADDRESS] = listener.getsockname()
        RayParams.__init__ = with_request
        try:
            yield
        finally:
            RayParams.__init__ = started
            del os.environ[ADDRESS]
            server.terminate()
            server.join()


def serve(listener: socket.socket) -> None:
    """Fork a worker for each request, until the process of the tests has ended.

    Returns in each worker, too, at its end.
    """
    parent = process.parent_process()
    assert parent is not None and "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets workers that have ended
    gc.freeze()  # pages stay shared
    while listener in connection.wait([listener, parent.sentinel]):
        with listener.accept()[0] as client, client.makefile("rb") as stream:
            request = json.load(stream)
        if os.fork() == 0:
            listener.close()
            run_worker(request)
            return


def run_worker(request: dict[str, Any]) -> None:
    """Be the worker that a command starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    np.random.seed()
    sys.argv = request["command"]
    runpy.run_path(sys.argv[0], run_name="__main__")
