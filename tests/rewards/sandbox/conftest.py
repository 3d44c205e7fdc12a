"""The sandbox of this machine, and a server with SandboxFusion's interface that runs programs in it."""

from collections.abc import Iterator

import pytest

from hybridrl.rewards.sandbox import LocalSandbox, SandboxUnavailable
from tests.support.sandbox_server import SandboxServer, serve_sandbox


@pytest.fixture(scope="session")
def sandbox() -> LocalSandbox:
    found = LocalSandbox()
    try:
        found.check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return found


@pytest.fixture
def server(sandbox: LocalSandbox) -> Iterator[SandboxServer]:
    with serve_sandbox() as running:
        yield running
