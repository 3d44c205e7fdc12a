"""Correct for samples of another policy: older weights, or the same weights in another engine.

Three policies are told apart: pi_rollout generated the sample (the behaviour policy), pi_old is the policy that is
about to be trained (the proximal policy), and pi is the one that is being trained.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
