from . import launch as launch
from .dispatch import (
    Dispatch as Dispatch,
)
from .dispatch import (
    Execute as Execute,
)
from .dispatch import (
    make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
)
from .dispatch import (
    register as register,
)
from .dispatch import (
    register_dispatch_mode as register_dispatch_mode,
)
from .invocation import Invocation as Invocation
from .local_worker_group import LocalWorkerGroup as LocalWorkerGroup
from .monitoring.work_done import ask_work as ask_work
from .monitoring.work_done import forget_work as forget_work
from .placement.node_slots import ResourcePool as ResourcePool
from .placement.resource_pool import RayResourcePool as RayResourcePool
from .placement.resource_pool import cluster_has_gpus as cluster_has_gpus
from .ray_worker_group import (
    RayWorkerGroup as RayWorkerGroup,
)
from .ray_worker_group import (
    create_colocated_worker_cls as create_colocated_worker_cls,
)
from .worker import Worker as Worker
from .worker_group import RayClassWithInitArgs as RayClassWithInitArgs
from .worker_group import WorkerGroup as WorkerGroup
