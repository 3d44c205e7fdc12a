"""The FSDP2 engine on two real processes (gloo) against the same work in one.

The processes are started once for all tests.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.workers.engine.base import MicroBatching
from tests.support.ranks import run_ranks
from tests.support.workers.engine_cases import (
    WHOLE,
    assert_same_weights,
    case_batch,
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    policy_loss,
    save_tiny_qwen2,
    train,
    whole_weights,
)
from tests.support.workers.engine_rank import CASES, POLICY

ROOT = Path(__file__).parents[4]
EXACT = [name for name in CASES if name not in ("bfloat16", "adapters, packed, recomputed")]
START_AND_RUN_S = 150

pytestmark = pytest.mark.timeout(START_AND_RUN_S + 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    mine = not dist.is_initialized()  # the first engine creates a process group of one rank
    path = tmp_path_factory.mktemp("ranks")
    save_tiny_qwen2(path / "tied")
    save_tiny_qwen2(path / "untied", tied=False)
    save_damaged(path)
    batch = make_batch()
    engine = make_engine(str(path / "tied"))
    train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch), steps=1)
    engine.save(str(path / "one_rank"))
    yield path
    if mine:
        dist.destroy_process_group()


def save_damaged(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path / "tied")
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in ("model.norm.weight", "lm_head.weight")
    }
    model.save_pretrained(path / "damaged", state_dict=state)


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """The results that each rank wrote."""
    run_ranks("tests.support.workers.engine_rank", 2, folder, log=folder / "ranks.log", timeout_s=START_AND_RUN_S)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def one_rank(folder) -> dict[tuple[str, bool], dict]:
    """The same two steps in one process, in one padded micro-batch, by model and whether rows share their prompts."""
    found = {}
    for model, shared in itertools.product(("tied", "untied"), (False, True)):
        batch, engine = case_batch({"share_prefixes": shared}), make_engine(str(folder / model))
        outputs = engine.forward(batch, WHOLE, outputs=POLICY)
        engine.forward_backward(batch, WHOLE, policy_loss(num_response_tokens(batch)), outputs=POLICY)
        first = gradients(engine)
        reports = [
            engine.optimizer_step(),
            *train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch), steps=1),
        ]
        found[model, shared] = {
            "outputs": outputs,
            "gradients": first,
            "reports": reports,
            "weights": whole_weights(engine),
        }
    return found


def expectation(one_rank, case: str) -> dict:
    model, settings, _, _ = CASES[case]
    return one_rank[model, settings.get("share_prefixes", False)]


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_take_the_same_two_steps_as_one(ranks, one_rank, case):
    expected = expectation(one_rank, case)
    for rank in ranks:
        for name, gradient in rank[case]["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], atol=1e-6, rtol=0)
        shared = CASES[case][1].get("share_prefixes", False)  # Adam's quotient enlarges sums in another order
        assert_same_weights(rank[case]["weights"], expected["weights"], atol=3e-6 if shared else 1e-6)
        for step, wanted in zip(rank[case]["reports"], expected["reports"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)
    assert ranks[0][case]["reports"] == ranks[1][case]["reports"]


@pytest.mark.parametrize("case", EXACT)
def test_each_rank_gets_the_outputs_of_its_rows_in_their_order(ranks, one_rank, case):
    for rank in ranks:
        outputs = rank[case]["outputs"]
        for name in POLICY:
            expected = expectation(one_rank, case)["outputs"][name][outputs["number"]]
            torch.testing.assert_close(outputs[name], expected, atol=1e-5, rtol=0)
    assert sum(len(rank[case]["outputs"]["number"]) for rank in ranks) == 24


def test_adapters_on_two_ranks_learn_what_they_learn_on_one(ranks, folder):
    model, settings, _, _ = CASES["adapters, packed, recomputed"]
    batch, engine = make_batch(), make_engine(str(folder / model), lora=settings["lora"])
    reports = train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch), steps=2)
    for rank in ranks:
        assert_same_weights(rank["adapters, packed, recomputed"]["weights"], whole_weights(engine), atol=1e-6)
        for step, wanted in zip(rank["adapters, packed, recomputed"]["reports"], reports, strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)


def test_bfloat16_on_two_ranks_stays_near_float32(ranks, one_rank):
    found = ranks[0]["bfloat16"]
    assert found["reports"][0]["grad_norm"] == pytest.approx(
        one_rank["tied", False]["reports"][0]["grad_norm"], rel=0.03
    )
    assert {tensor.dtype for tensor in found["weights"].values()} == {torch.float32}


def test_a_new_head_is_the_same_for_any_number_of_ranks(ranks, folder):
    expected = whole_weights(make_engine(str(folder / "tied"), kind="value", optim=None, dtype="bfloat16"))
    for rank in ranks:
        assert all(torch.equal(rank["value head"][name], tensor) for name, tensor in expected.items())


def test_a_critic_continues_from_a_snapshot_bit_for_bit_also_where_a_rank_has_no_part_of_a_tensor(ranks):
    assert [rank["snapshot"] for rank in ranks] == [True, True]


def test_two_ranks_continue_from_their_checkpoint_bit_by_bit(ranks):
    for rank in ranks:
        assert rank["same draw"]
        assert all(
            torch.equal(rank["continued after load"][name], tensor) for name, tensor in rank["continued"].items()
        )


def test_one_rank_continues_from_a_checkpoint_of_two(ranks, folder):
    batch, engine = make_batch(), make_engine(str(folder / "tied"))
    engine.load(str(folder / "two_ranks"))
    assert all(torch.equal(tensor, ranks[0]["saved"][name]) for name, tensor in whole_weights(engine).items())
    train(engine, batch, MicroBatching(max_rows=5), num_tokens=num_response_tokens(batch))
    assert_same_weights(whole_weights(engine), ranks[0]["continued"], atol=1e-6)


def test_two_ranks_continue_from_a_checkpoint_of_one(ranks, folder, one_rank):
    engine = make_engine(str(folder / "tied"))
    engine.load(str(folder / "one_rank"))
    assert all(torch.equal(tensor, ranks[0]["from one rank"][name]) for name, tensor in whole_weights(engine).items())
    assert_same_weights(ranks[0]["from one rank, a step later"], one_rank["tied", False]["weights"], atol=1e-6)


def test_rows_that_one_rank_refuses_are_refused_by_both(ranks):
    assert "has" in ranks[1]["too long"] and "tokens" in ranks[1]["too long"]
    assert (
        ranks[0]["too long"]
        == "DataError: another rank's rows cannot be split into micro-batches; the reason is in that rank's error"
    )


def test_a_checkpoint_that_rank_0_cannot_load_is_an_error_on_both(ranks):
    assert ranks[0]["damaged"].startswith("CheckpointError: ") and "model.norm.weight" in ranks[0]["damaged"]
    assert (
        ranks[1]["damaged"].startswith("CheckpointError: rank 0 could not load")
        and "model.norm.weight" in ranks[1]["damaged"]
    )
