"""Which token ids end a response and fill its rest, read from a model's tokenizer and generation config."""

from dataclasses import dataclass

from hybridrl.errors import ConfigError


@dataclass(frozen=True)
class SpecialTokens:
    eos_ids: tuple[int, ...]
    pad_id: int


def load_special_tokens(path: str, *, trust_remote_code: bool = False) -> SpecialTokens:
    """Return the ids of a model directory: the tokenizer's end of sequence and every further one its generation config names.

    A tokenizer without a padding token pads with the end of sequence, which is safe because masks say what is padding.
    """
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model without generation_config.json
        listed = None
    listed = [listed] if isinstance(listed, int) else listed or []
    eos_ids = tuple(dict.fromkeys([*([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []), *listed]))
    if not eos_ids:
        raise ConfigError(f"the tokenizer of {path} has no end-of-sequence token; set eos_token in its tokenizer_config.json")
    return SpecialTokens(eos_ids, eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
