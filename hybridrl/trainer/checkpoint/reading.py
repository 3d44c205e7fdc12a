"""Read checkpoints: verify one, find the one to resume from, and decide whether a run may resume from it.

A run may resume with the same data and the same model; changed settings are logged. The trainers call this in the
driver when there is a checkpoint; `hybridrl export`, `hybridrl serve` and the page read settings.
"""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Collection, Iterator
from typing import Any

import yaml

from hybridrl.config import PPOConfig, SupervisedConfig, to_yaml
from hybridrl.config.introspection import flatten, load_plain_yaml, value_text
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import CheckpointError, ConfigError, reason_of
from hybridrl.trainer.checkpoint.fingerprint import FINGERPRINT_KEY, run_fingerprint
from hybridrl.trainer.checkpoint.store import (
    CONFIG,
    MANIFEST,
    TRAINER_STATE,
    WORKING_DIRECTORY,
    CheckpointStore,
    file_sha256,
    has_engine_state,
    read_json,
)

logger = logging.getLogger(__name__)
RESTORE_HINT = "restore it, or remove the whole checkpoint: trainer.resume_mode=auto resumes from the one before"
STATE_KINDS = {"global_steps": int, "identity": dict, "prompts": dict, "ahead": list, WORKING_DIRECTORY: str}
"""What readers of `trainer.json` rely on; the trainer's parts check their own states."""
SHAPE_SETTINGS = {"lora_rank", "target_modules"}  # a checkpoint fits no other value
RESUME_SETTINGS = {"trainer.resume_mode", "trainer.resume_from_path"}  # a resumed run has to change them


def verify_manifest(path: str) -> int:
    """Verify sizes and hashes of the checkpoint at `path`, and that its driver's state is one; return its step.

    Raises:
        CheckpointError: A file is missing, changed or no part of a checkpoint; the message names it.
    """
    manifest_path = os.path.join(path, MANIFEST)
    if not os.path.isfile(manifest_path):
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}; give a global_step_N directory, or resume_mode=disable"
        )
    step, files = _read_manifest(manifest_path)
    if not has_engine_state(os.path.basename(name) for name in files):
        raise CheckpointError(f"checkpoint {path} holds no engine state; {RESTORE_HINT}")
    for name, (size, sha256) in files.items():
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            raise CheckpointError(f"checkpoint {path} lacks {name}; {RESTORE_HINT}")
        if os.path.getsize(file) != size or file_sha256(file) != sha256:
            raise CheckpointError(f"{name} in checkpoint {path} is damaged; {RESTORE_HINT}")
    _check_driver_state(path, files, step)
    return step


def _read_manifest(path: str) -> tuple[int, dict[str, tuple[int, str]]]:
    """Return the step, and file -> (bytes, SHA-256); raise CheckpointError if the manifest is damaged."""
    with damage_named(path):
        manifest = read_json(path)
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        return int(manifest["step"]), files


def _check_driver_state(path: str, files: Collection[str], step: int) -> None:
    """Raise CheckpointError unless the driver's files can be read, those of the manifest that there are."""
    if CONFIG in files:
        read_settings(path)
    if TRAINER_STATE in files and (found := read_trainer_state(path)["global_steps"]) != step:
        raise CheckpointError(f"{path}: {TRAINER_STATE} is of step {found}, {MANIFEST} of step {step}; {RESTORE_HINT}")


def find_resume_checkpoint(store: CheckpointStore, config: TrainerConfig) -> str | None:
    """Return the verified checkpoint to resume from, or None for a new run (`trainer.resume_mode`).

    With resume_mode=auto it is the newest one that verifies. Newer ones that do not are renamed, and that is logged.

    Raises:
        CheckpointError: The checkpoint is damaged, or with resume_mode=auto all of them are.
        ConfigError: This run would save among later checkpoints of another run, which could then be mistaken for its
            own.
    """
    if config.resume_mode == "auto":
        return _newest_valid(store)
    found = config.resume_from_path if config.resume_mode == "resume_path" else None
    step = 0 if found is None else _verified_step(found)
    later = [other for other in store.steps() if other > step]
    if later and config.save_freq > 0 and not config.val_only:
        here = "trainer.resume_mode=disable" if found is None else f"trainer.resume_from_path={found}"
        raise ConfigError(
            f"{here}: {store.root} holds checkpoints of another run's later steps, the newest of step {later[-1]}; "
            "set trainer.default_local_dir or trainer.experiment_name to a new value, or remove them"
        )
    return found


