"""Decide whether a run may resume from a checkpoint: same data, same model; changed settings are logged.

Called by the PPO and SFT trainers before they load a checkpoint, in the driver.
"""

import glob
import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import yaml

from hybridrl.config import PPOConfig, SupervisedConfig, to_yaml
from hybridrl.config.introspection import value_text
from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint.store import read_settings, read_trainer_state

logger = logging.getLogger(__name__)
FINGERPRINT_KEY = "identity"  # in a checkpoint's trainer.json
MAX_FULL_HASH_BYTES = 64 * 1024**2  # up to this size, the whole file is hashed
# Of a larger file, samples at even distances: hashing a whole model would cost minutes at every start.
NUM_SAMPLES, SAMPLE_BYTES = 16, 1024**2
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
SHAPE_SETTINGS = {"lora_rank", "target_modules"}  # a checkpoint fits no other value
RESUME_SETTINGS = {"trainer.resume_mode", "trainer.resume_from_path"}  # a resumed run has to change them


def run_fingerprint(config: PPOConfig | SupervisedConfig) -> dict[str, str]:
    """Return setting key -> fingerprint, for the training data and for the model."""
    key, model = (
        ("model", config.model)
        if isinstance(config, SupervisedConfig)
        else ("actor_rollout_ref.model", config.actor_rollout_ref.model)
    )
    found = {f"{key}.path": hash_files([model.path] if model.path else [])}
    if config.data.train_files:  # a run that only validates may have none
        found["data.train_files"] = hash_files(config.data.train_files)
    return found


def hash_files(paths: Sequence[str]) -> str:
    """Return a SHA-256 over the contents of files and model directories, in order.

    A path that is not on this machine (a name on the Hugging Face hub) counts by its name.
    """
    digest = hashlib.sha256()
    for path in paths:
        found = sorted(file for pattern in MODEL_FILES for file in glob.glob(os.path.join(glob.escape(path), pattern)))
        for file in found if os.path.isdir(path) else [path]:
            digest.update(_content(file) if os.path.isfile(file) else path.encode())
    return digest.hexdigest()


def _content(file: str) -> bytes:
    size = os.path.getsize(file)
    with open(file, "rb") as f:
        if size <= MAX_FULL_HASH_BYTES:
            return hashlib.file_digest(f, "sha256").digest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(NUM_SAMPLES):
            f.seek(number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(f.read(SAMPLE_BYTES))
    return digest.digest()


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
    old = _flat(read_settings(path))
    new = _flat(yaml.safe_load(to_yaml(config, hide_secrets=True)))
    keys = [key for key in [*new, *(key for key in old if key not in new)] if key not in RESUME_SETTINGS]
    return [f"{key} {_text(old, key)} -> {_text(new, key)}" for key in keys if _text(old, key) != _text(new, key)]


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def _text(settings: dict[str, Any], key: str) -> str:
    return value_text(settings[key]) if key in settings else "(none)"
