"""One rank of vLLM engines over two processes: a push to each of several models.

Not a test file.

    python -m tests.support.workers.vllm_shards_rank RANK WORLD FOLDER PORT MODEL...

FOLDER contains the models, of which `fp8` is held in fp8. The ranks add a file store, and rank 0 `shards.pt`: by model,
the largest difference of a log-prob after the push.
"""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.workers.rollout import make_rollout
from tests.support.workers.expert_cases import changed_model, log_prob_differences, pushed, rounded, setup_of


def main(rank: int, world: int, folder: Path, port: str, *models: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # of no process: they name shared memory
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=100))
    found = {}
    for name in models:
        setup, model = setup_of(str(folder / name)), changed_model(str(folder / name), seed=1)
        own = {"tensor_model_parallel_size": world, "quantization": "fp8" if name == "fp8" else None}
        rollout = make_rollout("vllm", replace(setup, config=replace(setup.config, **own)))
        rollout.load_weights(1, pushed(model) if name == "fp8" else model.state_dict().items())
        model = rounded(model) if name == "fp8" else model
        found[name] = float(log_prob_differences(rollout, model).abs().max())
    if rank == 0:
        torch.save(found, folder / "shards.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
