"""The modules that a standby process imports, as a worker names them."""

import os
import sys
import sysconfig
from types import ModuleType


def loaded_modules() -> list[str]:
    """Return the modules that this process has imported from its Python installation and this library, in order.

    Code of users is left out: it may read the environment of its rank, or start threads.
    """
    roots = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    return [
        name
        for name, module in list(sys.modules.items())
        if name != "__main__" and (name.partition(".")[0] == "hybridrl" or _is_installed(module, roots))
    ]


def _is_installed(module: ModuleType | None, roots: tuple[str, ...]) -> bool:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return isinstance(origin, str) and origin.startswith(roots)
