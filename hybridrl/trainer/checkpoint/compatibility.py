"""What a checkpoint was made of, so that a run does not go on with something else unnoticed: its data, its model, its
settings.
"""

import glob
import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import yaml

from hybridrl.config import PPOConfig, SFTConfig, to_yaml
from hybridrl.config.introspection import value_text
from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint.store import CONFIG, read_trainer_state

logger = logging.getLogger(__name__)
IDENTITY = "identity"  # in a checkpoint's trainer.json
WHOLE_BYTES = 64 * 1024**2  # a file up to this size is hashed whole
NUM_SAMPLES, SAMPLE_BYTES = (
    16,
    1024**2,
)  # of a larger one, spread evenly over it: a model must not cost minutes at every start
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
NOT_OF_THE_RUN = {"trainer.resume_mode", "trainer.resume_from_path"}  # settings that a resumed run has to change


def identity(config: PPOConfig | SFTConfig) -> dict[str, str]:
    """Return a fingerprint of the training data and one of the model, by the keys that name them."""
    key, model = (
        ("model", config.model)
        if isinstance(config, SFTConfig)
        else ("actor_rollout_ref.model", config.actor_rollout_ref.model)
    )
    return {
        "data.train_files": fingerprint(config.data.train_files),
        f"{key}.path": fingerprint([model.path] if model.path else []),
    }


def fingerprint(paths: Sequence[str]) -> str:
    """Return a SHA-256 of the contents of files and model directories, in order; what is not here (a hub name) counts
    by its name.
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
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(f, "sha256").digest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(NUM_SAMPLES):
            f.seek(number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(f.read(SAMPLE_BYTES))
    return digest.digest()


def compare_run(path: str, config: PPOConfig | SFTConfig) -> None:
    """Look at what the checkpoint at `path` was made of before a run goes on from it; tell in the log which settings
    are others now.

    Raises CheckpointError for other data (its place in them would mean nothing) and for another model (which would not
    be read).
    """
    saved = read_trainer_state(path).get(IDENTITY, {})
    for key, value in identity(config).items():
        if saved.get(key, value) != value:
            raise CheckpointError(
                f"{path} was made with another {key}: the content has changed. Give what it was made with, "
                "or start a run of its own: "
                "set trainer.experiment_name or trainer.default_local_dir to something new"
            )
    changed = changed_settings(path, config)
    if changed:
        logger.info("settings that differ from the checkpoint: %s", ", ".join(changed))


def changed_settings(path: str, config: PPOConfig | SFTConfig) -> list[str]:
    """Return "key old -> new" for every setting that is not as it was when the checkpoint at `path` was made."""
    with open(os.path.join(path, CONFIG), encoding="utf-8") as f:
        old = _flat(yaml.safe_load(f))
    new = _flat(yaml.safe_load(to_yaml(config)))
    keys = [key for key in [*new, *(key for key in old if key not in new)] if key not in NOT_OF_THE_RUN]
    return [f"{key} {_text(old, key)} -> {_text(new, key)}" for key in keys if _text(old, key) != _text(new, key)]


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def _text(settings: dict[str, Any], key: str) -> str:
    return value_text(settings[key]) if key in settings else "(none)"
