"""verl's published commands, from tests/config/verl_commands.yaml."""

from pathlib import Path
from typing import Any

import yaml

_FILE = yaml.safe_load((Path(__file__).parents[1] / "config" / "verl_commands.yaml").read_text())
COMMANDS: list[dict[str, Any]] = _FILE["commands"]


def command_words(command: dict[str, Any], **names: str) -> list[str]:
    """Return flags and settings of a command. names: words that stand for files of the user."""
    listed = [word for group in command.get("groups", []) for word in _FILE["groups"][group]]
    words = {}
    for word in [*listed, *command.get("words", [])]:
        key, _, value = word.partition("=")
        words[key.lstrip("+")] = f"{key}={names.get(value, value)}"
    return [*command.get("flags", []), *words.values()]
