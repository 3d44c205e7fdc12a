"""Rollouts: engines that generate with a copy of the policy, inside a worker process.

`make_rollout(name, RolloutSetup(...))` starts one: `hf`, `vllm`, or a class of your own by its import path. A class of
your own derives from `Rollout`; `docs/extending.md` has a complete one.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
