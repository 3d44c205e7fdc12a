"""Memory of every process of a PPO job, predicted from its settings; and settings that fit.

Starts nothing and loads no weights. `workers/engine/memory_plan` predicts one engine; this package adds what shares a
process with it: other models, the rollout with its keys and values, a push of weights.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
