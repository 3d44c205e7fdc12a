"""One rank of the tests of replayed routes on several processes. Not a test file.

    python -m tests.support.workers.router_replay_rank RANK NUM_RANKS ENGINE FOLDER

Rank 0 writes its rows, log-probs and statistics with forced and with own routes, and gradients, to FOLDER/ENGINE.pt.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.config.schema.workers import MegatronConfig
from hybridrl.workers.engine.base import EngineSetup, MicroBatching
from tests.support.workers.engine_cases import OPTIM, make_engine
from tests.support.workers.prefix_cases import grouped_batch
from tests.support.workers.routing_cases import random_routes, real_lengths, with_routes

MICRO = MicroBatching(max_rows=2)
LAYOUTS = {
    "fsdp": {},
    "megatron": {},
    "megatron_packed": {"packed": True},
    "megatron_tp2_ep2": {
        "packed": True,
        "settings": MegatronConfig(
            tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True, dtype="float32"
        ),
    },
}


def all_rows():
    rows = grouped_batch([(6, [5, 8, 3]), (9, [4, 4])])
    rows.batch["input_ids"] %= 64
    return with_routes(rows, random_routes(real_lengths(rows)))


def loss_of(outputs, rows):
    loss = (outputs["log_probs"] * rows.batch["advantages"] * rows.batch["response_mask"]).sum()
    return loss, {"loss": loss}


def engine_of(name: str, path: str):
    if name == "fsdp":
        return make_engine(path, replays_routes=True, packed=True)
    from hybridrl.workers.engine.megatron.engine import MegatronEngine

    own = {"settings": MegatronConfig(dtype="float32"), "optim": OPTIM, "total_steps": 10} | LAYOUTS[name]
    engine = MegatronEngine(EngineSetup(kind="causal_lm", path=path, replays_routes=True, **own))
    engine.setup()
    return engine


def gradients_of(name: str, engine) -> dict[str, torch.Tensor]:
    if name == "fsdp":
        return {key: tensor.grad.full_tensor() for key, tensor in engine.model.named_parameters()}
    from tests.support.workers.megatron_rank import gradients

    return gradients(engine)


def main(rank: int, num_ranks: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store_{name}_{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    engine, rows = engine_of(name, str(folder)), all_rows()
    shared = engine.mesh_position.dp_size == 1
    own = [0, 1, 2, 3, 4] if shared else [[0, 2, 3, 4], [1]][rank]
    rows = rows.select_idxs(own)
    plain = rows.select(non_tensor_batch_keys=[])
    chosen, routes = engine.forward_with_routes(plain, MICRO, outputs=("log_probs",))
    again = engine.forward(with_routes(rows, routes), MICRO, outputs=("log_probs",))
    found = engine.forward(rows, MICRO, outputs=("log_probs",))["log_probs"]
    stats = engine.forward_backward(rows, MICRO, loss_of, outputs=("log_probs",))
    gradients = gradients_of(name, engine)
    if rank == 0:
        result = {"rows": own, "own": torch.equal(chosen["log_probs"], again["log_probs"]), "log_probs": found}
        result |= {"stats": stats, "gradients": gradients, "routes": [*routes]}
        torch.save(result, folder / f"{name}_{num_ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
