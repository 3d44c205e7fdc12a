"""One rank of two: the Megatron engine's heads, bfloat16, adapters, preferences, refusals, and checkpoints.

Not a test file.

    python -m tests.support.workers.megatron_more_rank RANK WORLD FOLDER

FOLDER contains the models. The ranks add a file store and checkpoints, and rank 0 `more.pt`.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.errors import HybridRLError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.megatron.engine import MegatronEngine
from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel
from hybridrl.workers.engine.snapshot import load_engine_state, take_engine_state
from tests.support.workers.engine_cases import make_batch, num_response_tokens, train, whole_weights
from tests.support.workers.megatron_lora_rank import compute
from tests.support.workers.megatron_models import CP, MICRO, MOVES, PLAIN, POLICY, PP, SP, TP, value_loss
from tests.support.workers.megatron_rank import make_engine, rows_of
from tests.support.workers.preference_cases import LOSSES, REWARD, learn

OFFLOADED = {"dtype": "bfloat16", "param_offload": True, "optimizer_offload": True}


def heads(folder: Path) -> dict:
    """Return values and scores of a policy's body under several layouts."""
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
        destroy_model_parallel()
    return found


def critic_step(critic: MegatronEngine, batch: DataProto) -> dict[str, float]:
    critic.forward_backward(rows_of(critic, batch), MICRO, value_loss, outputs=("values",))
    return critic.optimizer_step()


def in_bfloat16(folder: Path) -> dict:
    """Return grad norms in bfloat16 of a policy and a critic.

    Also whether the critic resumes bit for bit.
    """
    batch, found = make_batch(), {}
    for name, layout in {"TP2": TP, "DP2": {}, "PP2": PP | PLAIN}.items():
        engine = make_engine(str(folder / "qwen2"), layout, dtype="bfloat16")
        found[f"bfloat16, {name}"] = train(engine, rows_of(engine, batch), MICRO, num_tokens=num_response_tokens(batch))
        critic, resumed = (
            make_engine(str(folder / "qwen2 critic"), layout, kind="value", dtype="bfloat16") for _ in range(2)
        )
        found[f"bfloat16 critic, {name}"] = critic_step(critic, batch)
        directory = folder / f"bfloat16 critic, {name}"
        directory.mkdir(exist_ok=True)
        dist.barrier()
        critic.save(str(directory))
        resumed.load(str(directory))
        same = critic_step(resumed, batch) == critic_step(critic, batch)
        expected = whole_weights(critic)
        same &= all(torch.equal(tensor, expected[key]) for key, tensor in whole_weights(resumed).items())
        found[f"bfloat16 critic resumes, {name}"] = same
        destroy_model_parallel()
    return found


def adapters(folder: Path) -> dict:
    """Return what `megatron_lora_rank` computes under one layout."""
    found = compute("TP2", folder)
    destroy_model_parallel()
    return found


def moves(folder: Path) -> dict:
    """Save under one layout and continue; load under another and continue there."""
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
        continued = whole_weights(engine)
        destroy_model_parallel()
        engine = make_engine(str(folder / "four layers"), after)
        engine.load(str(directory))
        reports = train(engine, rows_of(engine, batch), MICRO, num_tokens=num_tokens)
        found[name] = (continued, whole_weights(engine), reports)
        destroy_model_parallel()
    return found


def snapshots(folder: Path) -> dict[str, bool]:
    """Return whether an engine, and a new one, continue from a snapshot bit for bit."""
    found = {}
    batch, num_tokens = make_batch(), num_response_tokens(make_batch())
    layouts = {"TP2": (TP, {}), "PP2": (PP | PLAIN, {}), "DP2": ({}, {}), "DP2, bfloat16, offloaded": ({}, OFFLOADED)}
    for name, (layout, settings) in layouts.items():

        def new_engine(layout=layout, settings=settings):
            return make_engine(str(folder / "four layers"), layout, **settings)

        def continue_training(engine):
            reports = train(engine, rows_of(engine, batch), MICRO, num_tokens=num_tokens)
            return [step["grad_norm"] for step in reports], whole_weights(engine)

        engine = new_engine()
        first = take_engine_state(engine)
        continue_training(engine)
        part = take_engine_state(engine)
        norms, wanted = continue_training(engine)
        same = []
        for resumed in (engine, new_engine()):
            load_engine_state(resumed, part)
            its_norms, its = continue_training(resumed)
            same.append(its_norms == norms and all(torch.equal(its[key], wanted[key]) for key in wanted))
            load_engine_state(resumed, first)
            continue_training(resumed)
            its_tensors = take_engine_state(resumed)["tensors"]
            same += [bool((its == own).all()) for its, own in zip(its_tensors, part["tensors"], strict=True)]
        found[name] = all(same)
        destroy_model_parallel()
    return found


def preferences(folder: Path) -> dict:
    """Train with every preference loss, and a reward model, on two tensor-parallel processes."""

    def make(path: str, kind: str):
        return make_engine(path, TP, kind=kind)

    found = {name: learn(make, str(folder / "qwen2"), name) for name in (*LOSSES, REWARD)}
    destroy_model_parallel()
    return found


def refusals(folder: Path) -> dict[str, str]:
    batch = make_batch()
    engine = make_engine(str(folder / "qwen2"), TP)
    before = whole_weights(engine)
    engine.forward_backward(
        batch, MICRO, lambda out, rows: (out["log_probs"].sum() * float("inf"), {}), outputs=POLICY[:1]
    )
    skipped = engine.optimizer_step()
    reports = {
        "skipped": skipped,
        "unchanged": all(torch.equal(tensor, before[name]) for name, tensor in whole_weights(engine).items()),
    }
    train(engine, batch, MICRO, num_tokens=num_response_tokens(batch), steps=1)
    reports["other layout"] = refusal(lambda: make_engine(str(folder / "qwen2"), PP))
    reports["too long"] = refusal(
        lambda: engine.forward(batch, MicroBatching(max_tokens=4 if dist.get_rank() else 40), outputs=POLICY)
    )
    reports["no checkpoint"] = refusal(lambda: engine.load(str(folder / "qwen2")))
    destroy_model_parallel()
    reports["groups left"] = len(dist.distributed_c10d._world.pg_map)
    reports["one word less"] = refusal(lambda: make_engine(str(folder / "one word less"), TP))
    destroy_model_parallel()
    reports["three anew"] = refusal(lambda: make_engine(str(folder / "qwen2"), {"tensor_model_parallel_size": 3}))
    reports["sliding"] = refusal(lambda: make_engine(str(folder / "sliding"), {}))
    return reports


def refusal(act) -> str:
    """Return the error that `act` raises, as text."""
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
        **in_bfloat16(folder),
        "adapters": adapters(folder),
        "preferences": preferences(folder),
        "moves": moves(folder),
        "snapshots": snapshots(folder),
        "refusals": refusals(folder),
    }
    if rank == 0:
        torch.save(found, folder / "more.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
