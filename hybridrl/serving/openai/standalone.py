"""Serve a model from a directory without training: `hybridrl serve`.

The model has one replica in this process, or several replica processes on Ray.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from hybridrl import single_controller
from hybridrl.config.schema.data import ImageDataConfig
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import ConfigError
from hybridrl.serving.openai.connections import serve_until_stopped
from hybridrl.serving.openai.parameters import ServedModel
from hybridrl.serving.openai.server import Endpoint
from hybridrl.serving.replicas import GroupReplicas, Replicas
from hybridrl.serving.router import ReplicaRouter
from hybridrl.single_controller.worker_group import ClassWithInitArgs, RayClassWithInitArgs
from hybridrl.workers.images import load_processor
from hybridrl.workers.replica import ReplicaWorker
from hybridrl.workers.rollout.base import VERSION_ON_DISK, RolloutSetup, load_special_tokens

DEFAULT_MAX_LENGTH = 4096  # tokens of prompt and response where --max-length is not set; limits the KV cache
MAX_SEQUENCES = 64  # generated concurrently by a replica; others wait
KV_CACHE_MB = 512  # of vLLM on the CPU
PROGRESS_TIMEOUT_S = 300.0  # a replica without an answer for this long counts as lost


@dataclass(frozen=True)
class StandaloneModel:
    """A model to serve.

    Attributes:
        path: Directory of the model.
        name: As clients call it.
        max_length: Tokens of prompt and response; None: the model's limit, at most `DEFAULT_MAX_LENGTH`.
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
        config = RolloutConfig(name=self.engine, max_num_seqs=MAX_SEQUENCES, kv_cache_memory_mb=KV_CACHE_MB)
        return RolloutSetup(
            self.path,
            config,
            tokens.eos_ids,
            tokens.pad_id,
            max_prompt_length=1,  # any split of the whole will do
            max_response_length=chosen_length(self._config(), self.max_length) - 1,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
        )

    def served(self) -> ServedModel:
        config = self._config()
        length = chosen_length(config, self.max_length)
        model = ModelConfig(path=self.path, trust_remote_code=self.trust_remote_code)
        processor = load_processor(model, self.tokenizer, ImageDataConfig())
        vocabulary = config.get_text_config().vocab_size
        return ServedModel(self.name, self.tokenizer, length, length - 1, vocabulary, processor=processor)

    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)


def chosen_length(model: Any, max_length: int | None) -> int:
    """Return the tokens of prompt and response. max_length: The user's choice, --max-length.

    Raises:
        ConfigError: The model has fewer positions.
    """
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)
    if max_length is None:
        return min(limit or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if max_length < 2 or (limit is not None and max_length > limit):
        raise ConfigError(f"--max-length={max_length}: must be from 2 to the {limit} positions that the model has")
    return max_length


@contextmanager
def one_replica(setup: RolloutSetup, *, num_threads: int | None = None) -> Iterator[Replicas]:
    """Run the model in this process, without Ray."""
    worker = ClassWithInitArgs(ReplicaWorker, setup, num_threads=num_threads)
    group = single_controller.LocalWorkerGroup(None, worker, role="replica")
    group.calls.init_model()
    yield GroupReplicas(group, version=VERSION_ON_DISK, progress_timeout_s=PROGRESS_TIMEOUT_S)


@contextmanager
def replicas_on_ray(setup: RolloutSetup, process_on_nodes: Sequence[int]) -> Iterator[Replicas]:
    """Run the model in processes of the connected Ray cluster. Lost processes are restarted.

    Args:
        setup: Settings of each process.
        process_on_nodes: How many processes each machine has.
    """
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[setup.device]
    with (
        single_controller.RayResourcePool([*process_on_nodes], use_gpu=use_gpu) as pool,
        single_controller.RayWorkerGroup(pool, RayClassWithInitArgs(ReplicaWorker, setup), role="replica") as group,
    ):
        group.calls.init_model()
        yield GroupReplicas(
            group, version=VERSION_ON_DISK, progress_timeout_s=PROGRESS_TIMEOUT_S, resync=lambda rank: None
        )


def serve_forever(
    model: StandaloneModel,
    replicas: AbstractContextManager[Replicas],
    *,
    host: str,
    port: int,
    on_start: Callable[[Endpoint], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        model: The model to serve.
        replicas: Opened for the time of serving.
        host: Address to listen on.
        port: Port to listen on.
        on_start: Called once the endpoint listens.
    """
    with replicas as served_by:
        asyncio.run(_serve(model.served(), served_by, host=host, port=port, on_start=on_start))


async def _serve(
    served: ServedModel, replicas: Replicas, *, host: str, port: int, on_start: Callable[[Endpoint], None]
) -> None:
    async with ReplicaRouter(replicas) as router:
        await serve_until_stopped(Endpoint(router, served, host=host, port=port), on_start)
