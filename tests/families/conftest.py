"""The engines of these tests start a process group of one in the process of the tests."""

from tests.workers.engine.conftest import process_group

__all__ = ["process_group"]
