"""The worker's gradients are those of the trainers, and those of an engine with the model's own adapters."""

import numpy as np
import pytest
import torch

from hybridrl.config.schema.workers import ActorConfig, FSDPConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.training_service.computation.adapter_slots import ALPHA, TrainedLayers
from hybridrl.training_service.computation.rows import rows_of
from hybridrl.training_service.wire import Datum, Pass
from hybridrl.workers.engine.base import EngineSetup, LoRA, MicroBatching, StepOptions
from hybridrl.workers.engine_worker import make_engine
from hybridrl.workers.losses import GlobalCounts, actor_loss
from hybridrl.workers.sft import sft_loss
from tests.training_service.conftest import MAX_RANK

RANK = 3
STEP = StepOptions(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip=0.5)


@pytest.fixture
def worker(with_adapters):
    """The calls of a trainer with adapters."""
    return with_adapters[1].calls


@pytest.fixture
def full_worker(with_all_weights):
    """The calls of one that trains all weights."""
    return with_all_weights[1].calls


def trainers_engine(path, *, rank):
    """An engine as the trainers have it."""
    lora = LoRA(rank, ALPHA, head=True) if rank else None
    setup = EngineSetup(kind="causal_lm", path=str(path), settings=FSDPConfig(), optim=OptimConfig(), lora=lora, seed=7)
    engine = make_engine("fsdp", setup)
    engine.setup()
    return engine


def gradients(engine):
    [model] = engine.state_tensors().modules
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}


def shifted(seed, length):
    return np.random.default_rng(seed).integers(10, 200, length)


def sft_pass(rows):
    """`rows` of tokens, each predicting the next; the weights sum to 1 over all of them."""
    num = sum(len(row) - 1 for row in rows)
    data = [Datum(r[:-1], {"target_tokens": r[1:], "weights": np.full(len(r) - 1, 1 / num, np.float32)}) for r in rows]
    return Pass("m", 1, data, "cross_entropy")


def as_batch(rows, **columns):
    """The same rows for a trainer: the first token is the prompt."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.from_numpy(row), 1
    tensors = {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 1:].clone()}
    return DataProto.from_dict(tensors=tensors | columns)


@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_the_gradients_are_those_of_the_trainers(full_worker, tiny_qwen2, kind):
    rows = [shifted(1, 9), shifted(2, 6), shifted(3, 9)]
    num = sum(len(row) - 1 for row in rows)
    full_worker.create("m", TrainedLayers(0))
    theirs, micro = trainers_engine(tiny_qwen2, rank=0), MicroBatching(max_rows=2)
    counts = GlobalCounts(num, len(rows))
    if kind == "sft":
        request, batch, loss = sft_pass(rows), as_batch(rows), sft_loss(counts)
    else:
        request, batch = ppo_pass(full_worker, rows, num)
        loss = actor_loss(ActorConfig(clip_ratio=0.2), counts)
    theirs.forward_backward(batch, micro, loss, outputs=("log_probs", "entropy"))
    full_worker.run_pass("m", request)
    ours, expected = gradients(full_worker.worker._engine), gradients(theirs)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-5)
    full_worker.drop("m")


def ppo_pass(worker, rows, num):
    """The same update for both: old log-probs near the policy's, so that some ratios are clipped."""
    rng = np.random.default_rng(0)
    [found] = worker.run_pass("m", Pass("m", 1, sft_pass(rows).data, "cross_entropy", forward_only=True))
    width = max(map(len, rows)) - 1
    old, advantages = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    data = []
    for number, row in enumerate(rows):
        own, _ = found[number]
        q = (own + rng.uniform(-0.4, 0.4, len(own))).astype(np.float32)
        A = rng.normal(size=len(own)).astype(np.float32)
        old[number, : len(q)], advantages[number, : len(q)] = torch.from_numpy(q), torch.from_numpy(A)
        inputs = {"target_tokens": row[1:], "logprobs": q, "advantages": (A / num).astype(np.float32)}
        data.append(Datum(row[:-1], inputs))
    return Pass("m", 1, data, "ppo"), as_batch(rows, old_log_probs=old, advantages=advantages)


def test_a_slot_of_a_lower_rank_trains_like_an_engine_with_adapters_of_that_rank(worker, tiny_qwen2):
    assert RANK < MAX_RANK
    worker.create("low", TrainedLayers(RANK, seed=7))
    engine = trainers_engine(tiny_qwen2, rank=RANK)
    rows = [shifted(4, 9), shifted(5, 6)]
    batch, loss = as_batch(rows), sft_loss(GlobalCounts(13, 2))
    for _ in range(3):
        [found] = worker.run_pass("low", sft_pass(rows))
        [ours] = worker.optimizer_step("low", STEP)
        [stats] = engine.forward_backward(batch, MicroBatching(max_rows=8), loss, outputs=("log_probs",))
        engine.use_step_options(STEP)
        theirs = engine.optimizer_step()
        assert sum(loss for _, loss in found.values()) == pytest.approx(stats["loss"], rel=1e-6)
        assert ours["grad_norm:mean"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    worker.drop("low")


def test_the_rows_of_a_pass_have_a_filler_that_nothing_reads():
    rows = rows_of(sft_pass([np.array([4, 5, 6]), np.array([7, 8])]).data, "cross_entropy")
    assert rows.batch["input_ids"].tolist() == [[4, 5, 0], [7, 0, 0]]
    assert rows.batch["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert rows.batch["target_tokens"][..., 0].tolist() == [[5, 6], [8, 0]]


def test_micro_batches_do_not_change_the_result(worker):
    rows = [shifted(seed, 5 + seed) for seed in range(6)]
    worker.create("m", TrainedLayers(4))
    worker.run_pass("m", sft_pass(rows))
    [norm] = worker.optimizer_step("m", STEP)
    worker.create("m", TrainedLayers(4))
    for row in rows:
        num = sum(len(one) - 1 for one in rows)
        own = {"target_tokens": row[1:], "weights": np.full(len(row) - 1, 1 / num, np.float32)}
        worker.run_pass("m", Pass("m", 1, [Datum(row[:-1], own)], "cross_entropy"))
    [other] = worker.optimizer_step("m", STEP)
    assert other["grad_norm:mean"] == pytest.approx(norm["grad_norm:mean"], rel=1e-5)
    worker.drop("m")
