"""Tensor-parallel vLLM with one engine per worker process: the executor, and the shards that each rank holds.

vLLM imports this module inside its worker. Every rank is one of our own worker processes with an engine of its own. All
engines of a tensor-parallel group get the same requests in the same order and schedule them alike. They synchronize in
the layers' collectives, on the process group of our workers.
"""

import os
from collections.abc import Iterator
from glob import escape
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hybridrl.workers.weight_transfer.fingerprint import NamedTensor

SHARED_MEMORY = Path("/dev/shm")


class InWorkerExecutor(ExecutorWithExternalLauncher):
    """vLLM's executor for ranks that our driver started, with names that do not collide on one host."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return an address, this rank in the process group, and its device.

        No process connects to the address, because the process group exists already. On CPU vLLM names its shared
        memory after the address's last part: with "env://" all jobs of a machine would share one name.
        """
        local_rank = 0 if current_platform.is_cpu() else torch.cuda.current_device()
        return f"tcp://{os.environ['MASTER_ADDR']}:{_group_name()}", dist.get_rank(), local_rank

    def _init_executor(self) -> None:
        super()._init_executor()
        # After the barrier all ranks have mapped the segments. Unlinked, they vanish with the processes, also killed
        # ones. Other engines of this process group may still map theirs, which have other ranks in the name.
        dist.barrier(group=get_tp_group().cpu_group)
        ranks = escape(f"[{'-'.join(map(str, get_tp_group().ranks))}]")
        for segment in SHARED_MEMORY.glob(f"{_group_name()}-tp*{ranks}*"):
            segment.unlink(missing_ok=True)
        queue = get_tp_group().mq_broadcaster
        if queue is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False  # or else its destructor unlinks it again


def _group_name() -> str:
    return f"hybridrl{os.environ['MASTER_PORT']}"


def local_shards(model: torch.nn.Module) -> Iterator[NamedTensor]:
    """Yield this rank's part of the group's weights; over all ranks every element appears once."""
    is_first = get_tp_group().rank_in_group == 0
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_sharded = _is_sharded(module, name)
            if isinstance(module, QKVParallelLinear) and is_sharded:
                yield f"{path}.{name}", _local_heads(module, parameter)
            elif is_first or is_sharded:
                yield f"{path}.{name}", parameter


def _is_sharded(module: torch.nn.Module, name: str) -> bool:
    """Return whether every rank has other elements of a module's own parameter."""
    if isinstance(module, RoutedExperts):  # a router's bias, which it names too, is whole on every rank
        layout = module.moe_config.moe_parallel_config
        return max(layout.tp_size, layout.ep_size) > 1 and name.startswith(("w13_", "w2_"))
    if isinstance(module, ReplicatedLinear) or (isinstance(module, RowParallelLinear) and name == "bias"):
        return False  # although they have a `tp_size`
    return getattr(module, "tp_size", 1) > 1 or name == "sinks"  # of gpt-oss, whose attention layer has none


def _local_heads(module: QKVParallelLinear, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the rows of the query heads, and of the key and value heads.

    Without the latter if an earlier rank has the same ones.
    """
    if module.tp_rank % module.num_kv_head_replicas == 0:
        return parameter
    queries = parameter.size(0) * module.output_sizes[0] // sum(module.output_sizes)  # of scales a row is of a block
    return parameter[:queries]


def sum_over_group(number: int) -> int:
    """Return the sum modulo 2^64 over the ranks of the tensor-parallel group."""
    total = torch.tensor(number - (1 << 64) if number >= 1 << 63 else number, dtype=torch.int64)
    dist.all_reduce(total, group=get_tp_group().cpu_group)
    return int(total) % (1 << 64)
