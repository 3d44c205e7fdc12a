"""A trainer and workloads in the style of DLRover's first generation. The trainer writes what it saw as JSON."""

import json
import os
import signal
import time
from pathlib import Path

import ray

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.sdk import BaseTrainer, BaseWorkload, RLRoleType, trainer_invocation

PROPERTIES = ("role", "rank", "word_size", "world_size", "local_rank", "local_world_size")
METHODS = (
    "is_actor_role",
    "is_reference_role",
    "is_ref_role",
    "is_rollout_role",
    "is_reward_role",
    "is_critic_role",
    "get_device_collocation",
    "has_device_collocation",
    "is_actor_or_rollout_device_collocation",
)


def add_worker_count(proxy, *args, **kwargs):
    return (*args, proxy.world_size), kwargs


@ray.remote
class UserActor(BaseWorkload):
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        self.steps = 0

    @trainer_invocation(auto_shard=False)
    def describe(self):
        described = {name: getattr(self, name) for name in PROPERTIES}
        described |= {name: getattr(self, name)() for name in METHODS}
        described["name"] = self.name.rpartition("/")[2]
        described["rendezvous"] = [self.torch_master_addr, self.torch_master_port]
        described["master"] = type(self.master_handle).__name__
        described["lr"] = self.config.optim.lr
        return described

    def update(self, batch):  # without a mark
        self.steps += 1
        return batch

    @trainer_invocation(blocking=False)
    def later(self, x):
        return [self.rank, x]

    @trainer_invocation(is_async=True, timeout=2)
    def naps(self, seconds):
        time.sleep(seconds if self.rank else 0)
        return self.rank

    @trainer_invocation(target="RANK0", pre_func=add_worker_count, post_func=lambda proxy, result: [proxy.role, result])
    def first(self, x, count):
        return [x, count]

    @trainer_invocation(pre_function=lambda input: max(input, 0), post_function=sum)
    def filtered(self, input):
        return input + 1

    def process_id(self):
        return os.getpid()


class UserTrainer(BaseTrainer):
    def __init__(self, actor_handles, actor_classes, config):
        super().__init__(actor_handles, actor_classes, config)
        self.seen = {"order": ["constructed"]}

    def init(self):
        self.seen["order"].append("init")
        self.seen["described"] = self.RG_ACTOR.describe() + self.RG_ROLLOUT.describe() + self.RG_SEARCH_TOOL.describe()

    def fit(self):
        seen = self.seen
        seen["order"].append("fit")
        seen["groups"] = self.get_role_groups()
        seen["counts"] = [
            len(getattr(self, f"{role}s")) for role in ("actor", "reference", "rollout", "reward", "critic")
        ]
        seen["handles"] = {role: len(handles) for role, handles in self.actor_handles.items()}
        seen["classes"] = {role: meta.cls.__name__ for role, meta in self.actor_classes.items()}
        seen["resource"] = [self.get_workload_resource(role) for role in (RLRoleType.ACTOR, "search-tool")]
        seen["config"] = [self.config.optim.lr, type(self.config).__name__]
        seen["sharded"] = self.RG_ACTOR.update([["x"], ["y"]])
        seen["shared"] = self.RG_ACTOR.update("z")
        references = self.RG_ACTOR.later(5)
        seen["later"] = [[type(reference).__name__ for reference in references], ray.get(list(references))]
        seen["handle"] = ray.get([handle.update.remote("h") for handle in self.actors])
        seen["first"], seen["filtered"] = self.RG_ACTOR.first("a"), self.RG_ACTOR.filtered(-5)
        seen["all"] = self.RG_ACTOR.naps(0.3)
        try:
            self.RG_ACTOR.naps(5)
        except CallTimeout as error:
            seen["timeout"] = str(error)
        self.report_a_loss()
        Path(self.config.out).write_text(json.dumps(seen))

    def report_a_loss(self):
        self.job.report_step(1)
        [pid] = self.RG_ROLLOUT.process_id()
        os.kill(pid, signal.SIGKILL)
        try:
            self.RG_ROLLOUT.process_id()
        except WorkerLost as lost:
            self.seen["loss"], self.seen["recovered"] = str(lost), self.job.recover(lost)
        [new] = self.RG_ROLLOUT.process_id()
        self.seen["is_new"] = new != pid == pid and ray.get(self.rollouts[0].process_id.remote()) == new
