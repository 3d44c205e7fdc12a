"""Identity of a run: hashes of its training data and its model, part of every checkpoint."""

import glob
import hashlib
import os
from collections.abc import Sequence

from hybridrl.config import PPOConfig, SupervisedConfig

FINGERPRINT_KEY = "identity"  # in a checkpoint's trainer.json
MAX_FULL_HASH_BYTES = 64 * 1024**2  # up to this size, the whole file is hashed
# Of a larger file, samples at even distances: hashing a whole model would cost minutes at every start.
NUM_SAMPLES, SAMPLE_BYTES = 16, 1024**2
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")


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
