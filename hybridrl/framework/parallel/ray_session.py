"""The Ray cluster of a group: the running one, or one that is started for it."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence

from hybridrl.driver.cluster.ray_cluster import (
    AUTO,
    address_of_last_start,
    cluster_started_here,
    connect,
    find_cluster,
    start_cluster,
)
from hybridrl.errors import PlacementError

logger = logging.getLogger(__name__)
SEARCH_PERIOD_S = 0.5


@contextlib.contextmanager
def ray_session(attach_to: Sequence[str] = (), *, timeout_s: float = 0.0) -> Iterator[None]:
    """Use the Ray cluster to which this process is connected, or else connect to one and disconnect afterwards.

    It is that of RAY_ADDRESS, that of `ray start` on this machine, or with `attach_to` the only one of this machine.
    Without any, a cluster is started that ends with this block.

    Args:
        attach_to: Groups of other programs, which run on a cluster that exists.
        timeout_s: How long to wait for such a cluster.

    Raises:
        ConfigError: RAY_ADDRESS names no cluster that accepts this process.
        PlacementError: There is no cluster on which `attach_to` could run.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    if address := os.environ.get("RAY_ADDRESS"):
        setting = "RAY_ADDRESS"
    else:
        setting = "the Ray cluster of this machine"
        if attach_to:
            _wait_for_cluster(attach_to, timeout_s)
        address = AUTO if attach_to or _is_cluster_here() else "local"
    if address == "local":
        start_cluster()
    else:
        connect(address, setting=setting)
    try:
        yield
    finally:
        ray.shutdown()


def _is_cluster_here() -> bool:
    """Return whether the cluster of the last `ray start` answers.

    Ray itself would wait minutes for one that is gone.
    """
    if cluster_started_here() is not None:
        return True
    if gone := address_of_last_start():
        logger.warning("no Ray cluster answers at %s, that of the last `ray start`; starting another one", gone)
    return False


def _wait_for_cluster(attach_to: Sequence[str], timeout_s: float) -> None:
    """Return when there is exactly one Ray cluster on this machine, on which another program runs."""
    deadline = time.monotonic() + timeout_s
    is_first = True
    while True:
        try:
            find_cluster()
            return
        except ConnectionError as error:
            if time.monotonic() >= deadline:
                raise PlacementError(
                    f"attach_to={list(attach_to)}: {error}, after {timeout_s:g} s; start one with `ray start --head` "
                    "and set RAY_ADDRESS=HOST:PORT for both programs"
                ) from None
            if is_first:
                logger.warning("waiting up to %g s for the cluster of attach_to=%s: %s", timeout_s, attach_to, error)
        is_first = False
        time.sleep(SEARCH_PERIOD_S)
