"""Build Hugging Face models for engines: config, class, weights, new heads, decoder blocks.

Both engines call it in worker processes. Sharding is in `fsdp/` and `megatron/`.
"""

import contextlib
import difflib
import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridrl.errors import CheckpointError, ConfigError, model_errors, reason_of
from hybridrl.workers.engine.attention.layer_kinds import use_exact_attention
from hybridrl.workers.engine.base import EngineSetup

logger = logging.getLogger(__name__)

AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "value": "AutoModelForTokenClassification",
    "score": "AutoModelForSequenceClassification",
}
IMAGE_AUTO_CLASS = "AutoModelForImageTextToText"
IMAGE_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Families with a vision tower. One enters when a test compares it with plain transformers."""
TEXT_OR_IMAGES, TEXT_ONLY = ("qwen3_5", "qwen3_5_moe"), "language_model_only"
"""Families whose checkpoints always have a tower, and the entry that says whether it runs.

The entry of `override_config` is vLLM's, and published checkpoints have it. Unless it is false, the model is of text.
"""
KERNEL = "attn_implementation"  # an entry of `override_config` that no config has
HEAD_STD = 0.02  # of a new value head, as transformers draws it
NO_SCORE_HEAD = "; it is not a trained reward model: set reward_model.model.path to a model with a score head"


def overridden_config(path: str, override_config: dict, *, trust_remote_code: bool) -> Any:
    """Return the `PretrainedConfig` at `path` with the overrides applied.

    Raises:
        ConfigError: The model cannot be read, or has no such entry.
    """
    from transformers import AutoConfig

    with model_errors(path, "cannot read it as a model"):
        found = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    choose_tower(found, override_config)
    _override(found, without_kernel(override_config), key="model.override_config")
    return found


def without_kernel(override_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that describe the model: `attn_implementation` selects a kernel of transformers."""
    return {name: value for name, value in override_config.items() if name != KERNEL}


def choose_tower(found: Any, override_config: Mapping[str, Any]) -> None:
    """Set whether a model of `TEXT_OR_IMAGES` is one of text, in its `PretrainedConfig`."""
    if found.model_type in TEXT_OR_IMAGES:
        found.language_model_only = bool(override_config.get(TEXT_ONLY, True))


