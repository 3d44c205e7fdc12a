"""Record in the master's journal that a supervisor gives up.

The supervisor (`driver/supervisor.py`) calls `report_final_decision` in its own process after the last driver. A master
that still runs gets the decision, as from a driver. Without one, no other process writes the journal: it is written
here.
"""

import logging
import os

from hybridrl import master
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.ray_cluster import existing_cluster, start_ray
from hybridrl.failure_policy import Decision
from hybridrl.single_controller.cluster import find_actor, master_name
from hybridrl.single_controller.monitoring.process import report_decision
from hybridrl.trainer.recovery.master_link import journal_root

logger = logging.getLogger(__name__)


def report_final_decision(config: TrainerConfig, run_id: str, decision: Decision, *, num_nodes: int = 1) -> None:
    """Record the decision, and that the job failed.

    A failure of this report is logged; it changes no exit code.

    Args:
        config: Settings of the run.
        run_id: Of the supervisor's drivers.
        decision: What the supervisor decided.
        num_nodes: Machines that the job needs, as for `start_ray`.
    """
    run = _newest_job(journal_root(config), f"{config.experiment_name}-{run_id}")
    if run is None:  # no driver came so far
        return
    journal = os.path.join(journal_root(config), run)
    try:
        if not _sent_to_master(config, run, journal, decision, num_nodes=num_nodes):
            _write(journal, decision)
    except Exception as error:
        logger.warning("the decision of the supervisor is not in the journal %s (%s)", journal, error)


def _newest_job(root: str, run_name: str) -> str | None:
    """Return the name of the newest job of these drivers: one without a snapshot starts job `run_name`.ATTEMPT."""
    names = os.listdir(root) if os.path.isdir(root) else []
    attempts = {int(name.rpartition(".")[2]): name for name in names if name.startswith(f"{run_name}.")}
    return attempts[max(attempts)] if attempts else run_name if run_name in names else None


def _sent_to_master(config: TrainerConfig, run: str, journal: str, decision: Decision, *, num_nodes: int) -> bool:
    """Send the decision to the job's master. Returns False if none runs."""
    import ray

    if is_connected_here := not ray.is_initialized():
        if existing_cluster(num_nodes=num_nodes) is None:  # the supervisor's own, and its master, are gone
            return False
        start_ray(num_nodes=num_nodes)
    try:
        if find_actor(master_name(run)) is None:
            return False
        client = master.MasterClient(job=config.experiment_name, run=run, journal=journal, is_restart=True)
        report_decision(decision)
        client.finish_job(succeeded=False, reason=str(decision))
        client.close()
        return True
    finally:
        if is_connected_here:
            ray.shutdown()


def _write(journal: str, decision: Decision) -> None:
    state = master.JournaledState(journal)
    state.apply(master.RecoveryDecided(**decision.to_json()))
    state.apply(master.JobEnded(False, str(decision)))
    state.close()
