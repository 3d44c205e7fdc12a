"""`Failover`: a step that lost a process is taken again, from what the object store remembers of the step before.

At the end of a step every rank of the trained roles leaves its state (parameters, optimizer, schedule, random
generators) in the object store, and the driver keeps its own beside it: a `Moment`. The store is a process of its own,
so a rank may die and its state does not. When a call raises `WorkerLost`, the processes of that role are ended and
started anew, all trained roles go back to the moment (those that are well, too: they may have taken their step
already), the rollout gets the weights of the moment, and the step begins again, with the same prompts and the same
random numbers. Nothing is left of the step that was lost, so every step that ends was taken exactly once.

What is tried, and how often: a process that was lost, three times between two steps that end well; one that does not
answer before the deadline of its call (`trainer.call_timeout_s`), once: it is ended, as if it had been lost. Everything
else that a worker raises is raised to the user at once: a mistake would only be made again. What the store of a lost
machine held is gone with it; then, and when three times were not enough, the newest commit is where a new start of the
job goes on. `failures.jsonl` in the run's directory tells what was lost, and when the run was back.
"""

import copy
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from hybridrl.driver.lifecycle import LIFE
from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.master.state.events import TRAINER
from hybridrl.trainer.recovery.step_snapshot import Moment

logger = logging.getLogger(__name__)
MOST_LOSSES, MOST_TIMEOUTS = 3, 1
FILE = "failures.jsonl"


