"""One rank of the image tests on two processes; not a test file.

Rank 1 has rows without images only.

python -m tests.support.workers.image_rank RANK NUM_RANKS MODEL FOLDER
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.workers.engine.base import MicroBatching
from tests.support.workers.engine_cases import gradients, make_engine, policy_loss
from tests.support.workers.image_cases import image_batch

NUM_TOKENS = 40.0
POLICY = ("log_probs", "entropy")
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed, recomputed": {"packed": True, "gradient_checkpointing": True},
    "tree": {"share_prefixes": True},
    "frozen tower": {"packed": True, "freeze_vision_tower": True},
}
TEXT_ROWS = [2, 3]  # of `image_batch` with two samples


def main(rank: int, model: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    batch, found = image_batch(model), {}
    mine = batch.select_idxs(TEXT_ROWS if rank else [row for row in range(len(batch)) if row not in TEXT_ROWS])
    for case, settings in CASES.items():
        engine = make_engine(model, **settings)
        engine.forward(mine, MicroBatching(max_rows=3), outputs=POLICY)
        engine.forward_backward(mine, MicroBatching(max_rows=3), policy_loss(NUM_TOKENS), outputs=POLICY)
        found[case] = gradients(engine)
    torch.save(found, folder / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3], Path(sys.argv[4]))
