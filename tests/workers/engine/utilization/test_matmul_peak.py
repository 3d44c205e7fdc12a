"""The peak of a device: names of GPUs, and that a measurement leaves a process as it was."""

import time

import pytest
import torch

from hybridrl.workers.engine.utilization import matmul_peak as peaks
from hybridrl.workers.engine.utilization.matmul_peak import matmul_peak, vendor_peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1300e12),
        ("NVIDIA RTX A4000", None),  # not an A40
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_found_by_the_words_of_its_name(name, peak):
    assert vendor_peak(name) == peak


def test_a_measurement_is_made_once_and_draws_no_random_numbers_of_the_process():
    matmul_peak.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    peak = matmul_peak("cpu", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    start = time.process_time()
    assert matmul_peak("cpu", torch.float32) == peak
    assert time.process_time() - start < 0.001


def test_a_measured_peak_is_the_rate_of_a_large_product_on_all_threads():
    matrix, threads = torch.rand(768, 768), torch.get_num_threads()
    rates = []
    for _ in range(4):
        start = time.process_time()
        matrix @ matrix
        rates.append(2 * 768**3 * threads / (time.process_time() - start))
    assert matmul_peak("cpu", torch.float32) == pytest.approx(max(rates), rel=0.5)


def test_a_clock_that_moves_in_steps_of_4_ms_changes_a_peak_little(monkeypatch):
    expected, clock = matmul_peak("cpu", torch.float32), peaks._clock
    monkeypatch.setattr(peaks, "_clock", lambda device: clock(device) // 0.004 * 0.004)
    matmul_peak.cache_clear()
    assert 0.5 * expected < matmul_peak("cpu", torch.float32) < 1.6 * expected
