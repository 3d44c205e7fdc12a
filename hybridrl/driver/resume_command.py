"""The command of a run, kept in the run's directory: `hybridrl job resume` gives it again, and the run goes on from its
last commit.
"""

import json
import os
import sys
from collections.abc import Sequence

from hybridrl.errors import ConfigError

FILE = "command.json"


def note_command(directory: str) -> None:
    """Keep the command of this program in a run's directory."""
    with open(os.path.join(directory, FILE), "w", encoding="utf-8") as f:
        json.dump({"command": [sys.executable, *sys.orig_argv[1:]], "directory": os.getcwd()}, f, indent=2)


def resuming(directory: str, changes: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the command that goes on with the run in `directory`, and where it is to be given. changes: settings,
    key=value.

    Raises ConfigError where no run has kept its command.
    """
    path = os.path.join(directory, FILE)
    try:
        with open(path, encoding="utf-8") as f:
            kept = json.load(f)
        command, where = kept["command"], kept["directory"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{directory}: no run of `python -m hybridrl.main_ppo` has left its {FILE} there ({error}); "
            "name a run's directory, "
            "trainer.default_local_dir or checkpoints/PROJECT/EXPERIMENT"
        ) from error
    new = ["trainer.resume_mode=auto", *changes]
    replaced = {word.partition("=")[0] for word in new} | {"trainer.resume_from_path"}
    return [*(word for word in command if word.partition("=")[0] not in replaced), *new], where


def resume(directory: str, changes: Sequence[str] = ()) -> None:
    """Become the program that goes on with the run in `directory`."""
    command, where = resuming(directory, changes)
    os.chdir(where)
    sys.stdout.flush()
    os.execv(command[0], command)
