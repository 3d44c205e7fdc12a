"""Connect a program to a Ray cluster: the one that RAY_ADDRESS names, else one started on this machine.

`main_ppo`, `main_sft` and `hybridrl serve` call `start_ray` in the driver; the supervisor calls `start_local_cluster`
in the process that holds the cluster of a supervised run. `hybridrl job` and `submit` call `connect`.

`ray.init` waits for minutes at an address where nothing answers, in code that no signal interrupts. Therefore `connect`
first opens a connection and checks that a gRPC server answers. Then a process of its own (`question.py`) asks the
cluster whether it accepts this machine's token.
"""

import contextlib
import importlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.driver.cluster.watch import watch_in_thread
from hybridrl.driver.run_context import DriverLifecycle
from hybridrl.driver.signals import keep_sigterm_handler
from hybridrl.errors import ConfigError
from hybridrl.system.child_process import ChildProcess

logger = logging.getLogger(__name__)
SLOTS_PER_CORE = 2  # of a local cluster; workers that share a core are slow, not wrong, but each needs memory
# Ray's settings of a cluster that a program starts for itself: no events of tasks, which `ray list tasks` would show.
# They cost the driver 30 MiB, and the GCS 3.3 KiB for each of the newest 100000 tasks; with fewer, both still grew.
# And workers that get the same share of the cores as other programs: at Ray's niceness of 15 they get 3 to 7 %.
OWN_CLUSTER = {"task_events_report_interval_ms": 0, "worker_niceness": 0}
START_TIMEOUT_S = 100.0  # of a local cluster's node: less than `CLUSTER_TIMEOUT_S` of the driver that waits for it
NODE_POLL_PERIOD_S = 0.1
CONNECT_TIMEOUT_S = 5.0
QUESTION = Path(__file__).with_name("question.py")
QUESTION_TIMEOUT_S = 60.0  # the program of the question loads Ray, which takes seconds on a busy machine
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal"}  # its error is reported here
ANSWER_TIMEOUT_S = 10.0  # a cluster answers within milliseconds, on a busy machine within a second
MAX_ADDRESS = 1000  # characters
# A client's first bytes on a connection of HTTP/2, which gRPC uses: the preface, and settings without an entry. The
# server's first frame is of the same type (RFC 9113, 3.4). A frame's header has nine bytes, the fourth is its type.
HTTP2_SETTINGS = b"\x04"
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + bytes(5)
HTTP2_HEADER_BYTES, HTTP2_TYPE = 9, 3
ADDRESS = re.compile(r"(?P<client>ray://)?(?P<host>[^/]+):(?P<port>\d+)")
AUTO = "auto"  # Ray's word for the cluster of this machine
AUTH_MODE = "RAY_AUTH_MODE"
RAYLET_PID = "RAY_RAYLET_PID"
TOKEN_PLACES = "~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
ADDRESS_HINT = "start a cluster with `ray start --head`, or correct the address"


def start_ray(*, num_nodes: int = 1, lifecycle: DriverLifecycle | None = None) -> None:
    """Connect to a Ray cluster, or start one on this machine.

    Connects to the cluster that RAY_ADDRESS names. Without RAY_ADDRESS, a job of several machines connects to the
    cluster that `ray start` made here; otherwise a local cluster is started.

    Args:
        num_nodes: Machines that the job needs.
        lifecycle: Of this driver. With a supervisor, a local cluster is its, and outlives this driver.

    Raises:
        ConfigError: Ray is not installed, the cluster does not answer, or a job of several machines has none.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "trainer.backend=ray: Ray is not installed; pip install ray, or set trainer.backend=local for "
            "one process without it"
        )
    if is_connected():
        return
    if (address := existing_cluster(num_nodes=num_nodes)) is not None:
        connected = connect(
            address,
            setting="RAY_ADDRESS",
            hint="start a cluster with `ray start --head`, or unset RAY_ADDRESS to start one on this machine",
            log_to_driver=False,
        )
        import ray

        machines = sum(node["Alive"] for node in ray.nodes())
        logger.info("connected to the Ray cluster at %s, machines: %d", connected, machines)
        return
    if num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"trainer.nnodes (or rollout.nnodes)={num_nodes}: there is no cluster of several machines; run `ray start` "
            "on each machine, or set RAY_ADDRESS=HOST:PORT of a cluster; RAY_ADDRESS=local takes this machine for all"
        )
    logger.info("starting Ray on this machine")
    with keep_sigterm_handler():  # Ray's own would end the process at once
        if lifecycle is not None and lifecycle.is_supervised:
            _connect_own(lifecycle)
        else:
            start_local_cluster()
            watch_in_thread()
    import ray

    own = ray.get_runtime_context().gcs_address
    logger.info("Ray runs at %s: hybridrl job ls --address %s", own, own)


def is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster. Does not import Ray, see `import_ray`."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def existing_cluster(*, num_nodes: int = 1) -> str | None:
    """Return the address of the cluster that `start_ray` connects to; None if it starts one."""
    address = os.environ.get("RAY_ADDRESS") or (AUTO if num_nodes > 1 and cluster_started_here() else "local")
    return None if address == "local" else address


def _connect_own(lifecycle: DriverLifecycle) -> None:
    """Connect to the supervisor's cluster, which outlives this driver."""
    import ray

    try:
        address = lifecycle.ray_address()
        read_auth_mode()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, OSError) as error:
        if lifecycle.attempt > 1:
            lifecycle.request_new_job("the Ray cluster of this machine is gone")
        raise ConfigError(
            f"{error}; set RAY_ADDRESS to a running cluster, or trainer.backend=local for one process"
        ) from error


