"""One rank of the Megatron engine's tests: trains and computes under one layout, and writes what it found. Not a test file.

    python -m tests.workers.megatron_rank RANK WORLD FOLDER CASE

FOLDER gets a file store and, of rank 0, `CASE.pt`; has the models.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.config.workers import MegatronConfig
from hybridrl.workers.engine.base import EngineConfig, MicroBatching
from hybridrl.workers.engine.megatron.engine import MegatronEngine, finalize_model_grads
from hybridrl.workers.engine.megatron.hf_weights import whole_tensors
from tests.workers.engine_cases import OPTIM, make_batch, num_response_tokens, policy_loss, train, whole_weights
from tests.workers.megatron_models import CASES, PLAIN, POLICY, STEPS


def make_engine(path: str, layout: dict, **settings) -> MegatronEngine:
    usual = {"kind": "causal_lm", "path": path, "optim": OPTIM, "grad_clip": 100.0, "total_steps": 10}
    engine = MegatronEngine(EngineConfig(**usual | settings, megatron=MegatronConfig(**layout)))
    engine.setup()
    return engine


def rows_of(engine: MegatronEngine, batch):
    """This rank's rows: of an uneven share of the batch."""
    place = engine.place
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)).tolist()
    limits = [0, 17, len(batch)] if place.dp_size == 2 else [0, len(batch)]
    return batch.select_idxs(order[limits[place.dp_rank] : limits[place.dp_rank + 1]])


def gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Whole gradients by Hugging Face name. Collective. With a distributed optimizer no process has them whole."""
    finalize_model_grads(engine._modules, None)
    found = whole_tensors(engine.chunks, kind="causal_lm", tied=engine._tied, of=lambda parameter: parameter.main_grad)
    return {name: gradient.clone() for name, gradient in found}


def compute(case: str, folder: Path) -> dict:
    _, model, layout, settings = CASES[case]
    batch = make_batch()
    batch.batch["number"] = torch.arange(len(batch))
    path, micro = str(folder / model), MicroBatching(max_rows=5)
    num_tokens = num_response_tokens(batch)
    trained = make_engine(path, layout, **settings)
    mine = rows_of(trained, batch)
    start = whole_weights(trained)
    outputs = trained.forward(mine, micro, outputs=POLICY) | {"number": mine.batch["number"]}
    plain = make_engine(path, layout | PLAIN, **settings)
    plain.forward_backward(mine, micro, policy_loss(num_tokens), outputs=POLICY)
    first = gradients(plain)
    said = train(trained, mine, micro, num_tokens=num_tokens, steps=STEPS)
    return {"start": start, "outputs": outputs, "gradients": first, "said": said, "weights": whole_weights(trained)}


def main(rank: int, world: int, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{case} store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=150))
    found = compute(case, folder)
    if rank == 0:
        torch.save(found, folder / f"{case}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