class Failover:
    """every: steps from one moment to the next; 0 remembers nothing, and a lost process ends the run.

    directory: of the run.
    """

    def __init__(self, trainer: Any, *, every: int, directory: str):
        self._trainer, self._every, self._path = trainer, every, os.path.join(directory, FILE)
        self._moment: Moment | None = None
        self._losses = self._timeouts = 0  # since the last moment
        self._newest = -1  # step that has ended
        self._recoveries, self._seconds, self._snapshot_s = 0, 0.0, 0.0

    def run(self, work: Callable[[], None]) -> None:
        """Do `work`, which goes on from the trainer's step; after the loss of a process go back to the moment and do it
        again.
        """
        while True:
            try:
                return work()
            except (WorkerLost, CallTimeout) as error:
                if self._moment is None:
                    raise
                self._recover(self._loss(error), self._moment)

    def remember(self, *, whatever_step: bool = False) -> None:
        """Have the end of this step remembered, if it is its turn. Returns when every rank has given its part."""
        trainer = self._trainer
        if not self._every or (trainer.global_steps % self._every and not whatever_step):
            return
        start = time.perf_counter()
        engines = {role: trainer.past.ask(group, "take_snapshot") for role, group in trainer.trained_groups().items()}
        for parts in engines.values():
            parts.fetch(parts.sizes or [])  # small, and there when the parts are; the parts stay where they are
        self._moment = Moment(
            trainer.global_steps, engines, driver_state(trainer), trainer.pipeline.remember(), trainer.policy.channel
        )
        trainer.past.keep(self._moment)
        LIFE.reached(trainer.global_steps)
        self._losses, self._timeouts, self._snapshot_s = 0, 0, time.perf_counter() - start

    def begin(self, moment: Moment | None) -> None:
        """Have everybody begin at the same step: the trainer's, or the end of the one at which another
        driver was lost.
        """
        trainer = self._trainer
        if moment is None:
            trainer.prompts.drawn = trainer.global_steps + len(trainer.pipeline)
            trainer.policy.push_weights(trainer.global_steps)
            return
        start, self._newest, trainer.global_steps = time.time(), moment.step, moment.step
        self._go_back([], moment)
        seconds = time.time() - start
        logger.warning("the next driver goes on at the end of step %d, after %.1f s", moment.step, seconds)
        self._record(
            {
                "step": moment.step + 1,
                "lost": [TRAINER],
                "told_at": start,
                "seconds": seconds,
                "back_at_step": moment.step,
            }
        )
        if moment.step and trainer.commit_is_due() and moment.step not in trainer.store.steps():
            trainer.commit()

    def is_news(self, step: int) -> bool:
        """Whether this step ends for the first time."""
        news, self._newest = step > self._newest, max(step, self._newest)
        return news

    def metrics(self) -> dict[str, float]:
        """Return the seconds that the last moment took, and once there was a loss, how many there were and the seconds
        they took.
        """
        survived = (
            {"failover/recoveries": float(self._recoveries), "failover/seconds": self._seconds}
            if self._recoveries
            else {}
        )
        return survived | ({"timing_s/snapshot": self._snapshot_s} if self._moment is not None else {})

    def _recover(self, lost: WorkerLost, moment: Moment) -> None:
        """Bring back what was lost, and what is lost meanwhile. Raises the loss that was one too many."""
        told_at, step, dead = time.time(), self._trainer.global_steps, [lost]
        self._go_back(dead, moment)
        seconds = time.time() - told_at
        self._recoveries, self._seconds = self._recoveries + 1, self._seconds + seconds
        logger.warning("back at the end of step %d after %.1f s", moment.step, seconds)
        names = [f"{one.role}-{one.rank}" for one in dead]
        self._record(
            {
                "step": step,
                "lost": names,
                "method": dead[0].method,
                "told_at": told_at,
                "seconds": seconds,
                "back_at_step": moment.step,
            }
        )

    def _go_back(self, dead: list[WorkerLost], moment: Moment) -> None:
        """Bring back the dead, to whom those are added that are lost meanwhile, and take everybody to the moment."""
        step = self._trainer.global_steps
        while True:
            if dead:
                self._count(dead[-1], step, moment)
            try:
                self._trainer.policy.disconnect(str(dead[-1]) if dead else "its driver was lost")
                self._rebuild({role for one in dead for role in one.role.split("+")})
                return self._restore(moment)
            except (WorkerLost, CallTimeout) as another:
                dead.append(self._loss(another))

    def _loss(self, error: WorkerLost | CallTimeout) -> WorkerLost:
        """The loss that an error is. Raises a timeout that is none of a worker's, or one too many."""
        if isinstance(error, WorkerLost):
            return error
        self._timeouts += 1
        if not error.role or self._timeouts > MOST_TIMEOUTS:
            raise error
        return WorkerLost(error.role, error.ranks[0], error.method, f"{error}; its processes are ended")

    def _count(self, lost: WorkerLost, step: int, moment: Moment) -> None:
        self._losses += 1
        if self._losses > MOST_LOSSES:
            lost.add_note(
                f"it was the loss number {self._losses} since step {moment.step} ended; what comes so "
                "often is no accident"
            )
            raise lost
        logger.warning("step %d: %s; going back to the end of step %d", step, lost, moment.step)

    def _record(self, entry: dict[str, Any]) -> None:
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:  # a full disk must not end what a lost process did not
            logger.warning("%s: cannot be written (%s)", self._path, error.strerror)

    def _rebuild(self, roles: set[str]) -> None:
        """Start the processes of these roles anew, with all roles that they hold."""
        groups, done = self._trainer.groups, []
        for role in sorted(roles):
            processes = groups[role].processes
            if any(processes is one for one in done):
                continue
            done.append(processes)
            groups[role].rebuild()
            for held in processes.classes:
                self._trainer.init_role(held)

    def _restore(self, moment: Moment) -> None:
        trainer = self._trainer
        for role, group in trainer.trained_groups().items():
            group.load_snapshot(moment.engines[role])
        load_driver_state(trainer, moment.driver)
        trainer.ledger.go_back(moment.step)
        trainer.policy.reconnect()
        trainer.policy.push_weights(moment.step)
        trainer.pipeline.go_back(moment.ahead)
        if trainer.evaluation is not None:
            trainer.evaluation.ask_again()


def driver_state(trainer: Any) -> dict[str, Any]:
    """Return what a trainer itself knows between two steps, for `load_driver_state` of the same one."""
    return {
        "global_steps": trainer.global_steps,
        "drawn": trainer.prompts.drawn,
        "data": copy.deepcopy(trainer.train_loader.state_dict()),
        "kl_ctrl": copy.deepcopy(trainer.kl_ctrl.state_dict()),
        "replay": trainer.replay_buffer.remember(),
    }


def load_driver_state(trainer: Any, state: dict[str, Any]) -> None:
    trainer.global_steps, trainer.prompts.drawn = state["global_steps"], state["drawn"]
    trainer.train_loader.load_state_dict(copy.deepcopy(state["data"]))
    trainer.kl_ctrl.load_state_dict(copy.deepcopy(state["kl_ctrl"]))
    trainer.replay_buffer.go_back(state["replay"])
