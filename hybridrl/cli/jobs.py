"""`hybridrl job submit|ls|status|logs|stop|resume|states`."""

import argparse
import shlex
import sys

from hybridrl import main_job
from hybridrl.driver.resume_command import has_command, resume_arguments, resume_run
from hybridrl.errors import ConfigError
from hybridrl.failure_policy import to_text as policy_text
from hybridrl.master.jobs.resume import find_journals, resume_job
from hybridrl.master.jobs.submit import RunningJob
from hybridrl.master.service import console
from hybridrl.master.state.tables import to_text as states_text


def add_commands(job: argparse._SubParsersAction) -> None:
    """Add the commands to those of `hybridrl job`."""
    _add_submit(job)
    _add_running(job)
    _add_resume(job)
    _add_states(job)


# -- submit


def _add_submit(job: argparse._SubParsersAction) -> None:
    submit = job.add_parser("submit", help=main_job.WHAT, description=main_job.WHAT)
    main_job.add_arguments(submit)
    submit.set_defaults(run_command=main_job.submit_file)


# -- ls, status, logs, stop


def _add_running(job: argparse._SubParsersAction) -> None:
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the Ray cluster; default: RAY_ADDRESS, or this machine's only cluster",
    )
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument(
        "job", metavar="JOB", help="a run, a job's name, or the directory of its journal or of a run of main_ppo"
    )

    def add(name: str, what: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = job.add_parser(name, help=what, description=what, parents=[*parents, cluster])
        command.set_defaults(run_command=_running)
        return command

    add("ls", "list the jobs that run on a Ray cluster")
    add("status", "show a job's state, processes, last commit and failures", which)
    logs = add("logs", "show the events of a job, or what one of its processes has printed", which)
    logs.add_argument(
        "--process",
        metavar="PROCESS",
        help="the end of what this process has printed, as `job status` names it: actor-0; actor-0.2 is the second "
        "process of this slot",
    )
    logs.add_argument(
        "--lines", type=int, default=1000, metavar="N", help="lines of each of its files (default: %(default)d)"
    )
    stop = add("stop", "stop a job as SIGTERM would, and wait until it has ended", which)
    stop.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="maximum wait for its end (default: %(default)g)",
    )


def _running(arguments: argparse.Namespace) -> None:
    if arguments.what == "ls":
        console.connect(arguments.address)
        sys.stdout.write(console.list_jobs())
    elif arguments.what == "status":
        sys.stdout.write(console.status(arguments.job, arguments.address))
    elif arguments.what == "logs" and arguments.process is not None:
        sys.stdout.write(
            console.process_logs(arguments.job, arguments.process, arguments.address, lines=arguments.lines)
        )
    elif arguments.what == "logs":
        sys.stdout.write(console.logs(arguments.job, arguments.address))
    else:
        sys.stdout.write(console.stop(arguments.job, arguments.address, timeout_s=arguments.timeout))


# -- resume


def _add_resume(job: argparse._SubParsersAction) -> None:
    what = (
        "resume a run that ended or died from its last checkpoint: repeat main_ppo's command, or submit the job again"
    )
    resume = job.add_parser("resume", help=what, description=what)
    resume.add_argument(
        "run", metavar="RUN", help="a directory of a run of main_ppo, or the run or the journal of a submitted job"
    )
    resume.add_argument(
        "changes", nargs="*", metavar="key=value", help="settings of main_ppo to change, for instance trainer.nnodes=2"
    )
    resume.add_argument("--print", action="store_true", help="print main_ppo's command without running it")
    resume.add_argument("--no-wait", action="store_true", help="return when the submitted job has started")
    resume.add_argument(
        "--address", metavar="HOST:PORT", help="Ray cluster for a submitted job; default: RAY_ADDRESS, or a local one"
    )
    resume.set_defaults(run_command=_resume)


def _resume(arguments: argparse.Namespace) -> int:
    if has_command(arguments.run) or not find_journals(arguments.run):
        return _resume_main_ppo(arguments)
    if arguments.changes or arguments.print:
        raise ConfigError(
            f"{arguments.run}: is a submitted job; key=value and --print are for main_ppo, submit it again to change it"
        )
    resumed = resume_job(arguments.run, blocking=not arguments.no_wait, address=arguments.address)
    if not isinstance(resumed, RunningJob):
        return resumed
    sys.stdout.write(f"{resumed.name} has started; its journal: {resumed.journal}\n")
    return 0


def _resume_main_ppo(arguments: argparse.Namespace) -> int:
    if arguments.print:
        command, directory = resume_arguments(arguments.run, arguments.changes)
        sys.stdout.write(f"cd {shlex.quote(directory)} && {shlex.join(command)}\n")
    else:
        resume_run(arguments.run, arguments.changes)
    return 0


# -- states


def _add_states(job: argparse._SubParsersAction) -> None:
    what = "print the tables: states of a job, a role and a worker, the events between them, and what follows a failure"
    states = job.add_parser("states", help=what, description=what)
    states.set_defaults(run_command=_states)


def _states(arguments: argparse.Namespace) -> None:
    sys.stdout.write(f"{states_text()}\n{policy_text()}")
