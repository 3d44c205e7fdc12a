"""The job of a Python file: from its `build()`, or from its top level.

The file is executed as by `python FILE`, without its `if __name__ == "__main__":` block, and without the arguments of
the command line.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.import_path import load_module
from hybridrl.master.jobs.builder import DLJobBuilder, Job

BUILD = "build"
HINT = "define build() that returns a job, or `job = RLJobBuilder()...build()` at the top level"


def job_of_module(path: Path, name: str | None = None) -> Job:
    """Return the job of a Python file.

    Args:
        path: The file.
        name: The function, job or builder to take. None: the only one.

    Raises:
        ConfigError: If the file cannot be executed, or has no job, or several.
    """
    with _as_program(path):
        module = load_module(str(path))
        found = {key: value for key, value in vars(module).items() if _describes_job(module, key, value)}
        if name is not None:
            return _named(module, name, found)
        jobs = {key: job for key, value in found.items() if (job := _complete(value, alone=len(found) == 1))}
    specs = [job.spec for job in jobs.values()]
    distinct = {key: job for i, (key, job) in enumerate(jobs.items()) if job.spec not in specs[:i]}
    if not distinct:
        raise ConfigError(f"{path} has no job; {HINT}")
    if len(distinct) > 1:
        raise ConfigError(
            f"{path} has {len(distinct)} jobs: {', '.join(distinct)}; name one of them: {path}:{next(iter(distinct))}"
        )
    return next(iter(distinct.values()))


def _describes_job(module: ModuleType, key: str, value: Any) -> bool:
    is_own_function = inspect.isfunction(value) and value.__module__ == module.__name__
    return isinstance(value, Job | DLJobBuilder) or (key == BUILD and is_own_function)


def _named(module: ModuleType, name: str, found: dict[str, Any]) -> Job:
    value = found.get(name, getattr(module, name, None))
    if value is None or not (inspect.isfunction(value) or isinstance(value, Job | DLJobBuilder)):
        raise ConfigError(f"{module.__file__} has no job {name!r}; there are {', '.join(found) or 'none'}")
    return _job(value)


def _complete(value: Any, *, alone: bool) -> Job | None:
    """Return the job, or None for a builder that is not complete.

    Others may be derived from it.
    """
    try:
        return _job(value)
    except ConfigError:
        if alone or not isinstance(value, DLJobBuilder):
            raise
        return None


def _job(value: Any) -> Job:
    if inspect.isfunction(value):
        try:
            inspect.signature(value).bind()
        except TypeError as error:
            raise ConfigError(f"{value.__name__}() requires an argument ({error}); give it a default") from error
        built = value()
        if not isinstance(built, Job | DLJobBuilder):
            raise ConfigError(f"{value.__name__}() returned {built!r}; it has to return a job or a builder")
        value = built
    return value.build() if isinstance(value, DLJobBuilder) else value


@contextmanager
def _as_program(path: Path) -> Iterator[None]:
    """Let the block see this file as the program.

    Its directory stays on the module path.
    """
    folder, argv = str(path.resolve().parent), sys.argv
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.argv = [str(path)]
    try:
        yield
    except SystemExit as error:
        raise ConfigError(
            f'{path} ended with exit code {error.code} while it was read; put its work under if __name__ == "__main__":'
        ) from error
    finally:
        sys.argv = argv
