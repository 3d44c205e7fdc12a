"""Loading a tokenizer, with an error a person can act on."""

import os
from typing import Any

from hybridrl.errors import ConfigError

PROBE_TIMEOUT_S = 10.0  # for one question to the hub; its client would ask five times, ever slower


def load_tokenizer(path: str, *, key: str, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face tokenizer of a model directory or name, padding on the left. key: the setting that holds
    `path`.

    Raises ConfigError naming key and path, for a mistyped directory at once.
    """
    from transformers import AutoTokenizer

    if not os.path.isdir(path):
        _check_is_on_the_hub(path, key=key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{key}={path}: no tokenizer can be loaded from it ({reason}); give a directory with model and "
            "tokenizer, as save_pretrained writes them, or a name of the Hugging Face hub"
        ) from error
    tokenizer.padding_side = "left"
    return tokenizer


def _check_is_on_the_hub(name: str, *, key: str) -> None:
    """Raise ConfigError unless the hub, or its cache on this machine, has a model of this name."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # no root is common to "no such model", "not a name", "no network" and "not allowed"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{key}={name}: there is no such directory, and as a name of the Hugging Face hub it cannot be "
            f"had ({reason})"
        ) from error


def pad_token_id(tokenizer: Any) -> int:
    """Return the id that fills unused places: the tokenizer's own, or its end of sequence, since masks say what is
    padding.
    """
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
