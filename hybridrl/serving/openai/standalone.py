"""A model of a directory behind the endpoint, by itself: `hybridrl serve`.

One replica in this process, or several on Ray.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema.workers import RolloutConfig
from hybridrl.errors import ConfigError
from hybridrl.serving.openai.server import Endpoint, Served
from hybridrl.serving.router import GroupReplicas, Replicas, Router
from hybridrl.workers.replica import LocalReplica, ReplicaWorker
from hybridrl.workers.rollout.base import VERSION_ON_DISK, RolloutSetup, load_special_tokens

LONGEST = 4096  # tokens of prompt and response, unless somebody says more: keys and values take memory
MOST_SEQUENCES = 64  # generated at the same time by a replica; others wait
KV_CACHE_MB = 512  # of vLLM on the CPU
PROGRESS_TIMEOUT_S = 300.0  # without an answer for so long a replica counts as stuck


@dataclass(frozen=True)
class StandaloneModel:
    """path: a model's directory.

    name: as clients call it. max_length: of prompt and response; None: what the model has, to `LONGEST`.
    """

    path: str
    name: str
    tokenizer: Any
    engine: str = "hf"
    max_length: int | None = None
    device: str = "auto"
    trust_remote_code: bool = False

    def setup(self) -> RolloutSetup:
        tokens = load_special_tokens(self.path, trust_remote_code=self.trust_remote_code)
        config = RolloutConfig(name=self.engine, max_num_seqs=MOST_SEQUENCES, kv_cache_memory_mb=KV_CACHE_MB)
        return RolloutSetup(
            self.path,
            config,
            tokens.eos_ids,
            tokens.pad_id,
            max_prompt_length=1,  # any split of the whole will do
            max_response_length=self._length() - 1,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
        )

    def served(self) -> Served:
        length = self._length()
        return Served(self.name, self.tokenizer, length, length - 1, self._config().vocab_size)

    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)

    def _length(self) -> int:
        limit = getattr(self._config(), "max_position_embeddings", None)
        if self.max_length is None:
            return min(limit or LONGEST, LONGEST)
        if self.max_length < 2 or (limit is not None and self.max_length > limit):
            raise ConfigError(
                f"--max-length={self.max_length}: must be from 2 to the {limit} positions that the model has"
            )
        return self.max_length


@contextmanager
def one_replica(model: StandaloneModel, *, num_threads: int | None = None) -> Iterator[Replicas]:
    """The model in this process, without Ray."""
    from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
    from hybridrl.single_controller.worker_group import ClassWithInitArgs

    group = LocalWorkerGroup(
        None, ClassWithInitArgs(ReplicaWorker, model.setup(), num_threads=num_threads), role="replica"
    )
    group.init_model()
    yield LocalReplica(group.worker.rollout)


@contextmanager
def replicas_on_ray(model: StandaloneModel, num_replicas: int) -> Iterator[Replicas]:
    """The model in processes of its own, of a cluster that was joined. A process that is lost is started anew."""
    from hybridrl.single_controller.placement.resource_pool import RayResourcePool
    from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup

    with (
        RayResourcePool([num_replicas], use_gpu=None) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(ReplicaWorker, model.setup()), role="replica") as group,
    ):
        group.init_model()
        yield GroupReplicas(
            group, version=VERSION_ON_DISK, progress_timeout_s=PROGRESS_TIMEOUT_S, refill=lambda rank: None
        )


def serve_until_told(
    model: StandaloneModel,
    replicas: AbstractContextManager[Replicas],
    *,
    host: str,
    port: int,
    on_start: Callable[[Endpoint], None],
) -> None:
    """Answer until Ctrl-C or SIGTERM. on_start: told when it answers."""
    with replicas as served_by:
        asyncio.run(_serve(model.served(), served_by, host=host, port=port, on_start=on_start))


async def _serve(
    served: Served, replicas: Replicas, *, host: str, port: int, on_start: Callable[[Endpoint], None]
) -> None:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not the main thread: whoever started it cancels it
            asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with Router(replicas) as router:
        endpoint = Endpoint(router, served, host=host, port=port)
        await endpoint.start()
        on_start(endpoint)
        try:
            await told.wait()
        finally:
            await endpoint.stop()
