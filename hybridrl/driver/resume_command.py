"""Save the command line of a run in its directory, and resume the run by repeating it.

`main_ppo` saves the command when it starts. `hybridrl job resume` replaces its own process by that command, with
`trainer.resume_mode=auto`.
"""

import json
import os
import sys
from collections.abc import Sequence

from hybridrl.errors import ConfigError
from hybridrl.system.atomic_write import atomic_write

FILE = "command.json"


def save_command(directory: str) -> None:
    """Save the command line of this program in a run's directory."""
    with atomic_write(os.path.join(directory, FILE)) as file:
        json.dump({"command": [sys.executable, *sys.orig_argv[1:]], "directory": os.getcwd()}, file, indent=2)


def has_command(directory: str) -> bool:
    """Return whether a run has saved its command line in this directory."""
    return os.path.isfile(os.path.join(directory, FILE))


def resume_arguments(directory: str, changes: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the command that resumes the run in `directory`, and its working directory.

    Args:
        directory: The run's directory.
        changes: Settings to change, key=value.

    Raises:
        ConfigError: No saved command is there.
    """
    path = os.path.join(directory, FILE)
    try:
        with open(path, encoding="utf-8") as f:
            saved = json.load(f)
        command, working_directory = saved["command"], saved["directory"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{directory}: no {FILE} of a run of `python -m hybridrl.main_ppo` is there ({error}), nor the journal of "
            "a submitted job; name a run's directory: trainer.default_local_dir, checkpoints/PROJECT/EXPERIMENT, or "
            "the directory given to submit(journal=...)"
        ) from error
    new = ["trainer.resume_mode=auto", *changes]
    replaced = {word.partition("=")[0] for word in new} | {"trainer.resume_from_path"}
    return [*(word for word in command if word.partition("=")[0] not in replaced), *new], working_directory


def resume_run(directory: str, changes: Sequence[str] = ()) -> None:
    """Replace this process by the command that resumes the run in `directory`. Does not return."""
    command, working_directory = resume_arguments(directory, changes)
    os.chdir(working_directory)
    sys.stdout.flush()
    os.execv(command[0], command)
