"""Statistics of tokens over a sharded vocabulary, on two real processes (gloo), equal those of whole logits.

From shards of the logits, and from states and shards of the weight.
"""

import os

import pytest
import torch
import torch.distributed as dist

from hybridrl.algos.token_stats import VocabularyShard, token_stats, token_stats_of_states
from tests.support.ranks import fork_ranks

VOCABULARY, TEMPERATURE = 10, 0.7  # padded to 12 columns, 6 on each process


def inputs():
    torch.manual_seed(0)
    return torch.randn(5, 12) * 3, torch.tensor([0, 5, 6, 9, 3])


def states():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def padded(weight_VH):
    """Return the rows of tokens, and rows of numbers that must not matter."""
    return torch.cat([weight_VH[:VOCABULARY], torch.full_like(weight_VH[:2], 7.0)])


def peer(rank: int, folder: str) -> None:
    from hybridrl.workers.engine.megatron.sharded_log_probs import sharded_token_stats  # imports megatron-core

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    logits_NV, labels_N = inputs()
    shard_Nv = logits_NV[:, rank * 6 : rank * 6 + 6].clone().requires_grad_()
    stats = sharded_token_stats(
        shard_Nv,
        labels_N,
        temperature=TEMPERATURE,
        vocab_size=VOCABULARY,
        group=dist.group.WORLD,
        with_sum_pi_squared=True,
    )
    (stats.log_probs_N + 0.3 * stats.entropy_N).sum().backward()
    torch.save(
        [*(x.detach() for x in stats), shard_Nv.grad, stats.sum_pi_squared_N.requires_grad], f"{folder}/{rank}.pt"
    )
    states_NH = states().requires_grad_()
    weight_vH = (padded(logits_NV.T) @ states_NH.detach())[rank * 6 : rank * 6 + 6].requires_grad_()
    stats = token_stats_of_states(
        states_NH,
        weight_vH,
        labels_N,
        temperature=TEMPERATURE,
        with_entropy=True,
        with_sum_pi_squared=True,
        chunk=1,
        shard=VocabularyShard(dist.group.WORLD, VOCABULARY),
    )
    (stats.log_probs_N + 0.3 * stats.entropy_N).sum().backward()
    torch.save([*(x.detach() for x in stats), states_NH.grad, weight_vH.grad], f"{folder}/states_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_two_processes_compute_what_one_does(tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    assert fork_ranks(peer, 2, str(tmp_path), timeout_s=120) == [0, 0]
    logits_NV, labels_N = inputs()
    logits_NV = logits_NV[:, :VOCABULARY].clone().requires_grad_()
    whole = token_stats(logits_NV, labels_N, temperature=TEMPERATURE, with_entropy=True, with_sum_pi_squared=True)
    (whole.log_probs_N + 0.3 * whole.entropy_N).sum().backward()
    for rank in range(2):
        *stats, gradient_Nv, has_gradient = torch.load(tmp_path / f"{rank}.pt")
        assert not has_gradient
        for ours, theirs in zip(stats, whole, strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        expected_Nv = torch.nn.functional.pad(logits_NV.grad, (0, 2))[:, rank * 6 : rank * 6 + 6]
        torch.testing.assert_close(gradient_Nv, expected_Nv)
    states_NH, logits_NV = states().requires_grad_(), inputs()[0]
    weight_VH = (padded(logits_NV.T) @ states_NH.detach())[:VOCABULARY].requires_grad_()
    whole = token_stats(
        states_NH @ weight_VH.T, labels_N, temperature=TEMPERATURE, with_entropy=True, with_sum_pi_squared=True
    )
    (whole.log_probs_N + 0.3 * whole.entropy_N).sum().backward()
    for rank in range(2):
        *stats, of_states_NH, of_weight_vH = torch.load(tmp_path / f"states_{rank}.pt")
        for ours, theirs in zip([*stats, of_states_NH], [*whole, states_NH.grad], strict=True):
            torch.testing.assert_close(ours, theirs.detach())
        expected_vH = torch.nn.functional.pad(weight_VH.grad, (0, 0, 0, 2))[rank * 6 : rank * 6 + 6]
        torch.testing.assert_close(of_weight_vH, expected_vH)
