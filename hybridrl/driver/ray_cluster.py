"""The Ray cluster of a program: joined where RAY_ADDRESS says, started on this machine otherwise."""

import contextlib
import logging
import os
import re
import socket
from importlib.util import find_spec

from hybridrl.driver.lifecycle import LIFE
from hybridrl.driver.termination import NOTICE
from hybridrl.errors import ConfigError

logger = logging.getLogger(__name__)
SLOTS_PER_CORE = 2  # of a local cluster: workers that share a core are slow, not wrong, but each takes memory
OBJECT_STORE_BYTES = 512 * 1024**2  # of a local CPU cluster; a batch of text is megabytes
KNOCK_TIMEOUT_S = 5.0
PLAIN_ADDRESS = re.compile(r"[^/]+:\d+")  # not ray://HOST:PORT


def start_ray(*, num_nodes: int = 1) -> None:
    """Connect to a Ray cluster, or start one on this machine. num_nodes: how many machines the job wants.

    The cluster that RAY_ADDRESS names is joined; without it, for a job of several machines, the one that `ray start`
    made here. Raises ConfigError where Ray is not installed, or where that cluster does not answer.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "trainer.backend=ray: Ray is not installed; pip install ray, or set trainer.backend=local for "
            "one process without it"
        )
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or ("auto" if num_nodes > 1 and _cluster_started_here() else "local")
    if address != "local":
        _join(address)
        return
    if num_nodes > 1:
        logger.warning(
            "no `ray start` was run here and RAY_ADDRESS names no cluster: all %d machines of this job are this one",
            num_nodes,
        )
    logger.info("starting Ray on this machine")
    if LIFE.is_kept:
        _join_own()
    else:
        start_local_cluster()
    NOTICE.listen_again()  # Ray's own handler would end the process at once


def _join_own() -> None:
    """Connect to the cluster that outlives this driver."""
    import ray

    try:
        address = LIFE.cluster()
        with contextlib.suppress(
            ImportError, AttributeError
        ):  # Ray has read its environment, and with it the way it authenticates
            ray._raylet.Config.initialize("")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, OSError) as error:
        if LIFE.number > 1:
            LIFE.lost_the_job("the Ray cluster of this machine is gone")
        raise ConfigError(
            f"{error}; set RAY_ADDRESS to a cluster that runs, or trainer.backend=local for one process"
        ) from error


def start_local_cluster() -> str:
    """Start a Ray cluster on this machine, which ends with this process, and return its address, HOST:PORT."""
    import ray

    ray.init(
        address="local",
        num_cpus=SLOTS_PER_CORE * (os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=None if cuda_machine() else OBJECT_STORE_BYTES,
    )
    return ray.get_runtime_context().gcs_address


def _join(address: str) -> None:
    """Connect to the cluster at `address`: HOST:PORT, `auto`, or what else Ray takes."""
    import ray

    try:
        if PLAIN_ADDRESS.fullmatch(address):  # ray.init would try for half a minute, and write twenty lines
            _knock(address)
        context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({' '.join(str(error).split())}); start "
            "one with `ray start --head`, "
            "set RAY_AUTH_MODE=token if it wants a token, or unset RAY_ADDRESS and this run starts a "
            "cluster on this machine"
        ) from error
    NOTICE.listen_again()
    logger.info(
        "joined the Ray cluster at %s, machines: %d",
        context.address_info["address"],
        sum(node["Alive"] for node in ray.nodes()),
    )


def _cluster_started_here() -> bool:
    """Return whether `ray start` made this machine part of a cluster, and it answers.

    Ray's own `auto` would also take the private cluster of another run on this machine.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray looks for it
    try:
        with open(os.path.join(folder, "ray", "ray_current_cluster"), encoding="utf-8") as f:
            _knock(f.read().strip())
    except (OSError, ValueError):
        return False
    return True


def _knock(address: str) -> None:
    """Raise OSError unless something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_TIMEOUT_S).close()


def cuda_machine() -> bool:
    """Return whether this machine has CUDA devices, without importing torch."""
    return os.path.exists("/proc/driver/nvidia/version")
