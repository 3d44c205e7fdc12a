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
from hybridrl.system.secrets import HIDDEN, without_secret

FILE = "command.json"


def save_command(directory: str) -> None:
    """Save the command line of this program in a run's directory, readable by this user only, without secrets.

    The value of a setting whose name says that it is a secret, such as `custom_reward_function.kwargs.api_key`, is not
    saved. Neither is a mapping with such an entry.
    """
    command = [sys.executable, *map(without_secret, sys.orig_argv[1:])]
    with atomic_write(os.path.join(directory, FILE), private=True) as file:
        json.dump({"command": command, "directory": os.getcwd()}, file, indent=2)


def has_command(directory: str) -> bool:
    """Return whether a run has saved its command line in this directory."""
    return os.path.isfile(os.path.join(directory, FILE))


def resume_arguments(directory: str, changes: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the command that resumes the run in `directory`, and its working directory.

    Args:
        directory: The run's directory.
        changes: Settings to change, key=value.

    Raises:
        ConfigError: No saved command is there, or it lacks a secret that `changes` does not give.
    """
    path = os.path.join(directory, FILE)
    try:
        with open(path, encoding="utf-8") as f:
            saved = json.load(f)
        command, working_directory = saved["command"], saved["directory"]
        if not (command and all(isinstance(word, str) for word in [*command, working_directory])):
            raise ValueError("its command is no list of words")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{directory}: no {FILE} of a run of `python -m hybridrl.main_ppo` is there ({error}), nor the journal of "
            "a submitted job; name a run's directory: trainer.default_local_dir, checkpoints/PROJECT/EXPERIMENT, or "
            "the directory given to submit(journal=...)"
        ) from error
    new = ["trainer.resume_mode=auto", *changes]
    replaced = {word.partition("=")[0] for word in new} | {"trainer.resume_from_path"}
    kept = [word for word in command if word.partition("=")[0] not in replaced]
    if missing := [word.partition("=")[0] for word in kept if word.endswith(f"={HIDDEN}")]:
        raise ConfigError(
            f"{path}: has no value of {', '.join(missing)}, because secrets are not saved; add it to this command, as "
            f"in: hybridrl job resume {directory} {missing[0]}=VALUE"
        )
    return [*kept, *new], working_directory


def resume_run(directory: str, changes: Sequence[str] = ()) -> None:
    """Replace this process by the command that resumes the run in `directory`. Does not return."""
    command, working_directory = resume_arguments(directory, changes)
    sys.stdout.flush()
    try:
        os.chdir(working_directory)
        os.execv(command[0], command)
    except OSError as error:
        raise ConfigError(
            f"{os.path.join(directory, FILE)}: {command[0]} cannot be started in {working_directory} "
            f"({error.strerror}); start the program again yourself, with trainer.resume_mode=auto"
        ) from error
