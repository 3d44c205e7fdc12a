"""What `init_worker_process` changes in its process, and how long its collectives wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.workers.process_setup import ALLOCATOR_VARIABLES, collective_timeout, join_process_group
from tests.support.ranks import fork_ranks

# Page faults of making and dropping tensors of 64 MiB, after a few rounds that get the memory.
PROGRAM = """
import resource, torch
from hybridrl.workers.process_setup import init_worker_process
if {set_up}:
    init_worker_process(device="cpu", num_threads=1)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    before = faults()
    tensors = [torch.ones(2**24) for _ in range(4)]
    del tensors
print(faults() - before)
"""


def page_faults(*, set_up: bool, **chosen: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    environment |= {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "RANK": "0"} | chosen
    command = [sys.executable, "-c", PROGRAM.format(set_up=set_up)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.slow
def test_a_worker_keeps_the_memory_of_large_tensors_unless_the_user_says_otherwise():
    untouched = page_faults(set_up=False)
    assert page_faults(set_up=True) < untouched / 4
    assert page_faults(set_up=True, MALLOC_TRIM_THRESHOLD_="131072") > untouched / 2


def times_of_groups(rank: int, folder: Path) -> None:
    """Write the seconds that collectives of two worlds wait: the engine's own, then Megatron's."""
    from megatron.core import parallel_state

    from hybridrl.config.schema.workers import MegatronConfig
    from hybridrl.workers.engine.megatron.parallel_groups import init_model_parallel

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "1"}
    found = []
    for call_timeout_s in (45.0, 30.0):
        join_process_group("cpu", call_timeout_s=call_timeout_s)
        init_model_parallel(MegatronConfig(), device="cpu", seed=0)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        found += [collective_timeout(), pipeline._get_backend(torch.device("cpu")).options._timeout]
        assert parallel_state.is_pipeline_last_stage()
        dist.destroy_process_group()
    (folder / "seconds").write_text(str([timeout.total_seconds() for timeout in found]))


def test_collectives_have_twice_the_time_of_a_call_in_megatrons_groups_too_and_in_those_of_a_second_world(tmp_path):
    pytest.importorskip("megatron.core")
    assert fork_ranks(times_of_groups, 1, tmp_path, timeout_s=100) == [0]
    assert (tmp_path / "seconds").read_text() == "[90.0, 90.0, 60.0, 60.0]"
