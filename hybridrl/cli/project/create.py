"""`hybridrl init NAME`: a directory with what most projects change, which runs as it is.

The files are those of `template`, copied. They are programs and settings of the user from then on.
"""

import argparse
import shutil
from pathlib import Path

from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError

TEMPLATE = Path(__file__).with_name("template")


def create_project(arguments: argparse.Namespace) -> None:
    """Make the directory, and say what to do next.

    Raises:
        ConfigError: It exists already, or cannot be written.
    """
    folder = Path(arguments.name)
    if folder.exists():
        raise ConfigError(f"NAME {folder}: exists already; choose another name")
    try:
        shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise ConfigError(f"NAME {folder}: cannot be written ({error}); choose another directory") from error
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    show(
        f"made {folder}: {', '.join(files)}\n"
        f"cd {folder} && bash run.sh    # data, a tiny model, and ten steps of GRPO on the CPU\n"
        f"cd {folder} && pytest         # tests of the reward, the agent loop, the stage and the run\n"
    )
