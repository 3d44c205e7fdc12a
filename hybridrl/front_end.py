"""What every `python -m hybridrl.main_*` does around its work: start Ray, and say what went wrong in a line a person can act on."""

import contextlib
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec

from hybridrl.errors import ConfigError, DataError, HybridRLError, PlacementError
from hybridrl.trainer.checkpoint import CheckpointStore
from hybridrl.trainer.leaving import EXIT_CODE, NOTICE, Terminated
from hybridrl.trainer.life import LIFE

logger = logging.getLogger(__name__)
SLOTS_PER_CORE = 2  # of a local cluster: workers that share a core are slow, not wrong, but each takes memory
OBJECT_STORE_BYTES = 512 * 1024**2  # of a local CPU cluster; a batch of text is megabytes
KNOCK_TIMEOUT_S = 5.0
PLAIN_ADDRESS = re.compile(r"[^/]+:\d+")  # not ray://HOST:PORT


def run_front_end(work: Callable[[], None], *, log_directory: Callable[[], str | None]) -> int:
    """Run `work` and return the exit code: 0, 2 for a mistake in the command, 1 for a failure, 130 for Ctrl-C, 143 for SIGTERM.

    A run that SIGTERM finds in training commits first, see `trainer/leaving.py`. An error is one readable line, with the way out in it. The
    whole traceback, a remote worker's included, goes into `error.log` in the directory that `log_directory()` returns, if there is one;
    without one, only what is not our own error shows its traceback.
    """
    try:
        with NOTICE.heard():
            work()
        return 0
    except (ConfigError, DataError, PlacementError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (KeyboardInterrupt, Terminated) as error:
        sys.stderr.write(f"{_interrupted(log_directory(), 'terminated' if isinstance(error, Terminated) else 'interrupted')}\n")
        return EXIT_CODE if isinstance(error, Terminated) else 130
    except Exception as error:
        directory = log_directory()
        if NOTICE.received:  # whoever sent it may have sent it to the workers, too
            sys.stderr.write(f"{_interrupted(directory, 'terminated')} ({describe(error)})\n")
            return EXIT_CODE
        expected = isinstance(error, HybridRLError) and directory is None
        sys.stderr.write(f"{describe(error)}\n" + ("" if expected else f"{_keep_traceback(error, directory)}\n"))
        return 1


def _interrupted(directory: str | None, how: str) -> str:
    """Say where the next run begins."""
    newest = None if directory is None else CheckpointStore(directory).latest()
    if newest is not None:
        return f"{how}; {newest} is committed, and the next run goes on from it unless trainer.resume_mode says otherwise"
    return f"{how}; nothing was committed, the next run starts anew" + (
        "" if directory is None else " (trainer.save_freq=N commits every N steps)"
    )


def describe(error: Exception) -> str:
    """Return an error in one line: its type, its message, and the notes that say where it happened."""
    notes = "; ".join(getattr(error, "__notes__", []))
    name = "" if isinstance(error, HybridRLError) else f"{type(error).__name__}: "
    return f"error: {name}{error}" + (f" ({notes})" if notes else "")


def _keep_traceback(error: Exception, directory: str | None) -> str:
    text = getattr(error, "remote_traceback", "") + "".join(traceback.format_exception(error))
    if directory is None or not os.path.isdir(directory):
        return text
    path = os.path.join(directory, "error.log")
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError:  # a full disk, perhaps the very error that is to be kept
        return text
    return f"the whole traceback is in {path}"


def set_up_logging() -> None:
    """Log our own sentences at INFO, everybody else's from WARNING, and show no other library's progress bars."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hybridrl").setLevel(logging.INFO)


def start_ray(*, num_nodes: int = 1) -> None:
    """Connect to a Ray cluster, or start one on this machine. num_nodes: how many machines the job wants.

    The cluster that RAY_ADDRESS names is joined; without it, for a job of several machines, the one that `ray start` made here.
    Raises ConfigError where Ray is not installed, or where that cluster does not answer.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "trainer.backend=ray: Ray is not installed; pip install ray, or set trainer.backend=local for one process without it"
        )
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or ("auto" if num_nodes > 1 and _cluster_started_here() else "local")
    if address != "local":
        _join(address)
        return
    if num_nodes > 1:
        logger.warning("no `ray start` was run here and RAY_ADDRESS names no cluster: all %d machines of this job are this one", num_nodes)
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
        with contextlib.suppress(ImportError, AttributeError):  # Ray has read its environment, and with it the way it authenticates
            ray._raylet.Config.initialize("")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, OSError) as error:
        if LIFE.number > 1:
            LIFE.lost_the_job("the Ray cluster of this machine is gone")
        raise ConfigError(f"{error}; set RAY_ADDRESS to a cluster that runs, or trainer.backend=local for one process") from error


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
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({' '.join(str(error).split())}); start one with `ray start --head`, "
            "set RAY_AUTH_MODE=token if it wants a token, or unset RAY_ADDRESS and this run starts a cluster on this machine"
        ) from error
    NOTICE.listen_again()
    logger.info("joined the Ray cluster at %s, machines: %d", context.address_info["address"], sum(node["Alive"] for node in ray.nodes()))


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
