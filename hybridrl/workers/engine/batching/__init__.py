"""Micro-batches: from rows to the model's input tokens, and from its outputs back to rows.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for: only some runs share prefixes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
