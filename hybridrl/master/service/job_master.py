"""`JobMaster`: the detached Ray actor that watches over one job, and `Master`, the thread in it that does the work.

It is nearly idle and needs no torch. Ray starts it again when it dies; it then replays its journal and waits for the
processes it knew, which look for it by name. Nobody waits for it: training goes on without it.
"""

import logging
import os
import queue
import resource
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hybridrl.master.health.hang_detector import HangWatch
from hybridrl.master.health.heartbeat_server import Connection, Connections
from hybridrl.master.health.kernel_process import Condition, condition
from hybridrl.master.health.monitor import Monitor, Presence
from hybridrl.master.service.journal import JobContext
from hybridrl.master.state.events import (
    TRAINER,
    Begun,
    Effect,
    Ended,
    EndJob,
    EndProcess,
    Event,
    Failed,
    Joined,
    Kind,
    Level,
    Recover,
    StopAsked,
    StopTrainer,
    TellTrainer,
    decode,
    holds,
)
from hybridrl.master.state.reducer import pending, to_json
from hybridrl.master.state.tables import JOB_ENDS, Worker
from hybridrl.single_controller.cluster import answers, find_actor, keeper_name, master_name
from hybridrl.single_controller.monitoring.heartbeat_client import machine
from hybridrl.single_controller.processes.termination import end_named, end_run, kill_process, kill_processes

logger = logging.getLogger(__name__)
TICK_S, QUICK_TICK_S = 0.25, 0.02  # between looks; the quick one while a death is looked into
NODES_EVERY_S = 1.0
THERE = (Worker.ALIVE, Worker.SILENT)
TRAINER_WITHIN_S = 120.0  # a trainer that is started again speaks
LEAVE_S = 5.0  # after the end of the job, for its processes to end by themselves


@dataclass(frozen=True)
class Watchfulness:
    """hang_s: a method that takes longer, and three times as long as it ever took, is looked into when others wait."""

    hang_s: float = 300.0


