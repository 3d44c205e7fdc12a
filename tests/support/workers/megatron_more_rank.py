"""One rank of two: the Megatron engine's heads, its bfloat16, its refusals, and checkpoints that change layout. Not a
test file.

    python -m tests.support.workers.megatron_more_rank RANK WORLD FOLDER

FOLDER has the models, and gets a file store, checkpoints and, of rank 0, `more.pt`.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.errors import HybridRLError
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.megatron.parallel_groups import leave_layout
from hybridrl.workers.engine_snapshot import part_of, put_back
from tests.support.workers.engine_cases import make_batch, num_response_tokens, train, whole_weights
from tests.support.workers.megatron_models import CP, MICRO, MOVES, PLAIN, POLICY, PP, SP, TP, value_loss
from tests.support.workers.megatron_rank import make_engine, rows_of

OFFLOADED = {"dtype": "bfloat16", "param_offload": True, "optimizer_offload": True}


def heads(folder: Path) -> dict:
    """Values and scores of a policy's body under two layouts."""
    found: dict = {}
    for name, layout in {"TP2+SP": SP, "PP2": PP, "CP2": CP}.items():
        critic = make_engine(str(folder / "qwen2 critic"), layout, kind="value")
        found[f"values, {name}"] = critic.forward(make_batch(), MICRO, outputs=("values",))["values"]
        critic.forward_backward(make_batch(), MICRO, value_loss, outputs=("values",))
        found[f"critic's step, {name}"] = critic.optimizer_step()
        found[f"critic, {name}"] = whole_weights(critic)
        scorer = make_engine(str(folder / "scorer"), layout, kind="score", optim=None, packed=name == "TP2+SP")
        found[f"scores, {name}"] = scorer.forward(make_batch(), MICRO, outputs=("scores",))["scores"]
        found[f"new head, {name}"] = whole_weights(
            make_engine(str(folder / "qwen2"), layout, kind="value", optim=None)
        )["score.weight"]
        leave_layout()
    return found


def narrow(folder: Path) -> dict:
    """Grad norms in bfloat16, of a policy and of a critic, whose head stays float32."""
    batch, found = make_batch(), {}
    for name, layout in {"TP2": TP, "DP2": {}, "PP2": PP | PLAIN}.items():
        engine = make_engine(str(folder / "qwen2"), layout, dtype="bfloat16")
        found[f"bfloat16, {name}"] = train(engine, rows_of(engine, batch), MICRO, num_tokens=num_response_tokens(batch))
        critic = make_engine(str(folder / "qwen2 critic"), layout, kind="value", dtype="bfloat16")
        critic.forward_backward(rows_of(critic, batch), MICRO, value_loss, outputs=("values",))
        found[f"bfloat16 critic, {name}"] = critic.optimizer_step()
        leave_layout()
    return found


def moves(folder: Path) -> dict:
    """Save under one layout, go on; load under another, go on there."""
    found = {}
    batch, num_tokens = make_batch(), num_response_tokens(make_batch())
    for name, (before, after) in MOVES.items():
        directory = folder / name
        directory.mkdir(exist_ok=True)
        dist.barrier()
        engine = make_engine(str(folder / "four layers"), before)
        train(engine, rows_of(engine, batch), MICRO, num_tokens=num_tokens)
        engine.save(str(directory))
        train(engine, rows_of(engine, batch), MICRO, num_tokens=num_tokens)
        went_on = whole_weights(engine)
        leave_layout()
        engine = make_engine(str(folder / "four layers"), after)
        engine.load(str(directory))
        said = train(engine, rows_of(engine, batch), MICRO, num_tokens=num_tokens)
        found[name] = (went_on, whole_weights(engine), said)
        leave_layout()
    return found


def snapshots(folder: Path) -> dict[str, bool]:
    """Whether an engine, and a new one, goes on from a snapshot bit for bit as the first did after it."""
    found = {}
    batch, num_tokens = make_batch(), num_response_tokens(make_batch())
    layouts = {"TP2": (TP, {}), "PP2": (PP | PLAIN, {}), "DP2": ({}, {}), "DP2, bfloat16, offloaded": ({}, OFFLOADED)}
    for name, (layout, settings) in layouts.items():

        def made(layout=layout, settings=settings):
            return make_engine(str(folder / "four layers"), layout, **settings)

        def goes_on(engine):
            said = train(engine, rows_of(engine, batch), MICRO, num_tokens=num_tokens)
            return [step["grad_norm"] for step in said], whole_weights(engine)

        engine = made()
        first = part_of(engine)
        goes_on(engine)
        part = part_of(engine)
        norms, wanted = goes_on(engine)
        same = []
        for again in (engine, made()):
            put_back(again, part)
            its_norms, its = goes_on(again)
            same.append(its_norms == norms and all(torch.equal(its[key], wanted[key]) for key in wanted))
            put_back(again, first)
            goes_on(again)
            same.append(bool((part_of(again)["tensors"] == part["tensors"]).all()))
        found[name] = all(same)
        leave_layout()
    return found


def refusals(folder: Path) -> dict[str, str]:
    batch = make_batch()
    engine = make_engine(str(folder / "qwen2"), TP)
    before = whole_weights(engine)
    engine.forward_backward(
        batch, MICRO, lambda out, rows: (out["log_probs"].sum() * float("inf"), {}), outputs=POLICY[:1]
    )
    skipped = engine.optimizer_step()
    said = {
        "skipped": skipped,
        "unchanged": all(torch.equal(tensor, before[name]) for name, tensor in whole_weights(engine).items()),
    }
    train(engine, batch, MICRO, num_tokens=num_response_tokens(batch), steps=1)
    said["other layout"] = refusal(lambda: make_engine(str(folder / "qwen2"), PP))
    said["too long"] = refusal(
        lambda: engine.forward(batch, MicroBatching(max_tokens=4 if dist.get_rank() else 40), outputs=POLICY)
    )
    said["no checkpoint"] = refusal(lambda: engine.load(str(folder / "qwen2")))
    leave_layout()
    said["one word less"] = refusal(lambda: make_engine(str(folder / "one word less"), TP))
    leave_layout()
    said["three anew"] = refusal(lambda: make_engine(str(folder / "qwen2"), {"tensor_model_parallel_size": 3}))
    said["sliding"] = refusal(lambda: make_engine(str(folder / "sliding"), {}))
    return said


def refusal(act) -> str:
    """The error that `act` raises, as text."""
    try:
        act()
    except HybridRLError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "more store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=150))
    found = {
        **heads(folder),
        **narrow(folder),
        "moves": moves(folder),
        "snapshots": snapshots(folder),
        "refusals": refusals(folder),
    }
    if rank == 0:
        torch.save(found, folder / "more.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
