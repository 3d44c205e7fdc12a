"""Loading a tokenizer, with an error a person can act on."""

from typing import Any

from hybridrl.errors import ConfigError


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Return the Hugging Face tokenizer of a model directory or name, padding on the left. Raises ConfigError naming the path."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"actor_rollout_ref.model.path={path}: no tokenizer can be loaded from it ({reason}); give a directory with model and "
            "tokenizer, as save_pretrained writes them, or a name of the Hugging Face hub"
        ) from error
    tokenizer.padding_side = "left"
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """Return the id that fills unused places: the tokenizer's own, or its end of sequence, since masks say what is padding."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
