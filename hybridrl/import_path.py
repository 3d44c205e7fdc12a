"""Load the user's code by path: modules, classes and functions from a Python file or an importable module.

The driver and all workers use this module.
"""

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.errors import ConfigError

_files: dict[str, str] = {}  # module name -> the file that was executed under it


def load_module(path: str) -> ModuleType:
    """Return the module at `path`, a file or a dotted name.

    A module is executed once per process.

    Raises:
        ConfigError: See `load_object`.
    """
    return _load_file(Path(path).expanduser()) if path.endswith(".py") or "/" in path else _import(path)


def file_of_module(name: str) -> str | None:
    """Return the file that `load_module` has executed as the module of this name; no import finds it by the name."""
    return _files.get(name)


def load_object(path: str, name: str) -> Any:
    """Return the object `name` of a file (`rewards/mine.py`) or a module (`my_project.rewards`).

    A file is executed once per process, however many objects are loaded from it.

    Raises:
        ConfigError: The file or module does not exist, its import fails (the cause is chained), or `name` is missing.
    """
    module = load_module(path)
    if not hasattr(module, name):
        raise ConfigError(f"{path} has no {name!r}; {_nearest(name, module)}")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = sorted(found.name for found in path.parent.glob("*.py")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=3)
        raise ConfigError(f"no file {path}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    full = path.resolve()
    module_name = f"{path.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, full)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    _files[module_name] = str(full)
    sys.modules[module_name] = module  # dataclasses and pickle find a class's module by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _import(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module named {error.name!r}; give an importable module, or a file ending in .py"
            ) from error
        raise ConfigError(f"{path} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def _nearest(name: str, module: ModuleType) -> str:
    names = sorted(key for key in vars(module) if not key.startswith("_"))
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(names) or 'no public names'}"
