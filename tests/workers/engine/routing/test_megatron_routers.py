"""Forced routes on two FSDP ranks and in megatron-core's routers give what one FSDP process computes."""

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.workers.engine_cases import gradients, make_engine
from tests.support.workers.megatron_parity import split_experts
from tests.support.workers.router_replay_rank import LAYERS, MICRO, all_rows, loss_of
from tests.support.workers.routing_cases import save_mixture

CASES = [
    ("fsdp", 2),
    ("megatron", 1),
    ("megatron_packed", 1),
    ("megatron_pp2", 2),
    ("megatron_pp2_recomputed", 2),
    ("megatron_vpp2", 2),
    ("megatron_cp2", 2),
    ("megatron_tp2_ep2", 2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixture")
    save_mixture(made, "Qwen3Moe", num_hidden_layers=LAYERS)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), CASES)
@pytest.mark.timeout(240)
def test_forced_routes_give_what_one_process_computes(folder, name, num_ranks):
    module = "tests.support.workers.router_replay_rank"
    run_ranks(module, num_ranks, name, folder, log=folder / f"{name}.log", timeout_s=200)
    found = torch.load(folder / f"{name}_{num_ranks}.pt", weights_only=False)
    one, rows = make_engine(str(folder), replays_routes=True, packed=True), all_rows()
    expected = one.forward(rows, MICRO, outputs=("log_probs",))["log_probs"][found["rows"]]
    assert found["own"] and torch.allclose(found["log_probs"], expected, atol=1e-5)
    _, routes = one.forward_with_routes(rows.select(non_tensor_batch_keys=[]), MICRO, outputs=("log_probs",))
    pairs = zip(found["routes"], (routes[row] for row in found["rows"]), strict=True)
    assert all(np.array_equal(np.sort(left, -1), np.sort(right, -1)) for left, right in pairs)
    stats = one.forward_backward(rows, MICRO, loss_of, outputs=("log_probs",))
    wanted = split_experts(gradients(one)) if name != "fsdp" else gradients(one)
    scale = max(float(tensor.abs().max()) for tensor in wanted.values())
    assert all((tensor - wanted[key]).abs().max() < 1e-5 * scale for key, tensor in found["gradients"].items())
    if len(found["rows"]) == len(rows):
        for key in ("routing_tokens", "routing_differ", "routing_missing"):
            assert sum(part[key] for part in found["stats"]) == sum(part[key] for part in stats)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_experts_on_two_ranks_are_those_of_one_after_many_updates(folder):
    """Print the figures: `pytest -s`. With the routers' own choice a near tie may be decided otherwise."""
    module = "tests.support.workers.router_replay_rank"
    for num_ranks in (1, 2):
        run_ranks(module, num_ranks, "updates", folder, log=folder / f"updates_{num_ranks}.log", timeout_s=200)
    one, two = (torch.load(folder / f"updates_{num_ranks}.pt") for num_ranks in (1, 2))
    before = dict(make_engine(str(folder)).weights())
    for how in ("own", "replayed"):
        assert one[how].keys() == two[how].keys()
        differences = {name: float((one[how][name] - two[how][name]).abs().max()) for name in one[how]}
        log_probs, moved = (
            differences.pop("log_probs"),
            max(float((one[how][n] - before[n]).abs().max()) for n in before),
        )
        print(f"{how}: log-probs {log_probs:.1e}, weights {max(differences.values()):.1e}, which moved by {moved:.1e}")
        assert log_probs < 1e-4 and max(differences.values()) < 1e-2 * moved