def _newest_valid(store: CheckpointStore) -> str | None:
    """Return the newest checkpoint that verifies, None if there is none, and rename newer ones."""
    damaged: dict[str, CheckpointError] = {}
    for path in map(store.path, reversed(store.steps())):
        try:
            _verified_step(path)
        except CheckpointError as error:
            damaged[path] = error
            continue
        for other, problem in damaged.items():
            logger.warning("%s; it is now %s, and the run resumes from %s", problem, _set_aside(other), path)
        return path
    if damaged:
        raise next(iter(damaged.values()))  # the newest one's
    return None


def _set_aside(path: str) -> str:
    """Rename a damaged checkpoint, so that this run can commit its step again; return the new path."""
    names = itertools.chain([f"{path}.damaged"], (f"{path}.damaged.{number}" for number in itertools.count(2)))
    free = next(name for name in names if not os.path.exists(name))
    os.rename(path, free)
    return free


def _verified_step(path: str) -> int:
    """Verify the checkpoint at `path`, and return its step; see `verify_manifest`."""
    manifest = os.path.join(path, MANIFEST)
    return _verify_once(path, os.stat(manifest).st_mtime_ns if os.path.isfile(manifest) else 0)


@functools.cache
def _verify_once(path: str, changed_at: int) -> int:
    """Verify the checkpoint at `path`, once per process and content: hashing a large one takes minutes."""
    return verify_manifest(path)


def read_trainer_state(path: str) -> dict[str, Any]:
    """Return the driver's JSON state in the checkpoint at `path`.

    Raises:
        CheckpointError: It is missing, damaged, or no state of a trainer.
    """
    file = os.path.join(path, TRAINER_STATE)
    with damage_named(file):
        state = read_json(file)
        wrong = [key for key, kind in STATE_KINDS.items() if key in state and not isinstance(state[key], kind)]
        if wrong or state["global_steps"] < 0:
            raise ValueError(f"{wrong[0] if wrong else 'global_steps'} is no value of a trainer's state")
    return state


def read_settings(path: str) -> dict[str, Any]:
    """Return the settings of the run that made the checkpoint at `path`, as nested dictionaries.

    Raises:
        CheckpointError: They are missing, damaged, or no mapping.
    """
    file = os.path.join(path, CONFIG)
    with damage_named(file), open(file, encoding="utf-8") as f:
        settings = load_plain_yaml(f)
        if not isinstance(settings, dict):
            raise TypeError(f"a {type(settings).__name__}, not a mapping of settings")
    return settings


@contextlib.contextmanager
def damage_named(file: str) -> Iterator[None]:
    """Raise a CheckpointError with the file's name for whatever reading it raises."""
    try:
        if os.path.exists(file) and not os.path.isfile(file):
            raise OSError("no file")  # to read from a pipe would wait
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError) as error:
        reason = reason_of(error)
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {reason:.200}); {RESTORE_HINT}") from error


def check_compatible(path: str, config: PPOConfig | SupervisedConfig) -> None:
    """Check that a run with these settings may resume from the checkpoint at `path`; log changed settings.

    Raises:
        CheckpointError: The data differ (the saved position would mean nothing), or the model or its adapters do (they
            could not be loaded).
    """
    saved = read_trainer_state(path).get(FINGERPRINT_KEY, {})
    for key, value in run_fingerprint(config).items():
        if saved.get(key, value) != value:
            raise CheckpointError(
                f"{path} was made with another {key}: its content has changed. Use the original, or start a new run: "
                "change trainer.experiment_name or trainer.default_local_dir"
            )
    changed = changed_settings(path, config)
    shapes = [text for text in changed if text.partition(" ")[0].rpartition(".")[2] in SHAPE_SETTINGS]
    if shapes:
        raise CheckpointError(
            f"{path} was made with other adapters: {', '.join(shapes)}. Its weights have other shapes; set the old "
            "values, or start a new run from `hybridrl export`: change trainer.experiment_name"
        )
    if changed:
        logger.info("settings that differ from the checkpoint: %s", ", ".join(changed))


def read_complete_state(path: str) -> dict[str, Any]:
    """Return the driver's state in the checkpoint at `path`, with what older versions did not write."""
    state = read_trainer_state(path)
    num_drawn = state["global_steps"] + len(state.get("ahead", []))
    return {"prompts": {"num_drawn": num_drawn}} | state


def changed_settings(path: str, config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return "key old -> new" for every setting that differs from the checkpoint at `path`."""
    old = dict(flatten(read_settings(path)))
    new = dict(flatten(yaml.safe_load(to_yaml(config, hide_secrets=True))))
    keys = [key for key in [*new, *(key for key in old if key not in new)] if key not in RESUME_SETTINGS]
    return [f"{key} {_text(old, key)} -> {_text(new, key)}" for key in keys if _text(old, key) != _text(new, key)]


def _text(settings: dict[str, Any], key: str) -> str:
    return value_text(settings[key]) if key in settings else "(none)"
