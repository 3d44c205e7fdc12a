"""Roles and trainers of the jobs that tests submit."""

import os
import time
from pathlib import Path

from hybridrl.errors import WorkerLost
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
    raise ArithmeticError("an error in the trainer")


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