def start_local_cluster() -> str:
    """Start the Ray cluster of a training run, see `start_cluster`."""
    return start_cluster(num_cpus=SLOTS_PER_CORE * (os.cpu_count() or 1), log_to_driver=False)


def start_cluster(*, code_paths: Sequence[str] = (), **limits: Any) -> str:
    """Start a Ray cluster on this machine that ends with this process, and return its address, HOST:PORT.

    Args:
        code_paths: Directories from which the cluster's processes also import modules.
        limits: Further arguments of `ray.init`.
    """
    ray = import_ray()
    from ray.job_config import JobConfig

    with keep_sigterm_handler(), _patient_start():  # Ray's own handler would end the process at once
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            job_config=JobConfig(_py_driver_sys_path=list(code_paths)),
            _system_config={name: value for name, value in OWN_CLUSTER.items() if f"RAY_{name}" not in os.environ},
            **limits,
        )
    return ray.get_runtime_context().gcs_address


def import_ray() -> ModuleType:
    """Import Ray so that it never takes the raylet of this process for lost, and return the module.

    In a child of process 1, as in a container, Ray's library ends the process with code 1 and without a message when
    one of its calls meets a lost raylet. `ray.shutdown` after a successful run is such a call. `ClusterWatch` reports
    the loss instead. The library looks for the process that the variable `RAYLET_PID` names, and reads the variable at
    its first import. Raylets set it for their workers.
    """
    if "ray" not in sys.modules:
        os.environ[RAYLET_PID] = str(os.getpid())
        try:
            importlib.import_module("ray")
        finally:
            del os.environ[RAYLET_PID]
    return sys.modules["ray"]


@contextlib.contextmanager
def _patient_start() -> Iterator[None]:
    """Let `ray.init` in the block wait `START_TIMEOUT_S` for the node that it starts.

    Ray's own limit is a constant of 30 s, which a busy machine exceeds: the node starts a few Python processes first.
    """
    from ray._private import services

    get_node, until = services.get_node, time.monotonic() + START_TIMEOUT_S

    def wait_for_node(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:  # not there yet
                if time.monotonic() > until:
                    raise
                time.sleep(NODE_POLL_PERIOD_S)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


def connect(
    address: str, *, setting: str, hint: str = ADDRESS_HINT, code_paths: Sequence[str] = (), log_to_driver: bool = True
) -> str:
    """Connect to the cluster at `address` and return its address, HOST:PORT.

    Signals are handled while it waits.

    Args:
        address: HOST:PORT, ray://HOST:PORT, or `auto`: the only cluster of this machine.
        setting: The variable or option that has the address, for the error message.
        hint: What the reader may do if no cluster answers.
        code_paths: Directories from which the cluster's processes also import modules.
        log_to_driver: Whether what workers print appears here, too.

    Raises:
        ConfigError: No cluster answers, or it refuses this process's token. Takes `CONNECT_TIMEOUT_S` where nothing
            accepts connections, and `ANSWER_TIMEOUT_S` more where what does is no Ray cluster.
    """
    import ray
    from ray.job_config import JobConfig

    named = f"{setting}={address}"
    try:
        found = find_cluster() if address == AUTO else address
        if address == AUTO:
            _use_own_token()
        _check_answers(found)
        job_config = JobConfig(_py_driver_sys_path=list(code_paths))
        with keep_sigterm_handler():  # Ray's own would end the process at once
            ray.init(found, job_config=job_config, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(f"{named}: {_token_hint(error)}") from error
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{named}: no Ray cluster answers there ({text}); {hint}") from error
    return ray.get_runtime_context().gcs_address


def find_cluster() -> str:
    """Return the address, HOST:PORT, of the only Ray cluster on this machine.

    That is the cluster of the last `ray start`, if it answers. Ray's own search takes any of several clusters, also of
    other users, and an old address where none is left.

    Raises:
        ConnectionError: This user has none, or several.
    """
    if started := cluster_started_here():
        return started
    found = sorted(_addresses_of_own_nodes())
    if len(found) == 1:
        return found[0]
    if found:
        raise ConnectionError(f"{len(found)} clusters run on this machine: {', '.join(found)}; name one of them")
    raise ConnectionError("no cluster of this user runs on this machine")


def check_only_cluster() -> None:
    """Raise ConfigError if several Ray clusters of this user run on this machine.

    None of them is meant for certain.
    """
    found = clusters_here()
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} Ray clusters run on this machine: {', '.join(found)}; give --address HOST:PORT of the one "
            "that is meant (every run prints its own), or set RAY_ADDRESS"
        )


