"""The part of tensor-parallel vLLM that vLLM itself imports: where an engine's ranks are, and what each of them holds.

Every rank is one of our own worker processes with an engine of its own. All engines of a tensor-parallel group get the
same requests in the same order, schedule them alike, and meet in the layers' collectives; they belong to the process
group that our workers have.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from hybridrl.workers.weight_transfer.fingerprint import Named

SHARED_MEMORY = Path("/dev/shm")


class InWorkerExecutor(ExecutorWithExternalLauncher):
    """vLLM's executor for engines whose ranks were started by somebody else, without what collides on one host."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return an address, this rank in the process group, and its device.

        Nobody connects to the address, because the process group is there already. On CPU vLLM names its shared memory
        after its last part: with "env://" all jobs of a machine would have the same.
        """
        local_rank = 0 if current_platform.is_cpu() else torch.cuda.current_device()
        return f"tcp://{os.environ['MASTER_ADDR']}:{_name_of_group()}", dist.get_rank(), local_rank

    def _init_executor(self) -> None:
        super()._init_executor()
        # All ranks have mapped it by now. Without its name it goes when they do, also if they are killed.
        dist.barrier(group=get_tp_group().cpu_group)
        for segment in SHARED_MEMORY.glob(f"{_name_of_group()}-tp*"):
            segment.unlink(missing_ok=True)


def _name_of_group() -> str:
    return f"hybridrl{os.environ['MASTER_PORT']}"


def own_shards(model: torch.nn.Module) -> Iterator[Named]:
    """Yield what this rank adds to the weights of its tensor-parallel group: every weight once over
    all of its ranks.
    """
    first = get_tp_group().rank_in_group == 0
    for path, module in model.named_modules():
        shards = getattr(module, "tp_size", 1) > 1
        for name, parameter in module.named_parameters(recurse=False):
            whole = not shards or (isinstance(module, RowParallelLinear) and name == "bias")
            if isinstance(module, QKVParallelLinear) and shards:
                yield f"{path}.{name}", _own_heads(module, parameter)
            elif first or not whole:
                yield f"{path}.{name}", parameter


def _own_heads(module: QKVParallelLinear, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the rows of query heads, and those of key and value heads unless an earlier rank has the same ones."""
    repeated = module.tp_rank % module.num_kv_head_replicas > 0
    return parameter[: module.num_heads * module.head_size] if repeated else parameter


def sum_over_group(number: int) -> int:
    """Return the sum modulo 2^64 over the ranks of the tensor-parallel group."""
    total = torch.tensor(number - (1 << 64) if number >= 1 << 63 else number, dtype=torch.int64)
    dist.all_reduce(total, group=get_tp_group().cpu_group)
    return int(total) % (1 << 64)
