"""A cluster holder with stand-ins for Ray's processes, for tests.

    python -m tests.support.driver.held_cluster FOLDER SECONDS [orphan | killed | reported]

The stand-ins are a shell named `raylet` and below it `sleep` named `worker`. Prints their ids. An empty line
ends the parent's side; then prints the exit code of the holder. A process that is stopped for SECONDS is lost.
With `orphan` this process is the holder, and its parent's side has ended. With `killed` the holder gets SIGKILL; with
`reported` its raylet is stopped after the driver has reported the end.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from hybridrl.driver.cluster import holder, watch
from hybridrl.system.child_guard import children_of


def start_stand_ins(folder: Path) -> str:
    for name in ("raylet", "worker"):
        (folder / name).symlink_to(shutil.which("sh" if name == "raylet" else "sleep") or "")
    raylet = subprocess.Popen([folder / "raylet", "-c", f"{folder}/worker 120; sleep 120"])
    while not (below := children_of(raylet.pid)):
        time.sleep(0.01)
    print(raylet.pid, *below, flush=True)
    return "an address"


def hold(folder: Path) -> tuple[int, socket.socket]:
    """Fork a holder; return its id and the socket whose end it waits for."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        holder.hold_cluster(lambda: start_stand_ins(folder), theirs, mask=set(), ignored=[signal.SIGTERM])
    theirs.close()
    return pid, ours


if __name__ == "__main__":
    watch.FREEZE_TIMEOUT_S = float(sys.argv[2])
    if sys.argv[3:] == ["orphan"]:
        ended, parent = socket.socketpair()
        ended.close()
        holder.hold_cluster(lambda: start_stand_ins(Path(sys.argv[1])), parent, mask=set(), ignored=[])
    if sys.argv[3:] in (["killed"], ["reported"]):
        cluster = holder.HeldCluster(lambda: start_stand_ins(Path(sys.argv[1])), set(), ignored=[])
        cluster.request(close_fds=[])
        while cluster.poll_answer() is None:
            time.sleep(0.01)
        [holding] = children_of(os.getpid())
        if sys.argv[3] == "killed":
            os.kill(holding, signal.SIGKILL)
        else:
            cluster.end_reports()
            os.kill(children_of(holding)[0], signal.SIGSTOP)
            while not cluster.has_exited():
                time.sleep(0.01)
        cluster.stop()
        sys.exit()
    holder, end = hold(Path(sys.argv[1]))

    def close_on_input() -> None:
        sys.stdin.readline()
        end.close()

    threading.Thread(target=close_on_input, daemon=True).start()
    print(os.waitstatus_to_exitcode(os.waitpid(holder, 0)[1]), flush=True)
