"""One rank of two: adapters on the Megatron engine under several layouts, and the results.

Not a test file.

    python -m tests.support.workers.megatron_lora_rank RANK WORLD FOLDER CASE...

FOLDER contains the models and their saved adapters. The ranks add a file store and checkpoints, and rank 0
`CASE.pt` for each case, a layout or `MOVED`.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.megatron.engine import MegatronEngine, finalize_model_grads
from hybridrl.workers.engine.megatron.hf_weights import gather_full_tensors
from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel
from tests.support.workers.engine_cases import make_batch, num_response_tokens, policy_loss, train, whole_weights
from tests.support.workers.megatron_lora_cases import ALPHA, LAYOUTS, MOVED, RANK, count, few_adapters, saved_lora
from tests.support.workers.megatron_models import MICRO, PLAIN, POLICY, PP, STEPS
from tests.support.workers.megatron_rank import make_engine, rows_of


def lora_gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Return full gradients of A and B by Hugging Face name. Collective."""
    finalize_model_grads(engine._modules, None)
    found = gather_full_tensors(
        engine.chunks,
        kind="causal_lm",
        tied=engine._tied,
        value_of=lambda parameter: parameter.main_grad,
        is_wanted=lambda name: "lora_" in name,
    )
    return {name: gradient.clone() for name, gradient in found}


def of_kind(engine: MegatronEngine, kind: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights(lora=kind)}


def compute(layout: str, folder: Path) -> dict:
    model, sizes, settings = LAYOUTS[layout]
    batch, num_tokens, path = make_batch(), num_response_tokens(make_batch()), str(folder / model)
    batch.batch["number"] = torch.arange(len(batch))
    saved = saved_lora(folder, model)

    def make(lora: LoRA, **more) -> MegatronEngine:
        return make_engine(path, sizes, lora=lora, **settings, **more)

    plain, engine = make(saved, **PLAIN), make(saved)
    mine = rows_of(engine, batch)
    plain.forward_backward(mine, MICRO, policy_loss(num_tokens), outputs=POLICY)
    found: dict = {"gradients": lora_gradients(plain), "number": mine.batch["number"]}
    found["outputs"] = engine.forward(mine, MICRO, outputs=POLICY)
    with engine.adapters_off():
        found["off"] = engine.forward(mine, MICRO, outputs=POLICY)
    found["norms"] = [step["grad_norm"] for step in train(engine, mine, MICRO, num_tokens=num_tokens, steps=STEPS)]
    found["weights"] = whole_weights(engine)
    found |= {kind: of_kind(engine, kind) for kind in ("adapters", "unscaled_adapters", "base_and_adapters")}
    others = LoRA(saved.rank, saved.alpha)
    found["resumes"], found["next norm"] = resumes(
        engine, lambda: make(others, seed=5), mine, folder / f"{layout} saved"
    )
    few = make(few_adapters(model))
    found["new"] = of_kind(few, "unscaled_adapters")
    train(few, mine, MICRO, num_tokens=num_tokens, steps=STEPS)
    found["few"], found["trained"] = whole_weights(few), sum(count(chunk) for chunk in few.chunks)
    return found


def resumes(
    engine: MegatronEngine, new_engine: Callable[[], MegatronEngine], mine: DataProto, directory: Path
) -> tuple[bool, float]:
    """Return whether a new engine that loads the checkpoint of this one trains bit for bit as it does. Collective.

    Also return the gradient norm of the first step after the checkpoint.
    """
    directory.mkdir(exist_ok=True)
    dist.barrier()
    engine.save(str(directory))
    loaded = new_engine()
    loaded.load(str(directory))
    results = []
    for each in (engine, loaded):
        reports = train(each, mine, MICRO, num_tokens=num_response_tokens(make_batch()))
        results.append(([step["grad_norm"] for step in reports], whole_weights(each)))
    (norms, weights), (its_norms, its_weights) = results
    return norms == its_norms and all(torch.equal(its_weights[name], weights[name]) for name in weights), norms[0]


def moved(folder: Path) -> dict:
    """Return the adapters that the layout PP2 reads from the checkpoint of TP2, and the next gradient norm."""
    engine = make_engine(str(folder / "qwen2"), PP, lora=LoRA(RANK, ALPHA), seed=5)
    engine.load(str(folder / "TP2 saved"))
    found = of_kind(engine, "unscaled_adapters")
    [report] = train(engine, make_batch(), MICRO, num_tokens=num_response_tokens(make_batch()), steps=1)
    return {"unscaled_adapters": found, "norm": report["grad_norm"]}


def main(rank: int, world: int, folder: Path, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{layouts[0]} store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=150))
    for layout in layouts:
        found = moved(folder) if layout == MOVED else compute(layout, folder)
        if rank == 0:
            torch.save(found, folder / f"{layout}.pt")
        destroy_model_parallel()
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
