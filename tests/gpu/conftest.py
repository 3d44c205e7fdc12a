"""Fixtures of the GPU tests: the device, its memory, and a table of measured figures printed at the end."""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

FIGURES = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device under test: "cuda", unless GPU_TESTS_ON names another."""
    return os.environ.get("GPU_TESTS_ON", "cuda")


@pytest.fixture
def record_figure(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Return `record_figure(quantity, figure)`, which adds a line to the table at the end."""
    return lambda quantity, figure: pytestconfig.stash.setdefault(FIGURES, []).append((quantity, figure))


@pytest.fixture
def allocated_bytes(device: str) -> Callable[[], int]:
    """Return a function that counts the bytes of live tensors on the device.

    Use differences of two counts: both include the workspaces of cuBLAS.
    """
    if device == "cpu":
        pytest.skip("the CPU has no second memory to move things to")

    def count() -> int:
        gc.collect()  # engines are in reference cycles
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    return count


@pytest.fixture
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use kernels that add in a fixed order, so that two runs can be compared bit by bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _process_group() -> Iterator[None]:
    """Close the process group that the engines open and share; NCCL warns about an open one at exit."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(FIGURES, [])
    if figures:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        terminalreporter.section(f"figures: {device_name}, torch {torch.__version__}")
        for quantity, figure in figures:
            terminalreporter.write_line(f"{quantity:<76} {figure}")
