"""Check a model's directory before anything starts: its files are whole, and its vocabulary has the tokenizer's ids.

The programs call `check_model` in the driver. It reads headers only, so it takes milliseconds for any size. A name of
the Hugging Face hub is not checked: its files are whole, because the hub's client verifies what it downloads.
"""

import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.hf_model import overridden_config

logger = logging.getLogger(__name__)
LENGTH_BYTES = 8  # of the header's length, at the start of a safetensors file
MAX_HEADER_BYTES = 100 << 20  # as the format has it
INDEX = "model.safetensors.index.json"
HINT = "copy or download the model again"


def check_model(
    path: str,
    *,
    key: str,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> None:
    """Check that a model loads and has an embedding for every token of the tokenizer.

    Args:
        path: Directory, or a name of the Hugging Face hub.
        key: Setting that holds `path`, for errors.
        tokenizer: The tokenizer whose tokens the model gets; None: check the files only.
        trust_remote_code: Allow the model's own configuration code.
        override_config: Entries that replace those of config.json.

    Raises:
        ConfigError: A file is missing or damaged, or the vocabulary is too small.
    """
    if not os.path.isdir(path):
        return
    for problem in file_problems(Path(path)):
        raise ConfigError(f"{key}={path}: {problem}; {HINT}")
    if tokenizer is not None:
        found = overridden_config(path, dict(override_config or {}), trust_remote_code=trust_remote_code)
        _check_vocabulary(tokenizer, getattr(found.get_text_config(), "vocab_size", None), f"{key}={path}")


def model_directory(path: str) -> Path:
    """Return the directory of a model, for a name of the hub the one in its cache."""
    from huggingface_hub import snapshot_download

    return Path(path if os.path.isdir(path) else snapshot_download(path, local_files_only=True))


def safetensors_files(path: str) -> list[Path]:
    """Return the weight files of a model, from its directory or the hub's cache."""
    return sorted(model_directory(path).glob("*.safetensors"))


def file_problems(directory: Path) -> Iterator[str]:
    """Yield what is wrong with the safetensors files of a directory, each with the file's name."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            check_safetensors(file)
        except (OSError, ValueError) as error:
            yield f"{file.name} is damaged: {error}"
    if (directory / INDEX).is_file():
        try:
            needed = set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{INDEX} is damaged: {type(error).__name__}: {error}"
            return
        if missing := sorted(name for name in needed if not (directory / name).is_file()):
            yield f"{len(missing)} of {len(needed)} files of {INDEX} are missing: {', '.join(missing[:3])}"


def check_safetensors(file: Path) -> None:
    """Return if a safetensors file has a valid header, and the length that it says.

    Raises:
        ValueError: The header cannot be read, or the file has another length.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(LENGTH_BYTES))[0] if size >= LENGTH_BYTES else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"its {size} bytes do not hold its header")
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            expected = LENGTH_BYTES + length + end
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("its header cannot be read") from error
    if size != expected:
        raise ValueError(f"it has {size} bytes, but its header says {expected}")
    _check_entries(file)


def _check_entries(file: Path) -> None:
    """Raise ValueError unless the format's own reader takes the header: shapes, types, no overlap."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"its header cannot be read: {error}") from error


def _check_vocabulary(tokenizer: Any, size: int | None, setting: str) -> None:
    """Check the token ids of every prompt; warn about added tokens that only some text would have."""
    if size is None or len(tokenizer) <= size:
        return
    ids = required_ids(tokenizer)
    largest = max(ids, default=-1)
    if largest >= size:
        raise ConfigError(
            f"{setting}: its vocabulary has {size} tokens (vocab_size), but the tokenizer's has {len(tokenizer)}: "
            f"{tokenizer.convert_ids_to_tokens(largest)!r} is number {largest}; take model and tokenizer of the same "
            "model, or resize the embedding (resize_token_embeddings) and save it"
        )
    logger.warning(
        "%s: the tokenizer has %d added tokens beyond the model's vocabulary of %d; a text with one of them fails",
        setting,
        len(tokenizer) - size,
        size,
    )


def required_ids(tokenizer: Any) -> set[int]:
    """Return the token ids that any run needs.

    They are those of the plain vocabulary, of padding and end, and of the chat template.
    """
    added = set(tokenizer.get_added_vocab().values())
    ids = {number for number in tokenizer.get_vocab().values() if number not in added}
    ids |= {number for number in (tokenizer.pad_token_id, tokenizer.eos_token_id) if number is not None}
    if getattr(tokenizer, "chat_template", None):
        try:
            message = [{"role": "user", "content": "a"}]
            ids |= set(
                tokenizer.apply_chat_template(message, tokenize=True, add_generation_prompt=True, return_dict=False)
            )
        except Exception:  # a template may raise anything; the dataset reports it with the row that it rejects
            logger.debug("the chat template rejects a message of the user alone", exc_info=True)
    return ids
