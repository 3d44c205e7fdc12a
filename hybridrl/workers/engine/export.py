"""Export a model in the Hugging Face format: safetensors, config, tokenizer.

Workers and `hybridrl.cli` call it. It writes no optimizer state.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.workers.engine import hf_model
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.model_files import model_directory, safetensors_files
from hybridrl.workers.engine.peft_format import peft_name, write_adapter

COPIED = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
"""Files of a model that training does not change: how it generates, and how its images are processed."""


def export_hf(
    weights: Iterable[tuple[str, torch.Tensor]],
    directory: str,
    *,
    model: ModelConfig,
    rank: int = 0,
    kind: str = "causal_lm",
) -> None:
    """Write the weights, the config with its overrides, and the tokenizer of `model` into `directory`.

    Collective in `weights`: every rank iterates, rank 0 writes. Rank 0 then reads the files back and compares every
    name, shape and value. The export appears by a rename, so a failed one leaves nothing behind. What the model's
    directory has beside the trained model (heads that predict several tokens, a vision tower) is copied.

    Args:
        weights: Full tensors under Hugging Face names.
        directory: New or empty directory.
        model: Settings of the model.
        rank: Rank of this process.
        kind: What the model computes; "score" makes it a sequence classifier with one label.

    Raises:
        CheckpointError: The files differ from the weights.
        ConfigError: `directory` is not new or empty.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights if rank == 0}
    if rank != 0:
        return
    tensors = _as_on_disk(tensors, model, kind=kind)
    with _new_directory(directory) as temporary:
        _write(tensors, temporary, model=model, kind=kind)
        _verify(tensors, temporary)


@contextlib.contextmanager
def _new_directory(directory: str) -> Iterator[str]:
    """Yield a temporary directory that becomes `directory` if the block succeeds."""
    check_new_directory(directory)
    parent = os.path.dirname(os.path.abspath(directory))
    temporary = tempfile.mkdtemp(prefix=f"{os.path.basename(directory)}.partial-", dir=parent)
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        os.rename(temporary, directory)  # replaces an empty directory, and nothing else
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_adapter(
    weights: Iterable[tuple[str, torch.Tensor]], directory: str, *, model: ModelConfig, lora: LoRA | None, rank: int = 0
) -> None:
    """Write adapters in peft's format into `directory`, without the model that they change.

    Collective in `weights`, verified and renamed as in `export_hf`.

    Args:
        weights: `{layer}.lora_A` and `{layer}.lora_B`, without scale.
        directory: New or empty directory.
        model: Settings of the model.
        lora: Rank and alpha. None: the model has no adapters.
        rank: Rank of this process.

    Raises:
        CheckpointError: The files differ from the weights.
        ConfigError: There are no adapters, or `directory` is not new or empty.
    """
    if lora is None:
        raise ConfigError("the policy was trained without adapters (model.lora_rank=0); export the whole model instead")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights if rank == 0}
    if rank != 0:
        return
    with _new_directory(directory) as temporary:
        write_adapter(tensors, temporary, lora=lora, base=model.path or "")
        _verify({peft_name(name): tensor for name, tensor in tensors.items()}, temporary)


def check_new_directory(directory: str) -> None:
    """Raise ConfigError unless `directory` is new or empty and can be made: an export replaces nothing."""
    if os.path.exists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise ConfigError(f"{directory} exists and is not an empty directory; export to a new one")
    parent = os.path.dirname(os.path.abspath(directory))
    try:
        os.makedirs(parent, exist_ok=True)
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error.strerror}); export to another directory") from error


def _as_on_disk(tensors: dict[str, torch.Tensor], model: ModelConfig, *, kind: str) -> dict[str, torch.Tensor]:
    """Return weights as in the model's files, with those that the trained model lacks; empties `tensors`.

    Names and shapes differ where transformers joins the experts of a layer, or renames weights.
    """
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion

    assert model.path is not None, "the weights to export were loaded from this path"
    config = hf_model.overridden_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    auto = hf_model.auto_class(config, kind=kind)
    if type(config) not in auto._model_mapping:
        return tensors
    files = [safe_open(file, framework="pt") for file in safetensors_files(model.path)]
    found = {name: file for file in files for name in file.keys()}
    with torch.device("meta"):
        trained = auto.from_config(config)
    trained._weight_conversions = _used_conversions(trained, found)
    views = revert_weight_conversion(trained, tensors)
    tensors.clear()
    own = {name: views.pop(name).clone() for name in [*views]}
    patterns = trained._keys_to_ignore_on_load_unexpected if kind == "causal_lm" else None
    left_out = [re.compile(pattern) for pattern in patterns or ()]
    untrained = [name for name in found if name not in own and any(pattern.search(name) for pattern in left_out)]
    return own | {name: found[name].get_tensor(name) for name in untrained}


def _used_conversions(model: Any, on_disk: Iterable[str]) -> list[Any]:
    """Return the conversions of transformers that act when it loads tensors of these names into the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in known if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in known if isinstance(conversion, WeightConverter)]
    for name in on_disk:
        rename_source_key(name, renamings, converters)
    return [conversion for conversion in known if conversion.was_used()]


def _write(tensors: dict[str, torch.Tensor], directory: str, *, model: ModelConfig, kind: str) -> None:
    from transformers import AutoTokenizer

    assert model.path is not None, "the weights to export were loaded from this path"
    config = hf_model.overridden_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    if hasattr(config, hf_model.TEXT_ONLY):
        config.language_model_only = False  # the export has the tower
    config.dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if kind == "score":
        hf_model.make_scoring(config, pad_token_id=tokenizer.pad_token_id)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    source = model_directory(model.path)
    code = [file.name for file in source.glob("*.py")] if model.trust_remote_code else []
    for name in (*COPIED, *code):
        if (source / name).exists():
            shutil.copy(source / name, directory)
    _save_shards(tensors, directory)


def _save_shards(tensors: dict[str, torch.Tensor], directory: str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(tensors)
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, os.path.join(directory, filename), metadata={"format": "pt"})
        os.chmod(os.path.join(directory, filename), 0o644)  # save_file makes it readable for its owner only
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        with open(os.path.join(directory, "model.safetensors.index.json"), "w") as f:
            json.dump(index, f, indent=2)


def _verify(tensors: dict[str, torch.Tensor], directory: str) -> None:
    from safetensors import safe_open

    missing = dict(tensors)
    for filename in sorted(f for f in os.listdir(directory) if f.endswith(".safetensors")):
        with safe_open(os.path.join(directory, filename), framework="pt") as shard:
            for name in shard.keys():
                if not torch.equal(shard.get_tensor(name), missing.pop(name)):
                    raise CheckpointError(
                        f"export to {directory}: {name} in {filename} differs from the model; check the "
                        "disk and export again"
                    )
    if missing:
        raise CheckpointError(
            f"export to {directory}: {len(missing)} tensors are missing, first {next(iter(missing))}; export again"
        )
