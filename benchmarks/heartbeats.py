"""Cost of monitoring: the CPU of heartbeats in a worker, and of a master with many workers.

    python benchmarks/heartbeats.py [--workers 1000] [--seconds 20]

The workers are simulated by connections of one process. Each sends a real worker's line once a second. The master is
the real one, in its own process, with its journal. It runs on the Ray cluster of RAY_ADDRESS, or on one started here.
One real heartbeat thread is measured by the CPU time of an otherwise idle process.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import ray

from hybridrl.master.service.client import start_master
from hybridrl.master.state.events import JobEnded, JobStarted, encode
from hybridrl.single_controller.cluster import master_name
from hybridrl.single_controller.monitoring.heartbeat_client import machine_id
from hybridrl.system.process_stat import read_process_stat

ONE_WORKER = """
import sys, time, ray
from hybridrl.single_controller.monitoring.heartbeat_client import HeartbeatClient
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
seconds = float(sys.argv[3])
time.sleep(3)
def cpu(): return time.process_time()
start = cpu(); time.sleep(seconds); without = cpu() - start
identity = {"slot": "real-0", "name": "run/real-0"}
beats = HeartbeatClient(sys.argv[2], identity, lambda: {"doing": "actor.update", "elapsed_s": 1.0, "calls": 1})
time.sleep(3)
start = cpu(); time.sleep(seconds); print(cpu() - start, without)
beats.stop()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    own = (
        {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 10**8}
    )
    context = ray.init(log_to_driver=False, logging_level="ERROR", **own)
    with tempfile.TemporaryDirectory() as folder:
        master = start_master(JobStarted("simulated", "simulated-1"), os.path.join(folder, "journal"))
        pid = ray.get(master.describe.remote())["pid"]
        idle = cpu_share(pid, arguments.seconds)
        with_heartbeats, without = one_worker(context.address_info["gcs_address"], arguments.seconds)
        start = time.monotonic()
        connections = join(ray.get(master.address.remote()), arguments.workers)
        while len(ray.get(master.describe.remote())["workers"]) < arguments.workers:
            time.sleep(0.2)
        joined = time.monotonic() - start
        beat(connections, 3.0)
        before, start = read_process_stat(pid).cpu_s, time.monotonic()
        beat(connections, arguments.seconds)
        share = (read_process_stat(pid).cpu_s - before) / (time.monotonic() - start)
        start = time.monotonic()
        seen = ray.get(master.describe.remote())
        answered = time.monotonic() - start
        end(connections[0])
    print(f"heartbeats of one process: {(with_heartbeats - without) / arguments.seconds:.3%} of a core")
    print(f"a master without workers: {idle:.2%} of a core")
    print(f"{arguments.workers} workers joined it within {joined:.1f} s")
    num_received = sum(bool(beat) for beat in seen["beats"].values())
    print(
        f"a master with {num_received} workers: {share:.2%} of a core, {resident(pid)}; it describes them all in "
        f"{answered * 1e3:.0f} ms"
    )
    ray.shutdown()


def one_worker(address: str, seconds: float) -> tuple[float, float]:
    """Return the CPU seconds of a process with heartbeats, and of the same one without."""
    command = [sys.executable, "-c", ONE_WORKER, address, master_name("simulated-1"), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120 + 3 * seconds)
    with_heartbeats, without = map(float, done.stdout.split())
    return with_heartbeats, without


def cpu_share(pid: int, seconds: float) -> float:
    before = read_process_stat(pid).cpu_s
    time.sleep(seconds)
    return (read_process_stat(pid).cpu_s - before) / seconds


def join(address: tuple[str, int, str], count: int) -> list[socket.socket]:
    host, port, token = address
    connections = []
    node = ray.get_runtime_context().get_node_id()
    for rank in range(count):
        hello = {"slot": f"worker-{rank}", "name": f"simulated-1/worker-{rank}", "group_size": count, "token": token}
        hello |= {"pid": os.getpid(), "node": node, "machine": machine_id()}
        connection = socket.create_connection((host, port), timeout=60)
        connection.sendall(json.dumps({"hello": hello}).encode() + b"\n")
        connections.append(connection)
    return connections


def beat(connections: list[socket.socket], seconds: float) -> None:
    """Send one line a second on each connection, evenly spread over the second."""
    start = time.monotonic()
    for second in range(int(seconds)):
        for i, connection in enumerate(connections):
            time.sleep(max(0.0, start + second + i / len(connections) - time.monotonic()))
            word = {"doing": "actor.update_actor", "elapsed_s": 1.5, "calls": 7, "cpu_s": 10.0, "oom_kills": 0}
            room = {"memory": [2**34, 2**35], "/dev/shm": [2**33, 2**34], "Ray's directory": [2**36, 2**37]}
            word |= {"memory": 2**30, "private": 2**29, "capacity": room}
            word |= {"last_method": "actor.compute_log_prob", "ended": {"actor.compute_log_prob": [0.5 + second / 100]}}
            connection.sendall(json.dumps({"beat": word}).encode() + b"\n")


def end(connection: socket.socket) -> None:
    connection.sendall(json.dumps({"report": {"number": 1, **encode(JobEnded(True, "measured"))}}).encode() + b"\n")


def resident(pid: int) -> str:
    with open(f"/proc/{pid}/statm", encoding="ascii") as f:
        return f"{int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB resident"


if __name__ == "__main__":
    main()
