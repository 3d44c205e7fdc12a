"""The Megatron engine on two real processes.

Critic and reward model, bfloat16, adapters, preferences, checkpoints under another layout, refusals.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.workers.engine_cases import VOCAB, make_batch, save_scorer, save_tiny_qwen2
from tests.support.workers.engine_cases import make_engine as make_fsdp
from tests.support.workers.megatron_lora_cases import adapters_by_fsdp, assert_adapters_equal, write_trained_adapter
from tests.support.workers.megatron_models import MICRO, MOVES, NEEDS_MEGATRON, save_models, value_loss
from tests.support.workers.megatron_parity import difference, hf_reference
from tests.support.workers.preference_cases import LOSSES, REWARD, learn

START_AND_RUN_S = 600
LAYOUTS = ("TP2+SP", "PP2", "CP2")

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.timeout(START_AND_RUN_S + 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("megatron_more")
    save_models(path, ["qwen2", "four layers"])
    save_scorer(str(path / "qwen2"), path / "scorer")
    write_trained_adapter(path, "qwen2")
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    save_tiny_qwen2(path / "sliding", **window, layer_types=["full_attention", "sliding_attention"])
    shutil.copytree(path / "qwen2", path / "one word less")  # which padding for two processes makes up for
    config = path / "one word less/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": VOCAB - 1}))
    return path


@pytest.fixture(scope="module")
def found(folder) -> dict:
    run_ranks("tests.support.workers.megatron_more_rank", 2, folder, log=folder / "more.log", timeout_s=START_AND_RUN_S)
    return torch.load(folder / "more.pt")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_critic_values_and_trains_as_under_fsdp(folder, found, layout):
    critic = make_fsdp(str(folder / "qwen2 critic"), kind="value")
    expected = critic.forward(make_batch(), MICRO, outputs=("values",))["values"]
    torch.testing.assert_close(found[f"values, {layout}"], expected, atol=1e-5, rtol=0)
    critic.forward_backward(make_batch(), MICRO, value_loss, outputs=("values",))
    assert found[f"critic's step, {layout}"] == pytest.approx(critic.optimizer_step(), rel=1e-4)
    assert difference(found[f"critic, {layout}"], dict(critic.weights())) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_a_new_value_head_are_those_of_fsdp(folder, found, layout):
    expected = make_fsdp(str(folder / "scorer"), kind="score", optim=None).forward(
        make_batch(), MICRO, outputs=("scores",)
    )
    torch.testing.assert_close(found[f"scores, {layout}"], expected["scores"], atol=1e-5, rtol=0)
    new = dict(make_fsdp(str(folder / "qwen2"), kind="value", optim=None).weights())["score.weight"]
    assert torch.equal(found[f"new head, {layout}"], new)


def test_adapters_compute_and_train_as_under_fsdp(folder, found):
    assert_adapters_equal(found["adapters"], adapters_by_fsdp(folder, "qwen2"))
    assert found["adapters"]["resumes"]


def test_peers_train_their_shards_of_new_adapters_alone(found):
    # rank 2 of q (32 -> 32), v (32 -> 16), o (32 -> 32) and up (32 -> 64), two layers. Two peers: A of the
    # column-parallel q, v and up and B of the row-parallel o are whole, the others halves.
    assert found["adapters"]["trained"] == 2 * 2 * ((32 + 16) + (32 + 8) + (16 + 32) + (32 + 32))


@pytest.mark.parametrize("name", [*LOSSES, REWARD])
def test_preferences_are_learned_as_under_fsdp(folder, found, name):
    def make(path, kind):
        return make_fsdp(path, kind=kind)

    its, expected = found["preferences"][name], learn(make, str(folder / "qwen2"), name)
    assert its["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert its["losses"][0] - its["losses"][-1] > 1e-3  # so that the steps matter
    assert its["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert difference(its["weights"], expected["weights"]) < 1e-5


@pytest.mark.parametrize("layout", ["TP2", "DP2", "PP2"])
def test_bfloat16_stays_near_float32_and_resumes_bit_for_bit(folder, found, layout):
    assert found[f"bfloat16, {layout}"][0]["grad_norm"] == pytest.approx(
        hf_reference(folder, "qwen2", make_batch())["norms"][0], rel=0.03
    )
    assert found[f"bfloat16 critic, {layout}"]["grad_norm"] == pytest.approx(
        found["critic's step, CP2"]["grad_norm"], rel=0.03
    )
    assert found[f"bfloat16 critic resumes, {layout}"]


@pytest.mark.parametrize("move", MOVES)
def test_training_continues_from_a_checkpoint_under_another_layout(found, move):
    continued, moved, reports = found["moves"][move]
    assert difference(moved, continued) < 1e-6
    assert reports[-1]["skipped"] == 0


def test_a_snapshot_restores_the_engine_bit_for_bit(found):
    assert found["snapshots"] == dict.fromkeys(("TP2", "PP2", "DP2", "DP2, bfloat16, offloaded"), True)


def test_destroyed_groups_are_gone(found):
    assert found["refusals"]["groups left"] == 1, "the world and no other, after all layouts"


def test_a_step_with_an_infinite_gradient_is_skipped(found):
    assert found["refusals"]["skipped"]["skipped"] == 1.0 and found["refusals"]["unchanged"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("other layout", "ConfigError: actor_rollout_ref.actor.megatron: this process has the layout"),
        ("too long", "DataError: another rank's rows cannot be split into micro-batches"),
        ("no checkpoint", "holds no state of a Megatron engine: .metadata is missing"),
        ("three anew", "= 3 does not divide the 2 processes"),
        ("sliding", "the Megatron engine does not support attention over a sliding window; use strategy=fsdp"),
        (
            "one word less",
            f"ConfigError: vocab_size={VOCAB - 1}: model.embed_tokens.weight has {VOCAB} rows in the model's files",
        ),
    ],
)
def test_unsupported_cases_are_refused_with_a_reason(found, what, words):
    assert words in found["refusals"][what]
