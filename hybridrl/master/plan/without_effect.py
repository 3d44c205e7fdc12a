"""Settings of DLRover that jobs accept and that change nothing here: one table of the reasons, one log line per use.

DLRover's users keep their programs as they are, and read which line of them does nothing.
"""

import logging

logger = logging.getLogger(__name__)

REASONS = {
    # of a job or a role
    "as_data_stream()": "a trainer, or the roles themselves, decide when data flows",
    "as_task_stream()": "a trainer, or the roles themselves, decide when data flows",
    "comm_auto_setup_process_group": "no process group is made before the entry runs; its variables are set, so call "
    "torch.distributed.init_process_group()",
    "comm_backend": "pass the backend to torch.distributed.init_process_group()",
    "comm_pre_check": "machines are not tested before a start; a process that is lost later is restarted",
    "comm_timeout_s": "pass the timeout to torch.distributed.init_process_group()",
    "config of a role": "every role gets the config of the job; put it there under the role's name",
    "per_node_max_failure": "losses are counted per role; max_restart() limits them",
    "resource(disk=...)": "Ray reserves no disk",
    "sub_stage()": "a role has no stages; the trainer orders its calls",
    # of submit()
    "failover_exec_strategy=1": "a lost process restarts its role, its node or itself; restart() chooses",
    "failover_trigger_strategy=1": "a lost process is restarted at once",
    "job_max_restart": "every role and the trainer has a limit of its own; max_restart() sets it",
    "master_state_backend_config": "the master's state is its journal; journal=DIRECTORY sets where",
    "master_state_backend_type": "the master's state is its journal; journal=DIRECTORY sets where",
    "node_max_restart": "every role and the trainer has a limit of its own; max_restart() sets it",
    "scheduling_strategy_type": "each role says where it runs; per_node(), spread() and pack() set it",
    # of the command dlrover-run
    "--accelerator": "device_type() sets the kind of device",
    "--auto_config": "the size of a job is fixed; --nnodes and --nproc_per_node set it",
    "--auto_tunning": "the program's own parallel settings are used",
    "--comm_perf_test": "machines are not tested before a start",
    "--exclude_straggler": "slow processes are reported and not excluded",
    "--membind_policy": "processes are not bound to memory nodes",
    "--network_check": "machines are not tested before a start; a process that is lost later is restarted",
    "--node_check": "machines are not tested before a start; a process that is lost later is restarted",
    "--node_unit": "the size of a job is fixed; --nnodes sets it",
    "--numa_affinity": "processes are not bound to memory nodes",
    "--precheck": "machines are not tested before a start",
    "--save_at_breakpoint": "what is saved is the program's own",
    "--training_port": "each group of processes gets a free port",
    "--ucp_device_type": "what is saved is the program's own",
}


def log_without_effect(setting: str, *, role: str = "") -> None:
    """Log that a setting has no effect, and why. setting: a key of `REASONS`."""
    logger.warning("%s%s has no effect: %s", f"role {role!r}: " if role else "", setting, REASONS[setting])