class Master:
    """Everything a master does, but for Ray's calls.

    Only its own thread (`run`) touches anything; `ask` hands it an event.
    """

    def __init__(self, begun: Begun, journal: str, watchfulness: Watchfulness, trainer: dict[str, Any]) -> None:
        import ray

        self.context = JobContext(journal)
        self._token = secrets.token_hex(16)
        self._host = ray.util.get_node_ip_address()
        self.connections = Connections(self._host, token=self._token)
        self.here = machine()
        self._nodes: dict[str, dict[str, Any]] = {}  # by id, as Ray tells of them
        run_directory = os.path.dirname(os.path.abspath(journal))
        self.monitor = Monitor(self.here, self._ask_elsewhere, self._look_at_node, run_directory=run_directory)
        self._hangs = HangWatch(self.monitor, self._ask_for_stacks, journal=journal, hang_s=watchfulness.hang_s)
        self._asked: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._questions: list[tuple[Any, Callable[[Condition | None], None]]] = []
        self._by_slot: dict[str, Connection] = {}
        self._ending_since = 0.0
        self._trainer_due: float | None = None
        self._looked = self._nodes_looked = 0.0
        self._dead_nodes: set[str] = set()
        self._apply(begun)
        if (
            TRAINER not in self.context.state.workers
        ):  # one that dies before its first word must not leave a master behind
            self._apply(Joined(TRAINER, f"{begun.run}/{TRAINER}", **trainer))
        self.monitor.expect(self.context.state)
        self._carry_out(pending(self.context.state))

    @property
    def address(self) -> tuple[str, int, str]:
        return self._host, self.connections.port, self._token

    def ask(self, event: Event) -> None:
        """Have an event applied soon."""
        self._asked.put(event)

    # -- the thread

    def run(self) -> None:
        """Watch until the job has ended and its processes are gone."""
        while not self._may_leave():
            try:
                self._turn()
            except Exception:  # a mistake here must not leave the job unwatched
                logger.exception("the master goes on after an error")
                time.sleep(TICK_S)
        self.context.close()
        self.connections.close()
        end_run(self.context.state.run, but=master_name(self.context.state.run))

    def _turn(self) -> None:
        every_s = QUICK_TICK_S if self.monitor.is_waiting or self._questions else TICK_S
        for connection, word in self.connections.poll(max(0.0, self._looked + every_s - time.monotonic())):
            self._hear(connection, word)
        while not self._asked.empty():
            self._apply(self._asked.get())
        if time.monotonic() < self._looked + (QUICK_TICK_S if self.monitor.is_waiting else every_s):
            return  # a thousand workers say a thousand words a second; nobody is looked at for each of them
        self._looked = time.monotonic()
        self._look_at_nodes()
        self._look_for_trainer()
        for event in self.monitor.look():
            self._apply(event)
            if isinstance(event, Failed) and event.kind in (Kind.DIED, Kind.NODE):
                self._tell_of_loss(event)
        self._hear_answers()
        if (found := self._hangs.look()) is not None:
            logger.warning("%s: %s", found.slot, found.text)
            self._apply(found)
        if not self.context.is_durable:
            self.context.flush()

    def _hear(self, connection: Connection, word: dict[str, Any] | None) -> None:
        slot = connection.introduction["slot"]
        for event in self.monitor.hear(connection, word):
            self._apply(event)
        if word is None:
            return
        if "hello" in word:
            self._by_slot[slot] = connection
            self._carry_out(effect for effect in pending(self.context.state) if isinstance(effect, StopTrainer))
        if "tell" in word:
            told = {name: value for name, value in word["tell"].items() if name != "number"}
            if "deadline" in told:
                self._hear_of_deadline(**told["deadline"])
            else:
                self._apply(decode(told))
            connection.send({"acknowledge": word["tell"]["number"]})
        if "stacks" in word:
            self._hangs.take(slot, word["stacks"])

    def _apply(self, event: Event) -> None:
        self._carry_out(self.context.apply(event))

    # -- effects

    def _carry_out(self, effects) -> None:
        for effect in effects:
            self._carry_out_one(effect)

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case EndProcess():
                logger.warning("%s is ended: %s", effect.slot, effect.reason)
                self._end_process(effect.name, effect.pid, effect.node, effect.machine)
            case Recover():
                logger.warning(
                    "level %d for %s: %s", effect.level, ", ".join(effect.slots) or "the call", effect.reason
                )
                if effect.level == Level.TRAINER:
                    self._trainer_due = time.monotonic() + TRAINER_WITHIN_S
            case StopTrainer():
                if TRAINER in self._by_slot:
                    self._by_slot[TRAINER].send({"stop": effect.reason})
            case TellTrainer():
                if TRAINER in self._by_slot:
                    self._by_slot[TRAINER].send({"notice": effect.text})
            case EndJob():
                logger.info("the job %s is over: %s", self.context.state.run, effect.reason)
                self._ending_since = self._ending_since or time.monotonic()

    def _end_process(self, name: str, pid: int, node: str, its_machine: str) -> None:
        if its_machine == self.here:
            kill_process(pid)
        else:
            threading.Thread(target=_end_elsewhere, args=(name, pid, node), daemon=True).start()

    def _may_leave(self) -> bool:
        """Whether the job has ended and none of its workers is left; those who do not go, or have no trainer to end
        them, are ended.
        """
        if not self._ending_since:
            return False
        left = [presence for presence in self.monitor.presences.values() if presence.slot != TRAINER]
        if left and TRAINER in self.monitor.presences and time.monotonic() - self._ending_since < LEAVE_S:
            return False
        for presence in left:
            self._end_process(presence.name, presence.pid, presence.node, presence.machine)
        return True

    # -- other machines

    def _ask_elsewhere(self, presence: Presence, tell: Callable[[Condition | None], None]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(presence.node, soft=False)
        question = ray.remote(num_cpus=0, max_retries=0)(condition).options(scheduling_strategy=there)
        self._questions.append((question.remote(presence.pid), tell))

    def _hear_answers(self) -> None:
        import ray

        waiting = []
        for question, tell in self._questions:
            if not ray.wait([question], timeout=0)[0]:
                waiting.append((question, tell))
                continue
            try:
                tell(ray.get(question, timeout=1.0))
            except ray.exceptions.RayError:
                tell(None)
        self._questions = waiting

    def _look_for_trainer(self) -> None:
        """End the job whose trainer is not started again, although somebody was to do it."""
        if self._trainer_due is None:
            return
        if self.context.state.workers[TRAINER].state != Worker.LOST:
            self._trainer_due = None
        elif self._starter_is_gone():
            self._apply(Ended(False, "the trainer was lost, and so was who starts it again"))
        elif time.monotonic() > self._trainer_due:
            self._apply(Ended(False, f"the trainer was lost, and no other came within {TRAINER_WITHIN_S:g} s"))

    def _starter_is_gone(self) -> bool:
        """Whether the trainer's program has ended, or Ray has given up the keeper of a submitted job."""
        state = self.context.state
        if state.program:
            return state.workers[TRAINER].machine == self.here and not condition(state.program).state
        return find_actor(keeper_name(state.run)) is None

    def _look_at_nodes(self) -> None:
        import ray

        if time.monotonic() - self._nodes_looked < NODES_EVERY_S:
            return
        self._nodes_looked = time.monotonic()
        self._nodes = {node["NodeID"]: node for node in ray.nodes()}
        for node_id, node in self._nodes.items():
            if not node["Alive"] and node_id not in self._dead_nodes:
                self._dead_nodes.add(node_id)
                self.monitor.lose_node(node_id, f"its node {node['NodeManagerAddress']} is gone")

    def _tell_of_loss(self, lost: Failed) -> None:
        """Have the trainer's calls of this worker end. Ray lets them wait until it notices, which takes half a second
        for a process that crashes, and half a minute for a machine that went without a word.
        """
        connection, trainer = self._by_slot.get(lost.slot), self._by_slot.get(TRAINER)
        introduced = connection.introduction if connection is not None else {}
        if trainer is not None and introduced.get("pid") == lost.pid and "actor" in introduced:
            trainer.send({"lost": {"actor": introduced["actor"], "account": lost.evidence}})

    def _look_at_node(self, node_id: str) -> str:
        """Return how a node is gone, in words, if it is: Ray itself notices late that one went without a word."""
        node = self._nodes.get(node_id)
        if node is None or (node["Alive"] and answers(node)):
            return ""
        return f"its node {node['NodeManagerAddress']} is gone"

    # -- calls and hangs

    def _hear_of_deadline(self, role: str, ranks: list[int], method: str, timeout_s: float) -> None:
        """A call on a group ran past its deadline: note it, and find out who holds it up."""
        workers = self.context.state.workers
        known = [
            slot for slot, one in workers.items() for rank in ranks if holds(slot, role, rank) and one.state in THERE
        ]
        if not known:  # of another job, not set up yet, or lost
            return
        silent = ", ".join(map(str, ranks))
        evidence = f"{role}.{method}() did not answer within {timeout_s:g} s; still waiting for rank {silent}"
        self._apply(Failed(Kind.CALL, known[0], workers[known[0]].pid, evidence))
        self._hangs.suspect(tuple(known), f"{role}.{method}")

    def _ask_for_stacks(self, slot: str) -> None:
        if slot in self._by_slot:
            self._by_slot[slot].send({"stacks": True})


def _end_elsewhere(name: str, pid: int, node: str) -> None:
    end_named([name], within_s=0.0)  # gone for Ray, it may be there for the kernel
    kill_processes([(node, pid)])


class JobMaster:
    """The Ray actor.

    Its thread begins in `__init__`, against the rule, because Ray calls nothing else when it starts it again.
    """

    def __init__(self, begun: Begun, journal: str, watchfulness: Watchfulness, trainer: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self.journal, self.started = journal, time.time()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two for each worker: its connection and its process
        self.master = Master(begun, journal, watchfulness, trainer)
        threading.Thread(target=self._run, name="master", daemon=True).start()

    def _run(self) -> None:
        import ray

        self.master.run()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def address(self) -> tuple[str, int, str]:
        """Return where heartbeats go: host, port, and the token that admits them."""
        return self.master.address

    def describe(self) -> dict[str, Any]:
        """Return everything that is known, as JSON has it: the state, and what each process said last.

        "workers" has, by slot, what a new driver needs to find the living processes while they are busy, without asking
        them: name, pid, node, rank, group_size, and the state of each.
        """
        beats = {presence.slot: presence.beat for presence in list(self.master.monitor.presences.values())}
        doings = {doing.slot: asdict(doing) for doing in self.master.monitor.doings()}
        return {
            **to_json(self.master.context.state),
            "beats": beats,
            "doings": doings,
            "journal": self.journal,
            "is_durable": self.master.context.is_durable,
            "pid": os.getpid(),
            "started": self.started,
        }

    def stop(self, reason: str) -> None:
        """Have the trainer end the job, and make sure that it ends."""
        self.master.ask(StopAsked(reason))

    def account(self, slot: str, timeout_s: float) -> str:
        """Return how a process ended, waiting so long for the news; "" when it did not, or nobody knows."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            worker = self.master.context.state.workers.get(slot)
            if worker is not None and worker.account and (worker.state != Worker.ALIVE or self.is_over()):
                return worker.account
            time.sleep(0.02)
        return ""

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.master.context.state.state in JOB_ENDS
