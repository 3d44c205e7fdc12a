"""One rank of the engine tests on two processes: compute every case and write the results. Not a test file.

    python -m tests.support.workers.engine_rank RANK NUM_RANKS FOLDER

FOLDER contains the models and a checkpoint of one rank (`one_rank`). The ranks add a file store, `rank_0.pt`,
`rank_1.pt` and a checkpoint of two ranks (`two_ranks`).
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.errors import HybridRLError
from hybridrl.workers.engine.base import LoRA, MicroBatching
from hybridrl.workers.engine.snapshot import load_engine_state, take_engine_state
from tests.support.workers.engine_cases import (
    WHOLE,
    case_batch,
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    policy_loss,
    train,
    whole_weights,
)

POLICY = ("log_probs", "entropy")
# (model, engine settings, micro-batches, rows of rank 0 of the 24)
CASES = {
    "uneven ranks": ("tied", {}, MicroBatching(max_rows=3), 17),
    "untied embeddings, packed, token budget": ("untied", {"packed": True}, MicroBatching(max_tokens=40), 10),
    "an empty rank": ("tied", {"reshard_after_forward": False}, MicroBatching(max_tokens=40), 24),
    "an empty rank, packed, recomputed": (
        "tied",
        {"packed": True, "gradient_checkpointing": True},
        MicroBatching(max_rows=7),
        24,
    ),
    "adapters, packed, recomputed": (
        "tied",
        {"lora": LoRA(4, 8), "packed": True, "gradient_checkpointing": True},
        MicroBatching(max_rows=5),
        15,
    ),
    "shared prefixes, token budget": ("tied", {"share_prefixes": True}, MicroBatching(max_tokens=60), 17),
    "shared prefixes, an empty rank, recomputed": (
        "untied",
        {"share_prefixes": True, "gradient_checkpointing": True},
        MicroBatching(max_rows=7),
        24,
    ),
    "bfloat16": ("tied", {"dtype": "bfloat16"}, MicroBatching(max_rows=3), 17),
}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    batch = make_batch()
    found = {name: two_steps(rank, folder, case) for name, case in CASES.items()}
    found["value head"] = whole_weights(make_engine(str(folder / "tied"), kind="value", optim=None, dtype="bfloat16"))
    found |= checkpoints(rank, folder, share(batch, rank, 17), num_response_tokens(batch))
    found["snapshot"] = snapshot(folder, share(batch, rank, 17))
    found["too long"] = refusal(lambda: too_long(rank, folder))
    found["damaged"] = refusal(lambda: make_engine(str(folder / "damaged")))
    torch.save(found, folder / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def share(batch, rank: int, num_first: int):
    """Return the rows of a rank, in random order: rank 0 gets `num_first` of them."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    return batch.select_idxs(order[:num_first] if rank == 0 else order[num_first:])


def two_steps(rank: int, folder: Path, case) -> dict:
    model, settings, micro, num_first = case
    batch = case_batch(settings)
    batch.batch["number"] = torch.arange(len(batch))
    mine, num_tokens = share(batch, rank, num_first), num_response_tokens(batch)
    engine = make_engine(str(folder / model), **settings)
    outputs = engine.forward(mine, micro, outputs=POLICY) | {"number": mine.batch["number"]}
    engine.forward_backward(mine, micro, policy_loss(num_tokens), outputs=POLICY)
    first = gradients(engine)
    reports = [engine.optimizer_step(), *train(engine, mine, micro, num_tokens=num_tokens, steps=1)]
    return {"outputs": outputs, "gradients": first, "reports": reports, "weights": whole_weights(engine)}


def checkpoints(rank: int, folder: Path, mine, num_tokens: float) -> dict:
    """Save on two ranks, continue, load, continue again; then load the checkpoint of one rank."""
    saved = make_engine(str(folder / "tied"))
    train(saved, mine, WHOLE, num_tokens=num_tokens)
    saved.save(str(folder / "two_ranks"))
    drawn = torch.rand(3)
    at_save = whole_weights(saved)
    train(saved, mine, WHOLE, num_tokens=num_tokens)
    loaded = make_engine(str(folder / "tied"))
    loaded.load(str(folder / "two_ranks"))
    same_draw = torch.equal(torch.rand(3), drawn)
    train(loaded, mine, WHOLE, num_tokens=num_tokens)
    other = make_engine(str(folder / "tied"))
    other.load(str(folder / "one_rank"))
    from_one_rank = whole_weights(other)
    train(other, mine, WHOLE, num_tokens=num_tokens, steps=1)
    return {
        "saved": at_save,
        "continued": whole_weights(saved),
        "continued after load": whole_weights(loaded),
        "same draw": same_draw,
        "from one rank": from_one_rank,
        "from one rank, a step later": whole_weights(other),
    }


def snapshot(folder: Path, mine) -> bool:
    """Return whether a critic, and a new one, continue from a snapshot bit for bit.

    Rank 1 has no part of the value head's one row.
    """

    def continue_training(engine) -> tuple[dict, dict]:
        engine.forward_backward(mine, WHOLE, lambda out, rows: (out["values"].square().sum(), {}), outputs=("values",))
        return engine.optimizer_step(), whole_weights(engine)

    def new_engine():
        return make_engine(str(folder / "tied"), kind="value")

    engine = new_engine()
    continue_training(engine)
    part = take_engine_state(engine)
    reports, wanted = continue_training(engine)
    same = []
    for resumed in (engine, new_engine()):
        load_engine_state(resumed, part)
        its, found = continue_training(resumed)
        same.append(its == reports and all(torch.equal(found[name], wanted[name]) for name in wanted))
    return all(same)


def too_long(rank: int, folder: Path) -> None:
    """Call forward where only rank 1 has a row that exceeds its token budget."""
    engine = make_engine(str(folder / "tied"), optim=None)
    engine.forward(make_batch(), MicroBatching(max_tokens=4 if rank == 1 else 40), outputs=POLICY)


def refusal(act) -> str:
    """Return the error that `act` raises, as text."""
    try:
        act()
    except HybridRLError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
