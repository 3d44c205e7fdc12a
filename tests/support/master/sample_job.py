"""Roles and trainers of the jobs that tests submit."""

import os
import time
from pathlib import Path

import ray

from hybridrl.errors import ConfigError, StorageError, WorkerLost
from hybridrl.master.jobs.job_context import current_context
from hybridrl.master.jobs.roster import lookup_roster, loss_account
from hybridrl.master.service.client import list_masters
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker


class Adder(Worker):
    def __init__(self, config, role):
        self.amount, self.role = config.get("amount", 0), role

    @register(Dispatch.ONE_TO_ALL)
    def add(self, number: int) -> int:
        return number + self.amount + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ArithmeticError("an error in the worker")

    def process_id(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), 9)


class Trainer:
    """Writes the results of its workers, and their variables that differ from the plan, into `config["out"]`."""

    def __init__(self, job, config):
        self.job, self.config = job, config

    def run(self):
        lines = [f"{self.job.name} {os.environ.get('GREETING', '')}"]
        for role, group in self.job.groups.items():
            planned = [worker.environment for worker in self.job.plan.workers() if worker.roles == (role,)]
            found = group.environment()
            wrong = [own.items() - actual.items() for own, actual in zip(planned, found, strict=True)]
            lines.append(f"{role}: {group.add(1)} {wrong}")
        Path(self.config["out"]).write_text("\n".join(lines))


class FitTrainer:
    """A trainer in the style of DLRover's first generation: `init`, then `fit`."""

    def __init__(self, groups, config):
        self.groups, self.config = groups, config

    def init(self):
        self.text = "ready"

    def fit(self):
        Path(self.config["out"]).write_text(self.text)
        self.groups["actor"].fail()


def works_until_file(job):
    """A trainer that is a function. It works until the file `config["until"]` exists."""
    Path(job.config["out"]).write_text("waiting")
    while not Path(job.config["until"]).exists():
        job.groups["actor"].add(1)
    Path(job.config["out"]).write_text("done")


# -- trainers that lose a process; each of their incarnations writes a line about itself


