"""Conformance suites for classes that other people write. A test program calls them; no program of ours does.

`check_engine` tests a training engine.
"""

from hybridrl.testing.engine import check_engine

__all__ = ["check_engine"]
