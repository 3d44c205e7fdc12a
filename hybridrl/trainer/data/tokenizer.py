"""Load a tokenizer, with an error that names the setting and the fix.

Used by `main_ppo`, `main_sft` and `hybridrl serve`, in the driver.
"""

import glob
import json
import os
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, reason_of

CONFIG_FILE = "config.json"  # of a model in Hugging Face's format
CHECKPOINT_FILE = "manifest.json"  # that every checkpoint has, see trainer/checkpoint/store.py
MAX_LAYERS = 10_000
PROBE_TIMEOUT_S = 10.0  # for one request to the hub; its client would retry five times with growing delays


def load_tokenizer(path: str, *, key: str, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face tokenizer of a model directory or hub name, padding on the left.

    Args:
        path: Directory or name.
        key: Setting that holds `path`, for errors.
        trust_remote_code: Allow the model's own tokenizer code.

    Raises:
        ConfigError: No tokenizer can be loaded; for a mistyped directory without waiting for the hub's client.
    """
    from transformers import AutoTokenizer

    if not os.path.isdir(path):
        _check_on_hub(path, key=key)
    if os.path.isfile(os.path.join(path, CHECKPOINT_FILE)):
        raise ConfigError(f"{key}={path}: this is a checkpoint of a run; {_model_of_checkpoint(path)}")
    _check_layers(path, key=key)
    if (files := glob.glob("*.gguf", root_dir=path)) and not os.path.isfile(os.path.join(path, CONFIG_FILE)):
        raise ConfigError(
            f"{key}={path}: this directory has GGUF files only; name the file: {os.path.join(path, min(files))}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # its code believes the files, so a damaged one may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{key}={path}: no tokenizer can be loaded from it ({reason}); give a directory with model and "
            "tokenizer, as save_pretrained writes them, or a name of the Hugging Face hub"
        ) from error
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():  # transformers made one without files
        raise ConfigError(
            f"{key}={path}: its tokenizer has no vocabulary; a file such as tokenizer.json is missing there. Save the "
            "tokenizer into the same directory (tokenizer.save_pretrained)"
        )
    tokenizer.padding_side = "left"
    return tokenizer


def _model_of_checkpoint(path: str) -> str:
    """Return how to get a model from a checkpoint."""
    model = os.path.join(path, "huggingface")
    if os.path.isdir(model):
        return f"its model is {model}"
    return f"export its model first: hybridrl export {path} DIRECTORY"


def _check_on_hub(name: str, *, key: str) -> None:
    """Raise ConfigError unless the hub, or its cache on this machine, has a model of this name."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=PROBE_TIMEOUT_S)
    # "No such model", "not a name", "no network" and "not allowed" have no common base class.
    except Exception as error:
        raise ConfigError(
            f"{key}={name}: no such directory, and not available as a name of the Hugging Face hub ({reason_of(error)})"
        ) from error


def pad_token_id(tokenizer: Any) -> int:
    """Return the id for padding: the tokenizer's own, else its end of sequence (masks mark the padding)."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def _check_layers(path: str, *, key: str) -> None:
    """Raise ConfigError for more layers than a model has: transformers makes a list of them."""
    try:
        settings = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        inner = settings.get("text_config")
        counts = [found.get("num_hidden_layers") for found in (settings, inner) if isinstance(found, dict)]
    except (OSError, ValueError, AttributeError, RecursionError):  # `check_model` names the mistake
        return
    if too_many := [count for count in counts if isinstance(count, int) and count > MAX_LAYERS]:
        raise ConfigError(
            f"{key}={path}: config.json has num_hidden_layers={too_many[0]}; at most {MAX_LAYERS} are read"
        )
