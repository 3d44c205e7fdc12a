"""What the GPU tests share: the device they run on, its memory, and a table of the figures they saw, printed when they
are done.
"""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

FIGURES = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test: "cuda", unless GPU_TESTS_ON names another."""
    return os.environ.get("GPU_TESTS_ON", "cuda")


@pytest.fixture
def say(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Return `say(what, figure)`, which adds a line to the table at the end."""
    return lambda what, figure: pytestconfig.stash.setdefault(FIGURES, []).append((what, figure))


@pytest.fixture
def held_bytes(device: str) -> Callable[[], int]:
    """Return a function that counts the bytes of living tensors on the device.

    Compare two counts: workspaces of cuBLAS are in both.
    """
    if device == "cpu":
        pytest.skip("the CPU has no second memory to move things to")

    def count() -> int:
        gc.collect()  # engines hold themselves in cycles
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    return count


@pytest.fixture
def same_sums_every_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that add in one order only, so that two runs may be compared bit by bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _process_group() -> Iterator[None]:
    """Close the process group that the engines open and share; NCCL complains about one that nobody closes."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(FIGURES, [])
    if figures:
        place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        terminalreporter.section(f"figures: {place}, torch {torch.__version__}")
        for what, figure in figures:
            terminalreporter.write_line(f"{what:<76} {figure}")
