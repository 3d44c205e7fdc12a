"""Rules over several settings.

Those of a feature are listed in `__init__.pyi`, and loaded if the settings name the feature.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
