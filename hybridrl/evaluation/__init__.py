"""Responses to a file of prompts, their scores, and what the scores say. Trains nothing.

`main_generation`, `main_eval` and `hybridrl eval` call this room. Public names, listed in `__init__.pyi`, are loaded
when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
