"""Connect a program to a Ray cluster: the one that RAY_ADDRESS names, else one started on this machine.

Called by `main_ppo`, `main_sft` and `hybridrl serve` in the driver; the supervisor calls `start_local_cluster` in the
process that holds the cluster of a supervised run.
"""

import contextlib
import logging
import os
import re
import socket
from importlib.util import find_spec

from hybridrl.driver.lifecycle import DriverLifecycle
from hybridrl.driver.termination import keep_sigterm_handler
from hybridrl.errors import ConfigError

logger = logging.getLogger(__name__)
SLOTS_PER_CORE = 2  # of a local cluster; workers that share a core are slow, not wrong, but each needs memory
OBJECT_STORE_BYTES = 512 * 1024**2  # of a local CPU cluster; a batch of text takes megabytes
CONNECT_TIMEOUT_S = 5.0
PLAIN_ADDRESS = re.compile(r"[^/]+:\d+")  # not ray://HOST:PORT


def start_ray(*, num_nodes: int = 1, lifecycle: DriverLifecycle | None = None) -> None:
    """Connect to a Ray cluster, or start one on this machine.

    Connects to the cluster that RAY_ADDRESS names. Without RAY_ADDRESS, a job of several machines connects to the
    cluster that `ray start` made here; otherwise a local cluster is started.

    Args:
        num_nodes: Machines that the job needs.
        lifecycle: Of this driver. With a supervisor, a local cluster is its, and outlives this driver.

    Raises:
        ConfigError: Ray is not installed, or the cluster does not answer.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "trainer.backend=ray: Ray is not installed; pip install ray, or set trainer.backend=local for "
            "one process without it"
        )
    import ray

    if ray.is_initialized():
        return
    if (address := existing_cluster(num_nodes=num_nodes)) is not None:
        _connect(address)
        return
    if num_nodes > 1:
        logger.warning(
            "no `ray start` was run here and RAY_ADDRESS names no cluster: all %d machines of this job are this one",
            num_nodes,
        )
    logger.info("starting Ray on this machine")
    with keep_sigterm_handler():  # Ray's own would end the process at once
        if lifecycle is not None and lifecycle.is_supervised:
            _connect_own(lifecycle)
        else:
            start_local_cluster()


def existing_cluster(*, num_nodes: int = 1) -> str | None:
    """Return the address of the cluster that `start_ray` connects to; None if it starts one."""
    address = os.environ.get("RAY_ADDRESS") or ("auto" if num_nodes > 1 and _cluster_started_here() else "local")
    return None if address == "local" else address


def _connect_own(lifecycle: DriverLifecycle) -> None:
    """Connect to the supervisor's cluster, which outlives this driver."""
    import ray

    try:
        address = lifecycle.ray_address()
        # Ray read its authentication mode from the environment at import; read it again.
        with contextlib.suppress(ImportError, AttributeError):
            ray._raylet.Config.initialize("")  # type: ignore[attr-defined] # compiled, without types
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, OSError) as error:
        if lifecycle.attempt > 1:
            lifecycle.request_new_job("the Ray cluster of this machine is gone")
        raise ConfigError(
            f"{error}; set RAY_ADDRESS to a running cluster, or trainer.backend=local for one process"
        ) from error


def start_local_cluster() -> str:
    """Start a Ray cluster on this machine that ends with this process, and return its address, HOST:PORT."""
    import ray

    ray.init(
        address="local",
        num_cpus=SLOTS_PER_CORE * (os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=None if has_cuda_device() else OBJECT_STORE_BYTES,
    )
    return ray.get_runtime_context().gcs_address


def _connect(address: str) -> None:
    """Connect to the cluster at `address`: HOST:PORT, `auto`, or another form that Ray accepts."""
    import ray

    try:
        if PLAIN_ADDRESS.fullmatch(address):  # ray.init would retry for 30 s and print 20 lines
            _check_accepts_connections(address)
        with keep_sigterm_handler():
            context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({' '.join(str(error).split())}); start "
            "one with `ray start --head`, set RAY_AUTH_MODE=token if it requires a token, or unset RAY_ADDRESS to "
            "start a cluster on this machine"
        ) from error
    logger.info(
        "connected to the Ray cluster at %s, machines: %d",
        context.address_info["address"],  # type: ignore[attr-defined] # Ray annotates the base class
        sum(node["Alive"] for node in ray.nodes()),
    )


def _cluster_started_here() -> bool:
    """Return whether `ray start` made this machine part of a cluster that answers.

    Ray's own `auto` would also choose the private cluster of another run on this machine.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # where Ray writes it
    try:
        with open(os.path.join(folder, "ray", "ray_current_cluster"), encoding="utf-8") as f:
            _check_accepts_connections(f.read().strip())
    except (OSError, ValueError):
        return False
    return True


def _check_accepts_connections(address: str) -> None:
    """Raise OSError unless HOST:PORT accepts connections."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def has_cuda_device() -> bool:
    """Return whether this machine has CUDA devices, without importing torch."""
    return os.path.exists("/proc/driver/nvidia/version")
