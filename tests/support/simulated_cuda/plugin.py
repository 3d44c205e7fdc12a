"""Run tests on a simulated CUDA device: `python -m pytest -p tests.support.simulated_cuda.plugin -m gpu tests/gpu`.

See `device.py`, and docs/gpu.md for what passes.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.simulated_cuda.device import install

init_process_group = dist.init_process_group


def _init_with_gloo(backend: str | None = None, *arguments: Any, device_id: Any = None, **more: Any) -> None:
    """NCCL needs a real device."""
    init_process_group("cpu:gloo,cuda:gloo", *arguments, **more)


def _skip_peaks() -> None:
    pytest.skip("a simulated device counts no peaks")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    dist.init_process_group = _init_with_gloo  # type: ignore[assignment]
    install()
    torch.cuda.reset_peak_memory_stats = _skip_peaks  # type: ignore[assignment]