def overrides_for(path: str, policy: str | None, override_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy's overrides for a model; for another model, the tower's only."""
    is_same = path == policy
    return {name: value for name, value in override_config.items() if is_same or name == TEXT_ONLY}


def vocabulary_size(path: str, *, trust_remote_code: bool) -> int:
    """Return the number of outputs of the causal language model at `path`.

    Often more than its tokenizer has tokens.
    """
    return int(overridden_config(path, {}, trust_remote_code=trust_remote_code).get_text_config().vocab_size)


def reads_images(found: Any) -> bool:
    """Return whether a `PretrainedConfig` is that of a model whose vision tower engines run."""
    return found.model_type in IMAGE_MODELS and not getattr(found, TEXT_ONLY, False)


def hf_config(config: EngineSetup) -> Any:
    """Return the model's `PretrainedConfig` as the engine runs it.

    Raises:
        ConfigError: The model cannot be read, or has no overridden entry.
    """
    found = overridden_config(config.path, config.override_config, trust_remote_code=config.trust_remote_code)
    if attention := config.override_config.get("attn_implementation", _attention(config)):
        found._attn_implementation = attention
    if config.kind != "causal_lm":
        found.num_labels = 1
    if config.kind == "score" and found.get_text_config().pad_token_id is None:
        found.get_text_config().pad_token_id = 0  # transformers refuses a batch without one; the engine does not use it
    return found


def make_scoring(found: Any, *, pad_token_id: int | None) -> None:
    """Make a `PretrainedConfig` that of a sequence classifier with one label, in place, for an export.

    transformers finds a row's last token by the padding token and refuses a batch without one.
    """
    from transformers import AutoModelForSequenceClassification

    found.num_labels = 1
    classifier: Any = AutoModelForSequenceClassification._model_mapping[type(found)]
    found.architectures = [classifier.__name__]
    if found.get_text_config().pad_token_id is None:
        found.get_text_config().pad_token_id = pad_token_id


def _attention(config: EngineSetup) -> str | None:
    """Choose flash attention where it can run.

    None leaves the choice to transformers: SDPA, or eager for models without it.
    """
    from transformers.utils import is_flash_attn_2_available

    usable = config.device == "cuda" and config.compute_dtype == torch.bfloat16 and is_flash_attn_2_available()
    return "flash_attention_2" if usable else None


def _override(target: Any, overrides: dict, *, key: str) -> None:
    for name, value in overrides.items():
        if not hasattr(target, name):
            close = difflib.get_close_matches(name, [*target.to_dict(), KERNEL], n=1)
            hint = f"; the nearest is {close[0]}" if close else "; leave it out"
            raise ConfigError(f"{key}.{name}={value!r}: {type(target).__name__} has no such entry{hint}")
        inner = getattr(target, name)
        if isinstance(value, dict) and hasattr(inner, "to_dict"):
            _override(inner, value, key=f"{key}.{name}")
            continue
        try:
            setattr(target, name, value)
        except Exception as error:  # transformers validates some entries, with an exception class of its own
            reason = reason_of(error)
            raise ConfigError(f"{key}.{name}={value!r}: {type(target).__name__} refuses it: {reason}") from error


def load_model(config: EngineSetup, found: Any, *, dtype: torch.dtype) -> nn.Module:
    """Return the whole model on the CPU, in eval mode and hence without dropout.

    A value head that the checkpoint lacks is drawn from `config.seed`, and a score head if it is to be trained.

    Raises:
        CheckpointError: The checkpoint lacks anything else, or has it in another shape. Scores of an untrained head
            would be noise.
    """
    with torch.random.fork_rng(devices=[]), _quiet_transformers(), model_errors(config.path, "cannot load it"):
        torch.manual_seed(config.seed)
        model, report = _auto_class(config, found).from_pretrained(
            config.path,
            config=found,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' own error does not say which; `_check_shapes` does
        )
    _check_shapes(report["mismatched_keys"], config.path)
    missing = sorted(report["missing_keys"])
    may_be_new = config.kind == "value" or (config.kind == "score" and config.optim is not None)
    needed = [name for name in missing if not may_be_new or name.startswith(f"{model.base_model_prefix}.")]
    if needed:
        what = f"{config.path} lacks {len(needed)} weights of {type(model).__name__}: {', '.join(needed[:5])}"
        raise CheckpointError(what + (NO_SCORE_HEAD if config.kind == "score" else ""))
    if missing:
        logger.info(
            "%s has no %s head: created %s with seed %d.", config.path, config.kind, ", ".join(missing), config.seed
        )
    return _finished(model, config)


def _check_shapes(mismatched: Collection[tuple[str, Any, Any]], path: str) -> None:
    """Raise CheckpointError if tensors of the files have other shapes than config.json says."""
    if not mismatched:
        return
    name, stored, expected = sorted(mismatched, key=lambda entry: entry[0])[0]
    others = f" (and {len(mismatched) - 1} others)" if len(mismatched) > 1 else ""
    raise CheckpointError(
        f"{path}: {name} is {tuple(stored)} in the files, but config.json makes it {tuple(expected)}{others}; use the "
        "config.json that was saved with these weights, and check model.override_config"
    )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and its table of new weights, which `load_model` logs in one line."""
    from transformers.utils import logging as log

    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()


def empty_model(config: EngineSetup, found: Any, *, dtype: torch.dtype) -> nn.Module:
    """Return the model on the meta device: structure without memory."""
    with torch.device("meta"), model_errors(config.path, "cannot build it"):
        model = _auto_class(config, found).from_config(found, dtype=dtype, trust_remote_code=config.trust_remote_code)
    return _finished(model, config)


def scalar_heads(model: nn.Module, *, kind: str) -> list[nn.Linear]:
    """Return the layers that turn hidden states into values or scores.

    They compute in float32 in every dtype of the model. That costs nothing for one output, while bfloat16, with its 2
    to 3 digits, would give close answers the same score.
    """
    if kind == "causal_lm":
        return []
    parts = model.named_children()
    return [part for name, part in parts if name != model.base_model_prefix and isinstance(part, nn.Linear)]


def _finished(model: nn.Module, config: EngineSetup) -> nn.Module:
    if config.kind == "value" and reads_images(model.config):
        _replace_head(model, seed=config.seed)
    use_exact_attention(model, config.override_config.get("attn_implementation"))
    for head in scalar_heads(model, kind=config.kind):
        head.float()
    return model.eval()


def _replace_head(model: Any, *, seed: int) -> None:
    """Put a head of one value per token in place of that of the vocabulary, in place.

    transformers has such a head for models of text only.
    """
    like = next(model.parameters())
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=like.dtype, device=like.device)
    if not like.is_meta:
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(head.weight, std=HEAD_STD, generator=generator)
        nn.init.zeros_(head.bias)
    model.lm_head = head


def _auto_class(config: EngineSetup, found: Any) -> Any:
    if config.kind == "score" and reads_images(found):
        raise ConfigError(f"{config.path}: a model that reads images computes no {config.kind}; use a model of text")
    return auto_class(found, kind=config.kind)


def auto_class(found: Any, *, kind: str = "causal_lm") -> Any:
    """Return the class of transformers that loads models of this config."""
    import transformers

    return getattr(transformers, IMAGE_AUTO_CLASS if reads_images(found) else AUTO_CLASSES[kind])


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated transformer blocks in order: the unit of sharding and recomputation.

    These are the modules of the class names that a model declares unsplittable, or else its longest ModuleList.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    declared = [module for module in model.modules() if type(module).__name__ in names]
    if declared:
        return declared
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def recompute_activations(blocks: list[nn.Module]) -> None:
    """Make each block keep only its input and recompute its activations in the backward pass.

    transformers' own switch acts in train mode only. Engines stay in eval mode, so that forward and training agree.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
