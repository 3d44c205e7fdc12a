"""`hybridrl job submit|ls|status|logs|stop|resume|states`."""

import argparse
import shlex

from hybridrl import main_job
from hybridrl.driver.resume_command import has_command, resume_arguments, resume_run
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.failure_policy import to_text as policy_text
from hybridrl.master.jobs.resume import find_journals, resume_job
from hybridrl.master.jobs.submit import RunningJob
from hybridrl.master.service import job_commands
from hybridrl.master.state.tables import to_text as states_text


def submit(arguments: argparse.Namespace) -> int:
    """Run `hybridrl job submit` and return its exit code."""
    return main_job.submit_file(arguments)


def show_or_stop(arguments: argparse.Namespace) -> None:
    """Run `hybridrl job ls|status|logs|stop`."""
    if arguments.what == "ls":
        job_commands.connect(arguments.address)
        show(job_commands.list_jobs())
    elif arguments.what == "status":
        show(job_commands.status(arguments.job, arguments.address))
    elif arguments.what == "logs" and arguments.process is not None:
        show(job_commands.process_logs(arguments.job, arguments.process, arguments.address, lines=arguments.lines))
    elif arguments.what == "logs":
        show(job_commands.logs(arguments.job, arguments.address))
    else:
        show(job_commands.stop(arguments.job, arguments.address, timeout_s=arguments.timeout))


# -- resume


def resume(arguments: argparse.Namespace) -> int:
    """Run `hybridrl job resume` and return its exit code."""
    if has_command(arguments.run) or not find_journals(arguments.run):
        return _resume_main_ppo(arguments)
    if arguments.changes or arguments.print:
        raise ConfigError(
            f"{arguments.run}: is a submitted job; key=value and --print are for main_ppo, submit it again to change it"
        )
    resumed = resume_job(arguments.run, blocking=not arguments.no_wait, address=arguments.address)
    if not isinstance(resumed, RunningJob):
        return resumed
    show(f"{resumed.name} has started; its journal: {resumed.journal}\n")
    return 0


def _resume_main_ppo(arguments: argparse.Namespace) -> int:
    if arguments.print:
        command, directory = resume_arguments(arguments.run, arguments.changes)
        show(f"cd {shlex.quote(directory)} && {shlex.join(command)}\n")
    else:
        resume_run(arguments.run, arguments.changes)
    return 0


# -- states


def print_states(arguments: argparse.Namespace) -> None:
    """Run `hybridrl job states`."""
    show(f"{states_text()}\n{policy_text()}")
