"""One rank of the Megatron engine tests: train and compute under one layout after the other, and write the results.

Not a test file.

    python -m tests.support.workers.megatron_rank RANK WORLD FOLDER CASE...

FOLDER contains the models. The ranks add a file store per case, and rank 0 `CASE.pt`.
"""

import sys
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from hybridrl.config.schema.workers import MegatronConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import Engine, EngineSetup
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from hybridrl.workers.engine.megatron.engine import MegatronEngine, finalize_model_grads
from hybridrl.workers.engine.megatron.hf_weights import gather_full_tensors
from hybridrl.workers.engine.megatron.local_tokens import LocalTokens
from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel
from tests.support.workers.engine_cases import OPTIM, case_batch, num_response_tokens, policy_loss, train, whole_weights
from tests.support.workers.engine_cases import gradients as fsdp_gradients
from tests.support.workers.engine_cases import make_engine as make_fsdp
from tests.support.workers.megatron_models import (
    CASES,
    MICRO,
    PLAIN,
    POLICY,
    PPO_EPOCHS,
    STEPS,
    all_tokens_as_response,
    ppo_losses,
)

PPO_LOSSES = ("actor/loss", "critic/vf_loss")


def make_engine(path: str, layout: dict, **settings) -> MegatronEngine:
    usual = {"kind": "causal_lm", "path": path, "optim": OPTIM, "grad_clip": 100.0, "total_steps": 10}
    own = {field.name: settings.pop(field.name) for field in fields(MegatronConfig) if field.name in settings}
    engine = MegatronEngine(EngineSetup(**usual | settings, settings=MegatronConfig(**layout | own)))
    engine.setup()
    return engine


def rows_of(engine: Engine, batch: DataProto) -> DataProto:
    """Return this rank's uneven share of the rows."""
    position = engine.mesh_position
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)).tolist()
    limits = [0, 17, len(batch)] if position.dp_size == 2 else [0, len(batch)]
    return batch.select_idxs(order[limits[position.dp_rank] : limits[position.dp_rank + 1]])


def gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Return full gradients by Hugging Face name. Collective.

    With a distributed optimizer no process has them in full.
    """
    finalize_model_grads(engine._modules, None)
    found = gather_full_tensors(
        engine.chunks, kind="causal_lm", tied=engine._tied, value_of=lambda parameter: parameter.main_grad
    )
    return {name: gradient.clone() for name, gradient in found}


@torch.no_grad()
def whole_logits(engine: Engine, batch: DataProto) -> torch.Tensor:
    """Return logits (B, R, V) before every token of the response mask, 0 elsewhere, on rank 0.

    Collective: all ranks pass the same rows.
    """
    found: list[tuple[list[int], torch.Tensor]] = []
    size = (len(batch), batch.batch["response_mask"].size(1), -1)
    if isinstance(engine, FSDPEngine):
        for rows, layout in engine._micro_batch_layouts(batch, MICRO):
            engine._reader._wanted_states = layout.state
            found.append((rows, in_cells(engine._reader._run(layout).flatten(0, -2), layout.cell, layout.shape)))
        engine._reshard()
        return in_rows(found, size)
    vocab = engine.chunks[-1].vocab

    def read(tokens: LocalTokens, head: torch.Tensor) -> torch.Tensor:
        cells = in_cells(gather_from_tensor_model_parallel_region(head[0])[:, :vocab], tokens.cell, tokens.shape)
        dist.all_reduce(cells, group=parallel_state.get_context_parallel_group())
        return cells

    micro_batches = engine._local_micro_batches(batch, MICRO)
    parts = engine._run_pipeline(micro_batches, read, forward_only=True)  # nothing on stages before the last
    whole = in_rows(
        [(tokens.rows, part) for tokens, part in zip(micro_batches, parts, strict=False)], (*size[:2], vocab)
    )
    dist.all_reduce(whole, group=parallel_state.get_pipeline_model_parallel_group())
    return whole


def in_cells(logits: torch.Tensor, cell: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Scatter (N,V) to (b,R,V), 0 elsewhere."""
    b, width = shape
    return logits.new_zeros(b * width, logits.size(-1)).index_copy(0, cell, logits).view(b, width, -1)


def in_rows(found: list[tuple[list[int], torch.Tensor]], size: tuple[int, int, int]) -> torch.Tensor:
    """Undo the split into micro-batches; those without rows contribute nothing."""
    vocab = found[0][1].size(-1) if size[-1] < 0 else size[-1]
    whole = torch.zeros(*size[:2], vocab)
    for rows, part in found:
        if rows:
            whole[rows] = part
    return whole


def ppo_step(policy: Engine, critic: Engine, mine: DataProto, *, num_tokens: float) -> list[float]:
    """Return the losses of actor and critic, over all ranks, in every epoch of one PPO step."""
    start = policy.forward(mine, MICRO, outputs=("log_probs",)) | critic.forward(mine, MICRO, outputs=("values",))
    losses = zip(
        (policy, critic), ppo_losses(mine, start, num_tokens=num_tokens), (POLICY, ("values",)), PPO_LOSSES, strict=True
    )
    losses, found = list(losses), []
    for _ in range(PPO_EPOCHS):
        for engine, loss_fn, outputs, name in losses:
            reports = engine.forward_backward(mine, MICRO, loss_fn, outputs=outputs)
            engine.optimizer_step()
            total = torch.tensor(sum(stats[name] for stats in reports), dtype=torch.float64)
            dist.all_reduce(total)
            found.append(float(total))
    return found


def compute(case: str, folder: Path) -> dict:
    _, model, layout, settings = CASES[case]
    batch = case_batch(settings)
    batch.batch["number"] = torch.arange(len(batch))
    num_tokens = num_response_tokens(batch)

    def make(name: str, *, plain: bool = False, **more) -> Engine:
        if layout is None:
            return make_fsdp(str(folder / name), **settings, **more)
        return make_engine(str(folder / name), layout | PLAIN if plain else layout, **settings, **more)

    trained = make(model)
    mine = rows_of(trained, batch)
    logits = whole_logits(trained, all_tokens_as_response(batch))
    outputs = trained.forward(mine, MICRO, outputs=POLICY) | {"number": mine.batch["number"]}
    plain = make(model, plain=True)
    plain.forward_backward(mine, MICRO, policy_loss(num_tokens), outputs=POLICY)
    first = fsdp_gradients(plain) if layout is None else gradients(plain)
    reports = train(trained, mine, MICRO, num_tokens=num_tokens, steps=STEPS)
    ppo = ppo_step(make(model), make(f"{model} critic", kind="value"), mine, num_tokens=num_tokens)
    weights = whole_weights(trained)
    return {
        "logits": logits,
        "outputs": outputs,
        "gradients": first,
        "reports": reports,
        "weights": weights,
        "ppo": ppo,
    }


def main(rank: int, world: int, folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for case in cases:
        store = dist.FileStore(str(folder / f"{case} store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=150))
        found = compute(case, folder)
        if rank == 0:
            torch.save(found, folder / f"{case}.pt")
        dist.barrier()
        destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
