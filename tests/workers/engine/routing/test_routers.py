"""Replayed experts: the same bits for a model's own, a mixture written by hand for any others."""

import numpy as np
import pytest
import torch

from hybridrl.errors import DataError
from hybridrl.workers.engine.base import MicroBatching
from hybridrl.workers.engine.routing.routes import RoutingShape, pack, unpack
from tests.support.workers.engine_cases import gradients, make_engine
from tests.support.workers.prefix_cases import grouped_batch
from tests.support.workers.routing_cases import (
    FAMILIES,
    HandWritten,
    random_routes,
    real_lengths,
    save_mixture,
    with_routes,
)

MICRO = MicroBatching(max_rows=3)
LAYOUTS = {
    "padded": {},
    "packed": {"packed": True},
    "recomputed": {"gradient_checkpointing": True},
}
CASES = [  # transformers packs no rows of gpt-oss without mixing them
    (family, layout) for family in FAMILIES for layout in LAYOUTS if (family, layout) != ("GptOss", "packed")
]
EAGER = {"override_config": {"attn_implementation": "eager"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {family: save_mixture(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def batch(seed: int = 0):
    made = grouped_batch([(6, [5, 8, 3]), (9, [4, 4])], seed)
    made.batch["input_ids"] %= 64
    return made


def sum_of_log_probs(outputs, rows):
    chosen = outputs["log_probs"] * rows.batch["advantages"] * rows.batch["response_mask"]
    return chosen.sum(), {"loss": chosen.sum()}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_replaying_a_models_own_routes_changes_no_bit(models, family, layout):
    engine = make_engine(models[family], replays_routes=True, **LAYOUTS[layout], **EAGER)
    rows = batch()
    plain, column = engine.forward_with_routes(rows, MICRO, outputs=("log_probs",))
    engine.forward_backward(rows, MICRO, sum_of_log_probs, outputs=("log_probs",))
    plain_gradients = gradients(engine)
    engine.optimizer_step(skip=True)
    again = engine.forward(with_routes(rows, column), MICRO, outputs=("log_probs",))
    assert torch.equal(plain["log_probs"], again["log_probs"])
    stats = engine.forward_backward(with_routes(rows, column), MICRO, sum_of_log_probs, outputs=("log_probs",))
    replayed = gradients(engine)
    assert all(torch.equal(plain_gradients[name], replayed[name]) for name in replayed)
    assert sum(one["routing_differ"] for one in stats) == 0
    assert sum(one["routing_tokens"] for one in stats) == sum(real_lengths(rows))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_random_routes_are_those_of_a_mixture_written_by_hand(models, family, layout):
    engine = make_engine(models[family], replays_routes=True, **LAYOUTS[layout], **EAGER)
    rows = batch()
    column = random_routes(real_lengths(rows))
    forced = with_routes(rows, column)
    found = engine.forward(forced, MICRO, outputs=("log_probs",))["log_probs"]
    stats = engine.forward_backward(forced, MICRO, sum_of_log_probs, outputs=("log_probs",))
    hand, total = HandWritten(models[family]), torch.zeros(())
    prompt = rows.batch["input_ids"].shape[1] - rows.batch["response_mask"].shape[1]
    for row in range(len(rows)):
        real = rows.batch["attention_mask"][row].bool()
        log_probs = hand.log_probs(rows.batch["input_ids"][row][real], torch.from_numpy(column[row].astype("int64")))
        cells = torch.zeros(real.numel()).index_put((real.nonzero().squeeze(-1)[1:],), log_probs)[prompt:]
        cells = cells * rows.batch["response_mask"][row]
        assert torch.allclose(found[row], cells, atol=1e-6, rtol=1e-6), (found[row] - cells).abs().max()
        total = total + (cells * rows.batch["advantages"][row]).sum()
    total.backward()
    expected = dict(hand.model.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in expected.values())
    for name, gradient in gradients(engine).items():
        bound = 1e-6 if any(part in name for part in ("gate.", "router", "experts.")) else 3e-6
        assert (gradient - expected[name].grad).abs().max() < bound * scale, name
    routers = [name for name in expected if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == 2 and all(expected[name].grad.abs().max() > 1e-4 for name in routers)
    assert sum(one["routing_differ"] for one in stats) > 0.5 * sum(one["routing_tokens"] for one in stats)


def shared_routes(rows, seed: int = 0):
    """Return random routes that rows with the same prompt share.

    A prefix cache of the rollout would give them so.
    """
    column, prompts = random_routes(real_lengths(rows), seed), {}
    width = rows.batch["input_ids"].shape[1] - rows.batch["response_mask"].shape[1]
    for row, (ids, mask) in enumerate(zip(rows.batch["input_ids"], rows.batch["attention_mask"].bool(), strict=True)):
        prompt = tuple(ids[:width][mask[:width]].tolist())
        first = prompts.setdefault(prompt, column[row][: len(prompt)])
        column[row][: len(prompt)] = first
    return column


def test_shared_prefixes_replay_the_routes_that_their_rows_have_in_common(models):
    rows, outputs = batch(), ("log_probs",)
    forced = with_routes(rows, shared_routes(rows))
    apart = make_engine(models["Qwen3Moe"], replays_routes=True, packed=True)
    shared = make_engine(models["Qwen3Moe"], replays_routes=True, share_prefixes=True)
    expected, found = (each.forward(forced, MicroBatching(max_rows=5), outputs=outputs) for each in (apart, shared))
    assert torch.allclose(found["log_probs"], expected["log_probs"], atol=1e-5)
    stats = [
        each.forward_backward(forced, MicroBatching(max_rows=5), sum_of_log_probs, outputs=outputs)
        for each in (apart, shared)
    ]
    assert sum(one["routing_shared"] for one in stats[1]) == 0
    wanted = gradients(apart)
    assert all(torch.allclose(tensor, wanted[name], atol=1e-5) for name, tensor in gradients(shared).items())


def test_a_shared_token_has_the_routes_of_the_first_row_and_the_others_are_counted(models):
    rows = grouped_batch([(9, [5, 8])])
    rows.batch["input_ids"] %= 64
    column = random_routes(real_lengths(rows))
    column[1][:9] = column[0][:9]
    column[1][2:4] = (column[0][2:4] + 1) % 8
    shared = make_engine(models["Qwen3Moe"], replays_routes=True, share_prefixes=True)
    [stats] = shared.forward_backward(with_routes(rows, column), MICRO, sum_of_log_probs, outputs=("log_probs",))
    assert stats["routing_shared"] == 2
    assert torch.equal(shared._replay.routers.taken()[:9], torch.from_numpy(column[0][:9].astype("int64")))


def test_missing_routes_are_the_routers_own_and_counted(models):
    engine = make_engine(models["Qwen3Moe"], replays_routes=True, packed=True)
    rows = batch()
    outputs, own = engine.forward_with_routes(rows, MICRO, outputs=("log_probs",))
    short = own.copy()
    for row in range(len(rows)):
        short[row] = short[row][:-2].copy()  # of the last two tokens; nothing is read behind the last one
        short[row][1] = 255
    stats = engine.forward_backward(with_routes(rows, short), MICRO, sum_of_log_probs, outputs=("log_probs",))
    lengths = rows.batch["attention_mask"][:, -rows.batch["response_mask"].shape[1] :].sum(-1)
    last = torch.stack([mask[length - 1] for mask, length in zip(rows.batch["response_mask"], lengths, strict=True)])
    # token 1 of each row, and the last but one where the last token is trained
    assert sum(one["routing_missing"] for one in stats) == len(rows) + int(last.sum())
    again = engine.forward(with_routes(rows, short), MICRO, outputs=("log_probs",))
    assert torch.equal(again["log_probs"], outputs["log_probs"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda entry: None, "is empty: the rollout or agent returned no routes"),
        (lambda entry: entry[:, :1], r"has the shape .* they are of another model"),
        (lambda entry: entry + 8, "names expert .* a layer has 8: they are of another model"),
        (lambda entry: entry * 0, "has only zeros in layer 0: the engine that generated did not record it"),
        (lambda entry: entry.repeat(9, axis=0), "has routes of .* tokens, and the row has"),
    ],
    ids=["none", "layers", "range", "zeros", "length"],
)
def test_routes_that_are_none_of_the_models_are_refused_before_a_pass(models, damage, message):
    engine = make_engine(models["Qwen3Moe"], replays_routes=True)
    rows = batch()
    column = random_routes(real_lengths(rows))
    column[2] = damage(column[2])
    with pytest.raises(DataError, match=f"routed_experts of row 2 {message}"):
        engine.forward(with_routes(rows, column), MICRO, outputs=("log_probs",))


def test_256_experts_fit_into_a_byte_unless_a_token_has_one(models):
    shapes = {RoutingShape(2, top_k, experts): None for top_k in (1, 2) for experts in (255, 256, 257)}
    assert [shape.dtype for shape in shapes] == [np.uint8, np.int16, np.int16, np.uint8, np.uint8, np.int16]
    experts = torch.tensor([[[254, 255]], [[-1, -1]]])
    assert torch.equal(unpack(pack(experts, RoutingShape(1, 2, 256))), experts)
