"""`BaseWorkload`: the base class of roles in the style of DLRover's first generation.

    class UserActor(BaseWorkload):
        def __init__(self, master_handle, config):
            super().__init__(master_handle, config)

        @trainer_invocation(timeout=600, is_async=True)
        def update(self, batch): ...

A job that names the class as the entry of a role constructs one in each process of the role.
"""

import os
import time
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from hybridrl.master.jobs.job_context import JobContext
from hybridrl.sdk.runtime import RLRoleType, role_key
from hybridrl.single_controller.cluster import find_actor, master_name
from hybridrl.single_controller.placement.plan import COLLOCATION_VARIABLE
from hybridrl.single_controller.worker import Worker


class BaseWorkload(Worker):
    """One process of a role.

    The job constructs it; subclasses keep the constructor's two arguments.

    Attributes:
        master_handle: Ray's handle of the job's master.
        config: The job's config.
        create_time: Seconds since the epoch at which it was constructed.
    """

    def __init__(self, master_handle: Any, config: Any) -> None:
        self._master_handle = master_handle
        self._config = OmegaConf.create(config)
        self._create_time = int(time.time())

    @classmethod
    def from_job(cls, context: JobContext) -> Self:
        """Return the workload of this process. The job calls it."""
        return cls(find_actor(master_name(context.run)), OmegaConf.create(dict(context.config)))

    @property
    def master_handle(self) -> Any:
        return self._master_handle

    @property
    def config(self) -> DictConfig:
        return self._config

    @property
    def create_time(self) -> int:
        return self._create_time

    @property
    def name(self) -> str:
        """The unique name of this process: `job/role-rank`."""
        return os.environ["NAME"]

    @property
    def role(self) -> RLRoleType | str:
        """The role; text in upper case for a job's own role."""
        return role_key(os.environ["ROLE"])

    @property
    def word_size(self) -> int:
        """`world_size`, as DLRover's guide writes it."""
        return self.world_size

    @property
    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    @property
    def local_world_size(self) -> int:
        return int(os.environ["LOCAL_WORLD_SIZE"])

    @property
    def torch_master_addr(self) -> str:
        """The address at which rank 0 of the role listens, for torch's rendezvous."""
        return os.environ.get("MASTER_ADDR", "")

    @property
    def torch_master_port(self) -> int:
        """The port of `torch_master_addr`: a free one, chosen for each start of the role. -1 outside of a job."""
        return int(os.environ.get("MASTER_PORT", -1))

    def is_actor_role(self) -> bool:
        return self.role == RLRoleType.ACTOR

    def is_reference_role(self) -> bool:
        return self.role == RLRoleType.REFERENCE

    def is_ref_role(self) -> bool:
        """`is_reference_role`, as DLRover's code writes it."""
        return self.is_reference_role()

    def is_rollout_role(self) -> bool:
        return self.role == RLRoleType.ROLLOUT

    def is_reward_role(self) -> bool:
        return self.role == RLRoleType.REWARD

    def is_critic_role(self) -> bool:
        return self.role == RLRoleType.CRITIC

    def get_device_collocation(self) -> str:
        """Return the roles that share this one's devices, such as "ACTOR,ROLLOUT"; "" if no others do."""
        return os.environ.get(COLLOCATION_VARIABLE, "")

    def has_device_collocation(self) -> bool:
        return bool(self.get_device_collocation())

    def is_actor_or_rollout_device_collocation(self) -> bool:
        """Return whether actor and rollout share devices, and this process is one of them."""
        shared = self.get_device_collocation().split(",")
        return (self.is_actor_role() or self.is_rollout_role()) and {"ACTOR", "ROLLOUT"} <= set(shared)
