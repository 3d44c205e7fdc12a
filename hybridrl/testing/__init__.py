"""Public conformance suites for engines, rollouts and transports of your own.

Call them from a test of your own; an error names the check that failed. Nothing inside the package imports this room.
Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
