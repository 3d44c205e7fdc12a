"""Log-probs and entropy from hidden states, without logits: against those of whole logits, and what is kept of them."""

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.algos.token_stats import FinalLogits, token_stats, token_stats_of_states
from hybridrl.errors import DataError

N, H, V = 37, 16, 203


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def inputs(dtype=torch.float32):
    states_NH, weight_VH = torch.randn(N, H), torch.randn(V, H) * 0.5
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (states_NH, weight_VH, torch.randn(V))]
    return leaves, torch.randint(V, (N,))


def results(leaves, stats):
    """Return the statistics, and the gradients of a loss that weighs tokens differently."""
    draw = torch.Generator().manual_seed(1)
    loss = (stats.log_probs_N * torch.randn(N, generator=draw)).sum()
    if stats.entropy_N is not None:
        loss = loss + 0.3 * (stats.entropy_N * torch.randn(N, generator=draw)).sum()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [column.detach() for column in stats if column is not None] + list(torch.autograd.grad(loss, wanted))


def assert_equal_to_1e6(found, expected):
    """Assert that differences are below 1e-6 of each tensor's largest value: some units of float32's last digit."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("chunk", [1, 5, 1000, None])
@pytest.mark.parametrize("final", [None, FinalLogits(0.25), FinalLogits(2.0, soft_cap=5.0)], ids=str)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients_equal_those_of_whole_logits(chunk, final, with_entropy):
    leaves, labels_N = inputs()
    states_NH, weight_VH, bias_V = leaves
    logits_NV = linear(states_NH, weight_VH, bias_V)
    if final is not None:
        logits_NV = logits_NV * final.scale
        if final.soft_cap is not None:
            logits_NV = final.soft_cap * torch.tanh(logits_NV / final.soft_cap)
    options = {"temperature": 0.7, "with_entropy": with_entropy, "with_sum_pi_squared": True}
    expected = results(leaves, token_stats(logits_NV, labels_N, **options))
    found = token_stats_of_states(states_NH, weight_VH, labels_N, bias_V=bias_V, final=final, chunk=chunk, **options)
    assert not found.sum_pi_squared_N.requires_grad
    assert_equal_to_1e6(results(leaves, found), expected)


def test_bfloat16_products_are_those_of_the_head_and_sums_are_float32():
    leaves, labels_N = inputs(torch.bfloat16)
    whole = token_stats(linear(*leaves), labels_N, with_entropy=True)
    parts = token_stats_of_states(*leaves[:2], labels_N, bias_V=leaves[2], with_entropy=True, chunk=5)
    expected, found = results(leaves, whole), results(leaves, parts)
    assert_equal_to_1e6(found[:2], expected[:2])
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()  # bfloat16 has two to three digits


def test_a_frozen_weight_gets_no_gradient_and_the_states_the_same():
    leaves, labels_N = inputs()
    expected = results(leaves[:1], token_stats_of_states(*leaves[:2], labels_N, chunk=3))
    frozen = leaves[1].detach()
    found = results(leaves[:1], token_stats_of_states(leaves[0], frozen, labels_N, chunk=3))
    assert all(map(torch.equal, found, expected))


def test_tokens_that_cannot_occur_make_no_nan():
    states_NH, weight_VH = torch.ones(2, 1, requires_grad=True), torch.zeros(6, 1)
    bias_V = torch.full((6,), -torch.inf)
    bias_V[[4, 5]] = 0.0  # two words of equal probability: log 1/2 and an entropy of log 2, whatever the tiles
    for chunk in (1, 2, None):
        labels_N = torch.tensor([4, 5])
        found = token_stats_of_states(states_NH, weight_VH, labels_N, bias_V=bias_V, with_entropy=True, chunk=chunk)
        assert found.log_probs_N.tolist() == pytest.approx([-0.6931472] * 2)
        assert found.entropy_N.tolist() == pytest.approx([0.6931472] * 2)
        (gradient,) = torch.autograd.grad(found.log_probs_N.sum() + 1e6 * found.entropy_N.sum(), states_NH)
        assert torch.isfinite(gradient).all()


class _LargestResult(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_more_logits_exist_at_a_time_than_those_of_a_chunk():
    leaves, labels_N = inputs()
    with _LargestResult() as seen:
        results(leaves[:2], token_stats_of_states(*leaves[:2], labels_N, with_entropy=True, chunk=1000))
    assert seen.elements == N * V
    with _LargestResult() as seen:
        results(leaves[:2], token_stats_of_states(*leaves[:2], labels_N, with_entropy=True, chunk=2))
    assert seen.elements == V * H  # the gradient of the weight


def test_no_tokens_and_no_gradient_work():
    leaves, _ = inputs()
    found = token_stats_of_states(leaves[0][:0], leaves[1], torch.zeros(0, dtype=torch.int64), with_entropy=True)
    assert (found.log_probs_N.shape, found.entropy_N.shape) == ((0,), (0,))
    for gradient in torch.autograd.grad(found.log_probs_N.sum() + found.entropy_N.sum(), leaves[:2]):
        assert not gradient.any()
    with torch.no_grad():
        assert not token_stats_of_states(*leaves[:2], torch.zeros(N, dtype=torch.int64)).log_probs_N.requires_grad


def test_refusals_name_the_value():
    with pytest.raises(DataError, match=r"are \(2, 3\), \(5, 4\) and \(2,\)"):
        token_stats_of_states(torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        token_stats_of_states(torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64), temperature=0)
