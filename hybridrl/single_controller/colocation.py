"""Several roles in one process per device: `create_colocated_worker_cls`, used as verl's users know it.

    roles = {"actor_rollout": RayClassWithInitArgs(...), "critic": RayClassWithInitArgs(...)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), role="actor_rollout+critic")
    groups = group.spawn(roles)         # {"actor_rollout": group, "critic": group}
    group.fuse(roles)                   # or: group.actor_rollout, group.critic

Inside a process, `worker.fused_worker_dict` holds all its workers by role. One process is cheaper (one CUDA context, one torch import)
and one crash takes all its roles; `trainer.colocate=device` gives every role its own process on the same device instead.
"""

from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs


class ColocatedWorker(Worker):
    """Stands for several roles in one process; it has no methods of its own to call, its roles' groups have."""


class ColocatedClassWithInitArgs(RayClassWithInitArgs):
    """The recipes of all roles that share a process."""

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs]):
        super().__init__(ColocatedWorker)
        self.class_dict = class_dict
        for recipe in class_dict.values():
            self.set_additional_resource(recipe.additional_resources)
            self.update_options(recipe.options)

    def recipes(self, role: str) -> dict[str, ClassWithInitArgs]:
        return {role: recipe.recipes(role)[role] for role, recipe in self.class_dict.items()}


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Return one recipe that makes every role's worker in the same process, in the order of the mapping."""
    if not class_dict:
        raise ValueError("class_dict is empty: name at least one role with its class")
    return ColocatedClassWithInitArgs(class_dict)


# verl's spellings of the same: its two kinds of shared processes differ in how calls are forwarded, which users do not see here.
create_colocated_worker_cls_fused = create_colocated_worker_raw_cls = create_colocated_worker_cls
