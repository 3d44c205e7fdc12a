"""The settings of a run, and which of them differ from the defaults.

A run with jsonl in trainer.logger writes them to `config.json`; of an older run those of its newest checkpoint are
read, or the words of its command line.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import yaml

from hybridrl.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from hybridrl.config.introspection import flatten, keys, load_plain_yaml
from hybridrl.driver.resume_command import FILE as COMMAND_FILE
from hybridrl.trainer.checkpoint.store import CONFIG, STEP_NAME
from hybridrl.trainer.run.tracking import SETTINGS_FILE
from hybridrl.view.readers.storage import Folder, parsed

SCHEMAS: tuple[type, ...] = (PPOConfig, SFTConfig, DPOConfig, RMConfig)
SAMPLE_SETTINGS = {"rollout": "trainer.rollout_data_dir", "validation": "trainer.validation_data_dir"}
SAMPLE_FOLDERS = {"rollout": "rollouts", "validation": "validation"}  # looked for if a run's settings are not there


class RunSettings:
    """The settings of one run, read again when their file changes."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._seen: tuple[Any, ...] | None = None
        self._values: dict[str, Any] = {}
        self.source = ""

    def values(self) -> dict[str, Any]:
        """Return dotted name -> value of every known setting of the run."""
        seen = tuple(self._folder.stat(name) for name in (SETTINGS_FILE, COMMAND_FILE))
        if seen != self._seen:
            self._seen = seen
            self.source, self._values = self._read()
        return self._values

    def _read(self) -> tuple[str, dict[str, Any]]:
        if (found := self._json(SETTINGS_FILE)) is not None:
            return SETTINGS_FILE, dict(flatten(found))
        steps = sorted((int(step[1]), name) for name in self._folder.names() if (step := STEP_NAME.fullmatch(name)))
        for _, name in reversed(steps):
            if (saved := _yaml(self._folder.below(name), CONFIG)) is not None:
                return f"{name}/{CONFIG}", dict(flatten(saved))
        return COMMAND_FILE, _values_of_words(self.command())

    def command(self) -> list[str]:
        """Return the words of the program's command line; none if it was not saved."""
        saved = (self._json(COMMAND_FILE) or {}).get("command")
        return [str(word) for word in saved] if isinstance(saved, list) else []

    def _json(self, name: str) -> dict[str, Any] | None:
        try:
            return parsed(self._folder.read(name))
        except OSError:
            return None

    def total_steps(self) -> int | None:
        """Return the steps of the whole run, if its settings say so."""
        found = self.values().get("trainer.total_training_steps")
        return found if isinstance(found, int) and found > 0 else None

    def table(self) -> dict[str, Any]:
        """Return every setting with value, default, and whether they differ; and where it was read."""
        values = self.values()
        defaults = _defaults(values)
        rows = [
            {
                "name": name,
                "value": _text(value),
                "default": _text(defaults[name]) if name in defaults else None,
                "differs": name not in defaults or (value != defaults[name] and _text(value) != _text(defaults[name])),
            }
            for name, value in sorted(values.items())
        ]
        return {"source": self.source, "settings": rows, "command": self.command()}

    def sample_folder(self, kind: str) -> Folder:
        """Return where the run wrote samples of this kind: where its settings say, or in its own directory."""
        named = self.values().get(SAMPLE_SETTINGS[kind])
        default = self._folder.below(SAMPLE_FOLDERS[kind])
        if not isinstance(named, str) or not named:
            return default
        started_in = (self._json(COMMAND_FILE) or {}).get("directory")
        if "://" not in named and isinstance(started_in, str):
            named = os.path.join(started_in, named)
        moved = self._folder.below(named.rstrip("/").rsplit("/", 1)[-1])  # the run was copied with its samples
        if moved.exists() or not self._may_follow(named):
            return moved if moved.exists() else default
        return Folder(named) if Folder(named).exists() else default

    def _may_follow(self, named: str) -> bool:
        """Return whether a foreign run's settings may lead there.

        From a local run to no URL, which would be asked for. From a URL to what is beside the run only.
        """
        if self._folder.is_local:
            return ":/" not in named and "::" not in named
        return named.startswith(self._folder.url.rpartition("/")[0] + "/") and ".." not in named


def _defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the schema that has most of these names."""
    schema = max(SCHEMAS, key=lambda schema: len(keys(schema).keys() & values.keys()))
    return {name: spec.default for name, spec in keys(schema).items()}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


def _values_of_words(words: list[str]) -> dict[str, Any]:
    pairs = (word.lstrip("+").partition("=") for word in words if "=" in word and not word.startswith("-"))
    return {name: _plain(text) for name, _, text in pairs}


def _plain(text: str) -> Any:
    try:
        return load_plain_yaml(text)
    except yaml.YAMLError:
        return text


def _yaml(folder: Folder, name: str) -> dict[str, Any] | None:
    try:
        found = load_plain_yaml(folder.read(name))
    except (OSError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None
