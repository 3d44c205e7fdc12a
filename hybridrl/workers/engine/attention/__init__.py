"""Attention and recurrent layers of the engines: of packed rows, prefix trees and shared sequences.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for: only some models and runs need them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