def clusters_here() -> list[str]:
    """Return the addresses, HOST:PORT, of this user's Ray clusters on this machine that answer."""
    started = cluster_started_here()
    by_port = {address.rpartition(":")[2]: address for address in _addresses_of_own_nodes() if _accepts(address)}
    return sorted((by_port | ({started.rpartition(":")[2]: started} if started else {})).values())


def _addresses_of_own_nodes() -> set[str]:
    """Return the addresses that this user's raylets name. Another user's process may name any, to get the token."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").split()
            if words and Path(words[0]).name == "raylet" and _is_own(folder):
                found |= {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    return found


def _is_own(folder: Path) -> bool:
    """Return whether all user ids of a process are this one's. The owner of its folder would not say: see prctl(2)."""
    [line] = [line for line in (folder / "status").read_text(errors="replace").splitlines() if line.startswith("Uid:")]
    return set(line.split()[1:]) == {str(os.getuid())}


def _accepts(address: str) -> bool:
    """Return whether something accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _check_answers(address: str) -> None:
    """Raise an error unless a Ray cluster answers at `address` and accepts this machine's token.

    Args:
        address: See `connect`. Other forms than HOST:PORT and ray://HOST:PORT are not checked.
    """
    parts = ADDRESS.fullmatch(address)
    if parts is None:
        return
    with socket.create_connection((parts["host"].strip("[]"), int(parts["port"])), timeout=CONNECT_TIMEOUT_S) as peer:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):  # the greeting would have to be encrypted
            return
        peer.settimeout(ANSWER_TIMEOUT_S)
        peer.sendall(HTTP2_GREETING)
        try:
            answer = peer.recv(HTTP2_HEADER_BYTES, socket.MSG_WAITALL)
        except TimeoutError:
            raise TimeoutError(f"it accepts connections, but is silent for {ANSWER_TIMEOUT_S:g} s") from None
    if answer[HTTP2_TYPE:][:1] != HTTP2_SETTINGS:
        raise ConnectionError("what accepts connections there is no gRPC server")
    if not parts["client"]:
        _ask_cluster(address)


def _ask_cluster(address: str) -> None:
    """Raise an error unless the cluster's control service accepts this machine's token."""
    from ray.exceptions import AuthenticationError

    ours, theirs = os.pipe()
    try:
        command = [sys.executable, str(QUESTION), address, str(theirs)]
        child = ChildProcess(command, environment={**os.environ, **QUIET}, pass_fds=[theirs])
        os.close(theirs)
        try:
            child.wait(QUESTION_TIMEOUT_S)
        finally:
            child.end()
        answer = os.read(ours, 4096).decode(errors="replace")
    finally:
        os.close(ours)
    if answer.startswith(AuthenticationError.__name__):
        raise AuthenticationError(answer.partition(": ")[2])
    if answer != "yes":
        raise ConnectionError(answer or f"it does not answer within {QUESTION_TIMEOUT_S:g} s")


def _use_own_token() -> None:
    """Turn tokens on if this machine has one and `RAY_AUTH_MODE` does not decide, as Ray does for its own cluster."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined] # compiled, without types

    if AUTH_MODE not in os.environ and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ[AUTH_MODE] = "token"
        read_auth_mode()


def _token_hint(error: Exception) -> str:
    """Return why the cluster refuses this process, and what the reader may do."""
    if os.environ.get(AUTH_MODE, "").lower() != "token":
        return f"the Ray cluster there requires a token; set {AUTH_MODE}=token, and have the token in {TOKEN_PLACES}"
    what = "there is no token" if "no authentication token" in str(error) else "the Ray cluster there refuses the token"
    return f"{what} in {TOKEN_PLACES}; put the one there that `ray get-auth-token` prints on the cluster's head"


def read_auth_mode() -> None:
    """Make Ray read its authentication mode from the environment again; it did at import."""
    import ray

    with contextlib.suppress(ImportError, AttributeError):
        ray._raylet.Config.initialize("")  # type: ignore[attr-defined] # compiled, without types


def cluster_started_here() -> str | None:
    """Return the address of the cluster that `ray start` made this machine a part of, if it answers.

    Ray's own `auto` would also choose the private cluster of another run on this machine.
    """
    address = address_of_last_start()
    return address if address is not None and _accepts(address) else None


def address_of_last_start() -> str | None:
    """Return the address that this user's `ray start` wrote down on this machine; its cluster may be gone.

    Everybody may write to the file's folder. A file of another user, or a link, is ignored.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # where Ray writes it
    try:
        with open(os.path.join(folder, "ray", "ray_current_cluster"), encoding="utf-8", opener=_open_itself) as f:
            return f.read(MAX_ADDRESS).strip() if os.fstat(f.fileno()).st_uid == os.getuid() else None
    except (OSError, ValueError):
        return None


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
