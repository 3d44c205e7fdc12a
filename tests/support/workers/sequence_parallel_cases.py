"""Cases of sequence parallelism, and a rank that computes them. Not a test file."""

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import LoRA, MicroBatching, TokenTerm
from hybridrl.workers.engine.fsdp.engine import FSDPEngine
from hybridrl.workers.engine.routing.routes import column_of
from tests.support.workers.engine_cases import (
    case_batch,
    gradients,
    make_engine,
    num_response_tokens,
    policy_loss,
    whole_weights,
)
from tests.support.workers.routing_cases import EXPERTS, with_routes

POLICY = ("log_probs", "entropy")
TERMS = {"top": TokenTerm(lambda log_probs_CV, ids_C: log_probs_CV.topk(3).values + ids_C[:, None], ("cells",))}
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
MODELS = {  # name: changes of the tiny Qwen2, which has 4 heads and 2 heads of keys and values
    "tied": {},
    "untied": {"tied": False},
    "window": WINDOW,
    "six heads": {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48},
}
REPLAYED = {"replays_routes": True}


class Case(NamedTuple):
    """Work of an engine.

    Attributes:
        world: Ranks.
        size: Peers that share a row.
        model: Of `MODELS`, the "scorer" or the "mixture" of experts.
        settings: Of the engine.
        micro: Its micro-batches.
        first: Rows of data-parallel rank 0; None: it is alone and has all 24.
    """

    world: int
    size: int
    model: str
    settings: dict
    micro: MicroBatching
    first: int | None = None


CASES = {
    "2 ranks, packed": Case(2, 2, "tied", {"packed": True}, MicroBatching(max_tokens=40)),
    "2 ranks, padded, 6 heads of keys": Case(2, 2, "six heads", {}, MicroBatching(max_rows=5)),
    "2 ranks, padded, a window": Case(2, 2, "window", {}, MicroBatching(max_rows=5)),
    "2 ranks, packed, a window": Case(2, 2, "window", {"packed": True}, MicroBatching(max_rows=9)),
    "2 ranks, shared prefixes, a window": Case(2, 2, "window", {"share_prefixes": True}, MicroBatching(max_rows=7)),
    "2 ranks, shared prefixes": Case(2, 2, "untied", {"share_prefixes": True}, MicroBatching(max_tokens=50)),
    "2 ranks, terms of the vocabulary": Case(
        2, 2, "tied", {"packed": True, "token_terms": TERMS}, MicroBatching(max_rows=7)
    ),
    "2 ranks, values": Case(2, 2, "tied", {"kind": "value", "packed": True}, MicroBatching(max_rows=7)),
    "2 ranks, scores": Case(2, 2, "scorer", {"kind": "score"}, MicroBatching(max_rows=7)),
    "4 ranks, packed, 2 heads of keys": Case(4, 4, "tied", {"packed": True}, MicroBatching(max_tokens=20)),
    "4 ranks, 6 heads of keys, recomputed": Case(
        4, 4, "six heads", {"packed": True, "gradient_checkpointing": True}, MicroBatching(max_rows=7)
    ),
    "4 ranks, padded": Case(4, 4, "tied", {}, MicroBatching(max_rows=3)),
    "4 ranks, shared prefixes, 2 heads of keys": Case(
        4, 4, "tied", {"share_prefixes": True}, MicroBatching(max_tokens=20)
    ),
    "2 ranks, padded, replayed experts": Case(2, 2, "mixture", REPLAYED, MicroBatching(max_rows=5)),
    "4 ranks, packed, replayed experts, recomputed": Case(
        4, 4, "mixture", REPLAYED | {"packed": True, "gradient_checkpointing": True}, MicroBatching(max_rows=7)
    ),
    "2 times 2 ranks, shared prefixes, replayed experts": Case(
        4, 2, "mixture", REPLAYED | {"share_prefixes": True}, MicroBatching(max_rows=7), 15
    ),
    "2 times 2 ranks, packed": Case(4, 2, "untied", {"packed": True}, MicroBatching(max_tokens=25), 15),
    "2 times 2 ranks, half without rows, adapters": Case(
        4, 2, "tied", {"share_prefixes": True, "lora": LoRA(4, 8)}, MicroBatching(max_rows=7), 24
    ),
}
"""Rows of 3 to 16 tokens, in micro-batches of several, whose fill differs."""


def rank(number: int, world: int, folder: str) -> None:
    """Compute the cases of this many ranks, and write the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store_{world}", world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timedelta(seconds=60))
    found = {name: work(case, Path(folder)) for name, case in CASES.items() if case.world == world}
    if world == 4:
        found["loaded"] = loaded(Path(folder))
    torch.save(found, f"{folder}/{world}_{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


def loss_of(outputs: dict[str, torch.Tensor], rows: DataProto, *, num_tokens: float) -> tuple[torch.Tensor, dict]:
    """Return a loss that depends on all outputs."""
    if outputs.keys() >= {*POLICY}:
        loss, stats = policy_loss(num_tokens)({name: outputs[name] for name in POLICY}, rows)
        if "top" in outputs:
            loss = loss + (outputs["top"] * outputs["top"].new_tensor([1.0, -0.5, 0.2])).sum() / num_tokens
        return loss, stats | {"loss": loss}
    [values] = outputs.values()
    loss = (values.square() - values).sum() / num_tokens
    return loss, {"loss": loss, "rows": len(rows)}


def work(case: Case, folder: Path) -> dict:
    """Return outputs, gradients, statistics and the weights after two steps."""
    engine = make_engine(str(folder / case.model), **case.settings, ulysses_sequence_parallel_size=case.size)
    batch = case_batch(case.settings)
    batch.batch["cells"] = batch.batch["response_mask"].cumsum(-1).float()
    batch.batch["number"] = torch.arange(len(batch))
    num_tokens = num_response_tokens(batch)
    kind = case.settings.get("kind")
    outputs = ("values",) if kind == "value" else ("scores",) if kind == "score" else POLICY
    outputs = (*outputs, *case.settings.get("token_terms", ()))
    mine = batch
    if case.first is not None:
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
        mine = batch.select_idxs(order[: case.first] if engine.mesh_position.dp_rank == 0 else order[case.first :])
    if engine.config.replays_routes:
        _, chosen = engine.forward_with_routes(mine, case.micro, outputs=outputs)
        mine = with_routes(mine, column_of([(entry + 1) % EXPERTS for entry in chosen]))
    found = engine.forward(mine, case.micro, outputs=outputs) | {"number": mine.batch["number"]}
    loss_fn = lambda out, rows: loss_of(out, rows, num_tokens=num_tokens)  # noqa: E731
    stats = engine.forward_backward(mine, case.micro, loss_fn, outputs=outputs)
    first = gradients(engine)
    reports = [engine.optimizer_step()]
    engine.forward_backward(mine, case.micro, loss_fn, outputs=outputs)
    reports.append(engine.optimizer_step())
    if case.world == 2 and case.model == "tied" and kind is None and len(outputs) == 2:
        engine.save(str(folder / "saved_by_2"))
    return {
        "outputs": found,
        "stats": stats,
        "gradients": first,
        "reports": reports,
        "weights": whole_weights(engine),
        "mesh": engine.mesh_position,
    }


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of 2 peers in an engine of 4."""
    engine: FSDPEngine = make_engine(str(folder / "tied"), packed=True, ulysses_sequence_parallel_size=4)
    engine.load(str(folder / "saved_by_2"))
    return whole_weights(engine)