def write_line(job, *words):
    with open(job.config["out"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def process_ids(group):
    return [group.execute_rank(rank, "process_id") for rank in range(group.world_size)]


def loses_a_worker(job):
    """Kills the worker `config["victim"]` (role, rank) in its first incarnation, and does not handle the loss."""
    resume_point = job.resume_point
    write_line(
        job,
        resume_point.restarts,
        resume_point.step,
        resume_point.commit or "-",
        resume_point.new_ranks,
        *process_ids(job.groups["actor"]),
    )
    job.report_step(3)
    job.report_commit(3, "global_step_3")
    role, rank = job.config["victim"]
    if resume_point.restarts == 0:
        job.groups[role].execute_rank(rank, "die")


def recovers_a_worker(job):
    """Kills rank 1 of the actor three times, and calls `recover`."""
    group = job.groups["actor"]
    write_line(job, *process_ids(group))
    for _ in range(3):
        try:
            group.execute_rank(1, "die")
        except WorkerLost as lost:
            write_line(job, job.recover(lost), *process_ids(group), *group.add(1))


def dies_itself(job):
    write_line(
        job,
        job.resume_point.restarts,
        job.resume_point.step,
        job.resume_point.commit,
        job.resume_point.new_ranks,
        *process_ids(job.groups["actor"]),
    )
    if job.resume_point.restarts < job.config["deaths"]:
        job.report_step(job.resume_point.step + 1)
        job.report_commit(job.resume_point.step + 1, f"global_step_{job.resume_point.step + 1}")
        os.kill(os.getpid(), 9)


def waits_after_a_commit(job):
    """Commits, then works until the file `config["gate"]` exists."""
    resume_point = job.resume_point
    write_line(
        job, resume_point.restarts, resume_point.step, resume_point.commit or "-", *process_ids(job.groups["actor"])
    )
    job.report_step(5)
    job.report_commit(5, "global_step_5")
    while not Path(job.config["gate"]).exists():
        job.groups["actor"].add(1)


def repeats_an_exception(job):
    """Raises at step 1, at step 2, and at step 2 again."""
    write_line(job, job.resume_point.restarts)
    job.report_step(1 if job.resume_point.restarts == 0 else 2)
    job.report_commit(job.resume_point.step, "x")  # returns when the supervisor has recorded the step, too
    raise (
        StorageError("cannot write x") if job.config.get("is_disk_full") else ArithmeticError("an error in the trainer")
    )


class CleansUp:
    """Writes a line when SIGTERM ends it."""

    def __init__(self, job):
        self.job = job

    def run(self):
        write_line(self.job, "works")
        try:
            while True:
                time.sleep(0.01)
        finally:
            write_line(self.job, "leaves")


# -- roles that run by themselves


def count_ranks(config, role):
    """Adds up all ranks with torch.distributed, as a program under torchrun does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    Path(config["out"], f"{role}-{dist.get_rank()}").write_text(f"{total.item()} of {dist.get_world_size()}")
    dist.destroy_process_group()


def write_a_line(groups, config):
    """A trainer that ends at once."""
    Path(config["out"], "trainer").write_text(str(sorted(groups)))


def restarts_downstream(job):
    """Kills the actor; writes what was restarted, and whether the master knows all processes right after it."""
    before = process_ids(job.groups["reward"])
    try:
        job.groups["actor"].execute_rank(0, "die")
    except WorkerLost as lost:
        restarted = job.recover(lost)
    described = ray.get(list_masters()[job.name].describe.remote(), timeout=30)["workers"]
    known = all(
        (described[f"{role}-0"]["pid"], described[f"{role}-0"]["state"]) == (process_ids(group)[0], "alive")
        for role, group in job.groups.items()
    )
    write_line(job, sorted(restarted), known, process_ids(job.groups["reward"]) == before)


def goes_on_at_its_commit(job):
    """Begins the step behind its commit, and waits for the file `config["gate"]`."""
    point = job.resume_point
    write_line(job, point.restarts, point.step, point.commit or "-", point.commit_step)
    if not point.commit:
        job.report_step(6)
        job.report_commit(6, "global_step_6")
    job.report_step(7)
    while not Path(job.config["gate"]).exists():
        time.sleep(0.05)


def opens_the_gate(job):
    """Makes the counter end, and ends first."""
    Path(job.config["until"]).write_text("")


class WorksUntilStopped:
    """Writes a line when SystemExit ends it."""

    def __init__(self, config):
        self.out = Path(config["out"])

    def run(self):
        self.out.write_text("works")
        try:
            while True:
                time.sleep(0.01)
        finally:
            self.out.write_text("left")


# -- roles that run by themselves beside a trainer, and can be called meanwhile


class Counter:
    """Counts until the job ends. `config["until"]`: a file that makes it end by itself."""

    def __init__(self, config):
        self.config, self.count = config, 0

    def run(self):
        while not Path(self.config.get("until", "/nowhere")).exists():
            self.count += 1
            time.sleep(0.01)
        time.sleep(1.0)  # the trainer ends first
        Path(self.config["out"] + ".counted").write_text(str(self.count))

    @register(Dispatch.ONE_TO_ALL, name="counted")
    def get_count(self) -> int:
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


class Caller(Worker):
    """A worker that looks up the counters and calls them."""

    @register(Dispatch.ONE_TO_ALL)
    def call_counters(self) -> tuple[int, list[int]]:
        """Return the epoch and the process ids of the counters."""
        roster = lookup_roster("counter")
        return roster.epoch, roster.handle.to_group().process()

    @register(Dispatch.ONE_TO_ALL)
    def describe_loss(self) -> str:
        """Kill counter 0; return the master's account of the loss."""
        try:
            group = lookup_roster("counter").handle.to_group()
            os.kill(group.execute_rank(0, "process"), 9)
            group.execute_rank(0, "process")
        except WorkerLost as lost:
            return str(loss_account(lost))
        return "not lost"


class LosesItsPeer:
    """Kills a counter in its first run, and does not handle the loss. Its next run finds the new one."""

    def __init__(self, config):
        self.out = Path(config["out"])

    def run(self):
        roster = lookup_roster("counter")
        with self.out.open("a") as file:
            file.write(f"{roster.epoch} ")
        if roster.epoch == 0:
            group = roster.handle.to_group()
            os.kill(group.execute_rank(0, "process"), 9)
            group.execute_rank(0, "process")


@register(Dispatch.ONE_TO_ALL)
def module_context() -> tuple[str, str, int]:
    """An endpoint of this module: role, device type and number of counters, from the job's context."""
    context = current_context()
    return context.role, context.device_type, context.role_sizes["counter"]


class FromJob:
    """A trainer that is constructed by `from_job`, and calls roles that run."""

    def __init__(self, job):
        self.job = job

    @classmethod
    def from_job(cls, job):
        return cls(job)

    def run(self):
        counters, callers = self.job.groups["counter"], self.job.groups["caller"]
        try:
            lookup_roster("nobody")
        except ConfigError as error:
            write_line(self.job, error)
        roster = lookup_roster("counter")
        first = counters.counted()
        time.sleep(0.2)
        grows = all(after > before for before, after in zip(first, counters.counted(), strict=True))
        write_line(self.job, grows, sorted(roster.endpoints), counters.execute_rank(1, "module_context"))
        before = callers.call_counters()[0]
        write_line(self.job, *callers.describe_loss())
        after = callers.call_counters()[0]
        kept = [old == new for old, new in zip(before[1], after[1], strict=True)]
        write_line(
            self.job, before[0], after[0], kept, roster.ready_for_s[1] <= lookup_roster("counter").ready_for_s[1]
        )
        try:
            counters.execute_rank(0, "process")
        except WorkerLost as lost:
            write_line(self.job, lost.cause.split(";")[0], self.job.recover(lost), counters.process() == after[1])
