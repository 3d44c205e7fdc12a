"""Roles and trainers of the jobs that tests submit."""

import os
from pathlib import Path

from hybridrl.single_controller.decorator import Dispatch, register
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
        raise ArithmeticError("the worker's own mistake")


class Trainer:
    """Writes what its workers answered, and which variables of theirs are not as planned, into `config["out"]`."""

    def __init__(self, job, config):
        self.job, self.config = job, config

    def run(self):
        lines = [f"{self.job.name} {os.environ.get('GREETING', '')}"]
        for role, group in self.job.groups.items():
            planned = [worker.environment for worker in self.job.plan.workers() if worker.roles == (role,)]
            found = group.environment()
            wrong = [own.items() - there.items() for own, there in zip(planned, found, strict=True)]
            lines.append(f"{role}: {group.add(1)} {wrong}")
        Path(self.config["out"]).write_text("\n".join(lines))


class FitTrainer:
    """Of the first generation: `init`, then `fit`."""

    def __init__(self, groups, config):
        self.groups, self.config = groups, config

    def init(self):
        self.text = "ready"

    def fit(self):
        Path(self.config["out"]).write_text(self.text)
        self.groups["actor"].fail()


def wait_for_ever(job):
    """A trainer that is a function: it works until the file `config["until"]` is there."""
    Path(job.config["out"]).write_text("waiting")
    while not Path(job.config["until"]).exists():
        job.groups["actor"].add(1)
    Path(job.config["out"]).write_text("done")
