"""Settings: the schema of each program, and loading and checking of a frozen config.

A config comes from a command line, a YAML file or a dictionary. It is loaded in the driver and sent to the workers.

Public names, listed in `__init__.pyi`, are loaded when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
