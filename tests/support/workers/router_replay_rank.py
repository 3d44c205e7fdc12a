"""One rank of the tests of replayed routes on several processes. Not a test file.

    python -m tests.support.workers.router_replay_rank RANK NUM_RANKS ENGINE FOLDER

Rank 0 writes its rows, log-probs and statistics with forced and with own routes, and gradients, to FOLDER/ENGINE.pt.
With ENGINE=updates it writes all rows' log-probs and the weights after UPDATES steps instead, with the experts shared
by all ranks: with the routers' own choice, and with one that is replayed.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.config.schema.workers import MegatronConfig, OptimConfig
from hybridrl.workers.engine.base import EngineSetup, MicroBatching
from tests.support.workers.engine_cases import OPTIM, make_engine
from tests.support.workers.prefix_cases import grouped_batch
from tests.support.workers.routing_cases import random_routes, real_lengths, with_routes

MICRO = MicroBatching(max_rows=2)
UPDATES = 8
FAST = OptimConfig(lr=1e-3)
LAYERS = 4  # two for each of two stages, or one for each of their two parts
LAYOUTS = {
    "fsdp": {},
    "megatron": {},
    "megatron_packed": {"packed": True},
    "megatron_pp2": {"settings": MegatronConfig(pipeline_model_parallel_size=2, dtype="float32")},
    "megatron_pp2_recomputed": {
        "packed": True,
        "gradient_checkpointing": True,
        "settings": MegatronConfig(pipeline_model_parallel_size=2, dtype="float32"),
    },
    "megatron_vpp2": {
        "packed": True,
        "settings": MegatronConfig(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, dtype="float32"
        ),
    },
    "megatron_cp2": {  # with a distributed optimizer no process would have the whole gradients
        "packed": True,
        "settings": MegatronConfig(context_parallel_size=2, use_distributed_optimizer=False, dtype="float32"),
    },
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
    return with_routes(rows, random_routes(real_lengths(rows), layers=LAYERS))


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


def after_updates(num_ranks: int, rank: int, path: str, rows) -> dict[str, torch.Tensor]:
    """Return log-probs of all rows and weights after some updates, of which each rank computes its share."""
    from hybridrl.workers.engine.megatron.engine import MegatronEngine
    from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel

    layout = MegatronConfig(expert_model_parallel_size=num_ranks, dtype="float32")
    engine = MegatronEngine(
        EngineSetup(kind="causal_lm", path=path, replays_routes=True, settings=layout, optim=FAST, total_steps=10)
    )
    engine.setup()
    own = rows.select_idxs(list(range(rank, len(rows), num_ranks)))
    for _ in range(UPDATES):
        engine.forward_backward(own, MICRO, loss_of, outputs=("log_probs",))
        engine.optimizer_step()
    found = dict(engine.weights())
    found |= {"log_probs": engine.forward(rows, MICRO, outputs=("log_probs",))["log_probs"]}
    destroy_model_parallel()
    return found


def gradients_of(name: str, engine) -> dict[str, torch.Tensor]:
    if name == "fsdp":
        return {key: tensor.grad.full_tensor() for key, tensor in engine.model.named_parameters()}
    from tests.support.workers.megatron_rank import gradients

    return gradients(engine)


def main(rank: int, num_ranks: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store_{name}_{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    if name == "updates":
        rows = all_rows()
        plain = rows.select(non_tensor_batch_keys=[])
        found = {
            how: after_updates(num_ranks, rank, str(folder), these)
            for how, these in {"own": plain, "replayed": rows}.items()
        }
        if rank == 0:
            torch.save(found, folder / f"{name}_{num_ranks}.pt")
        dist.barrier()
        return
    engine, rows = engine_of(name, str(folder)), all_rows()
    shared = engine.mesh_position.dp_size == 1
    own = [0, 1, 2, 3, 4] if shared else [[0, 2, 3, 4], [1]][rank]
    rows = rows.select_idxs(own)
    plain = rows.select(non_tensor_batch_keys=[])
    chosen, routes = engine.forward_with_routes(plain, MICRO, outputs=("log_probs",))
    again = engine.forward(with_routes(rows, routes), MICRO, outputs=("log_probs",))
    found = engine.forward(rows, MICRO, outputs=("log_probs",))["log_probs"]
    stats = engine.forward_backward(rows, MICRO, loss_of, outputs=("log_probs",))
    gradients, all_stats = gradients_of(name, engine), [[]] * num_ranks
    dist.all_gather_object(all_stats, stats)  # the last stage has them
    if rank == 0:
        result = {"rows": own, "own": torch.equal(chosen["log_probs"], again["log_probs"]), "log_probs": found}
        result |= {"stats": sum(all_stats, []), "gradients": gradients, "routes": [*routes]}
        torch.save(result, folder / f"{name}_{num_ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
