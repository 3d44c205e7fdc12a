"""What `init_worker_process` changes in its process."""

import os
import subprocess
import sys

import pytest

from hybridrl.workers.process_setup import ALLOCATOR_VARIABLES

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
def test_a_worker_keeps_the_memory_of_large_tensors_unless_the_user_says_otherwise():
    untouched = page_faults(set_up=False)
    assert page_faults(set_up=True) < untouched / 4
    assert page_faults(set_up=True, MALLOC_TRIM_THRESHOLD_="131072") > untouched / 2
