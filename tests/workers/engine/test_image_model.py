"""Models that read images in the FSDP engine: padded, packed and as prefix trees, against plain transformers."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hybridrl.algos.partition.row_images import IMAGE_INPUTS, prefix_rows
from hybridrl.errors import DataError
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.image_model import image_positions, pixels_of, vision_tower
from tests.support.ranks import run_ranks
from tests.support.workers.engine_cases import WHOLE, gradients, make_engine, policy_loss, train, whole_weights
from tests.support.workers.image_cases import (
    FAMILIES,
    image_batch,
    plain_log_probs,
    plain_values,
    save_tiny,
    tower_runs,
)
from tests.support.workers.image_rank import CASES, NUM_TOKENS, POLICY

pytestmark = pytest.mark.usefixtures("process_group")
LAYOUTS = {"padded": {}, "packed": {"packed": True}, "tree": {"share_prefixes": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("images")
    return {family: save_tiny(folder, family) for family in FAMILIES}


def pg_loss(outputs, rows):
    return -(outputs["log_probs"] * rows.batch["advantages"] * rows.batch["response_mask"]).sum() / NUM_TOKENS, {}


def plain(path: str):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(models) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return log-probs and gradients of plain transformers by family."""
    found = {}
    for family, path in models.items():
        model, batch = plain(path), image_batch(path)
        log_probs = plain_log_probs(model, batch)
        pg_loss({"log_probs": log_probs}, batch)[0].backward()
        found[family] = log_probs.detach(), {name: p.grad for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_plain_transformers(models, expected, family, layout):
    batch, (log_probs, grads) = image_batch(models[family]), expected[family]
    engine = make_engine(models[family], override_config=tower_runs(models[family]), **LAYOUTS[layout])
    micro = MicroBatching(max_rows=3)
    found = engine.forward(batch, micro, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(found, log_probs, atol=1e-5, rtol=0)
    engine.forward_backward(batch, micro, pg_loss, outputs=POLICY)
    own = gradients(engine)
    assert own.keys() == grads.keys()
    for name, gradient in own.items():
        scale = max(1.0, float(grads[name].abs().max()))
        torch.testing.assert_close(gradient / scale, grads[name] / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_the_model(models, family):
    model, batch = plain(models[family]), image_batch(models[family])
    for row, images in enumerate(batch.non_tensor_batch[IMAGE_INPUTS]):
        ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()][None]
        kinds = (ids == model.config.image_token_id).int()
        grids = None if images is None else torch.from_numpy(images["image_grid_thw"])
        expected = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0][:, 0]
        assert torch.equal(image_positions(ids.shape[1], images), expected)


def test_a_tree_computes_each_picture_of_a_group_once_and_never_merges_different_ones(models):
    """The first and the last prompt have equal tokens and different pictures; the third has two pictures."""
    path = models["qwen3_vl"]
    batch = image_batch(path, n=4)
    inputs = batch.non_tensor_batch[IMAGE_INPUTS]
    assert batch.batch["input_ids"][0, :-6].equal(batch.batch["input_ids"][12, :-6])
    keys = prefix_rows(batch.batch["input_ids"], batch.batch["attention_mask"], list(inputs))
    assert (keys[0] != keys[12]).sum() >= inputs[0]["image_tokens"].sum()
    patches = {"tree": num_patches(path, batch, share_prefixes=True), "packed": num_patches(path, batch, packed=True)}
    per_group = sum(len(pixels_of(inputs[row])) for row in (0, 8, 12))
    blank = 4
    assert patches == {"tree": per_group + blank, "packed": 4 * per_group + blank}


def num_patches(path: str, batch, **layout) -> int:
    """Return how many patches the vision tower computes for one micro-batch of all rows."""
    engine, seen = make_engine(path, optim=None, **layout), []
    vision_tower(engine.model).register_forward_pre_hook(lambda tower, args: seen.append(len(args[0])))
    engine.forward(batch, WHOLE, outputs=("log_probs",))
    return sum(seen)


def test_a_frozen_tower_keeps_its_bits_and_the_text_learns(models):
    path = models["qwen3_vl"]
    batch = image_batch(path)
    for frozen in (True, False):
        engine = make_engine(path, freeze_vision_tower=frozen, packed=True)
        before = whole_weights(engine)
        train(engine, batch, WHOLE, num_tokens=NUM_TOKENS, steps=1)
        changed = {name for name, tensor in whole_weights(engine).items() if not torch.equal(tensor, before[name])}
        tower = {name for name in before if "visual" in name}
        assert (before.keys() - tower) <= changed
        assert not (changed & tower) if frozen else tower <= changed


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.support.workers.image_rank", 2, models["qwen3_vl"], folder, log=folder / "log", timeout_s=100)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_with_text_only_waits_for_no_tower_and_both_get_the_gradients_of_one(ranks, models, case):
    settings = CASES[case]
    engine, batch = make_engine(models["qwen3_vl"], **settings), image_batch(models["qwen3_vl"])
    engine.forward_backward(batch, MicroBatching(max_rows=3), policy_loss(NUM_TOKENS), outputs=POLICY)
    expected = gradients(engine)
    for rank in ranks:
        assert rank[case].keys() == expected.keys()
        for name, gradient in rank[case].items():
            scale = max(1.0, float(expected[name].abs().max()))
            torch.testing.assert_close(gradient / scale, expected[name] / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_a_head_on_the_states_of_plain_transformers(models, layout):
    path = models["qwen2_5_vl"]
    model, batch, engine = plain(path), image_batch(path), make_engine(path, kind="value", **LAYOUTS[layout])
    head = {name: tensor.full_tensor() for name, tensor in engine.model.lm_head.state_dict().items()}
    model.lm_head = torch.nn.Linear(model.config.text_config.hidden_size, 1)
    model.lm_head.load_state_dict(head)
    with torch.no_grad():
        states = plain_values(model, batch)
    found = engine.forward(batch, MicroBatching(max_rows=3), outputs=("values",))["values"]
    torch.testing.assert_close(found, states, atol=1e-5, rtol=0)


def test_a_model_of_text_refuses_rows_with_images(models, tiny_qwen2):
    engine = make_engine(tiny_qwen2, optim=None)
    with pytest.raises(DataError, match="rows have images, and this model reads text only"):
        engine.forward(image_batch(models["qwen2_5_vl"]), WHOLE, outputs=("log_probs",))
