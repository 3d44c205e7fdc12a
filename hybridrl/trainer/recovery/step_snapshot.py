"""`Moment`: the end of a step, in memory; and where it is kept so that the next driver finds it when this one is lost.

A driver that somebody keeps running (`life.py`) has its moments kept by a `JobMemory`. In its next life it finds the
newest there, takes up the worker processes, and goes on at the end of that step. Without one there is nothing to go on
from but the newest commit: the job is then a new run on the cluster, and what is left of the old one is ended.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from hybridrl.config import PPOConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.lifecycle import LIFE
from hybridrl.single_controller.monitoring.snapshot_store import find_memory, keep, kept, start_memory
from hybridrl.single_controller.processes.termination import end_run
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.setup import run_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """The end of a step.

    engines: role -> one reference per rank to what `take_snapshot` returned. driver: of the trainer itself. ahead:
    batches on their way. channel: that weights were pushed over, see `PolicyGroups.channel`.
    """

    step: int
    engines: Mapping[str, list]
    driver: Mapping[str, Any]
    ahead: list[Any]
    channel: Any = None


class Past:
    """What a driver finds when it begins.

    run: the name of its run on the cluster. moment: what to go on from, not in a first life.
    """

    def __init__(self, run: str, *, moment: Moment | None = None, memory: Any = None, is_kept: bool = False):
        self.run, self.moment, self.is_kept = run, moment, is_kept
        self._memory = memory

    def take_moment(self) -> Moment | None:
        """Return what to go on from, the first time; a driver that goes back later goes back to a commit."""
        moment, self.moment = self.moment, None
        return moment

    def ask(self, group: Any, method: str) -> Any:
        """Call a method on all ranks of a group, with answers that outlive this driver, if somebody starts another."""
        if not self.is_kept:
            return getattr(group, method).later()
        import ray

        for _ in range(2):
            self._memory = self._memory or start_memory(self.run)
            try:
                return group.ask_through(self._memory, method)
            except (
                ray.exceptions.RayActorError
            ):  # it died, and what it kept is gone; the next moment is its successor's
                logger.warning("the memory of %s was lost; another one is started", self.run)
                self._memory = None
        raise RuntimeError(f"the memory of {self.run} was lost twice")

    def keep(self, moment: Moment) -> None:
        """Have the next driver find this moment."""
        if not self.is_kept:
            return
        described = replace(moment, engines={}, ahead=[batch.begun_again() for batch in moment.ahead])
        parts = {role: list(references) for role, references in moment.engines.items()}
        if not keep(self._memory, cloudpickle.dumps(described), parts):
            logger.warning("the memory of %s was lost; the next step has another one", self.run)
            self._memory = None

    def forget(self) -> None:
        """End the memory."""
        if self._memory is None:
            return
        import ray

        ray.kill(self._memory, no_restart=True)
        self._memory = None


def is_kept_running(config: TrainerConfig) -> bool:
    """Return whether a driver with these settings is to be started again when it is lost; it has to
    remember something.
    """
    return config.backend == "ray" and config.master and config.snapshot_freq > 0


def go_on_with(config: PPOConfig) -> PPOConfig:
    """Return the settings for this life: in a later one, what this run has committed comes before
    `trainer.resume_mode`.
    """
    trainer = config.trainer
    if LIFE.number > 1 and CheckpointStore(run_directory(trainer)).latest() is not None:
        return replace(config, trainer=replace(trainer, resume_mode="auto", resume_from_path=None))
    return config


def look_back(config: TrainerConfig) -> Past:
    """Return what there is from earlier lives of this driver. Needs a connection to Ray where `config` says Ray."""
    if not (LIFE.is_kept and config.backend == "ray"):
        return Past(f"{config.experiment_name}-{uuid.uuid4().hex[:6]}")
    run = f"{config.experiment_name}-{LIFE.run}"
    if LIFE.number == 1:
        return Past(run, is_kept=True)
    memory = find_memory(run)
    found = kept(memory)
    if found is None:
        logger.warning("the last driver left nothing in memory to go on from: everything is started anew")
        end_run(run)
        return Past(f"{run}.{LIFE.number}", is_kept=True)
    description, parts = found
    moment = replace(cloudpickle.loads(description), engines=parts)
    if (
        moment.channel is not None
    ):  # an actor that was told to send weights, and no rollout to take them, waits no longer
        moment.channel.abandon("the driver was lost")
    return Past(run, moment=moment, memory=memory, is_kept=True)
