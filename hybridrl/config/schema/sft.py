"""The schema of `python -m hybridrl.main_sft`, and what programs that train one model on fixed data share."""

from dataclasses import dataclass

from hybridrl.config.fields import MAX_SEED, plug, section, setting
from hybridrl.config.plugs import ENGINES
from hybridrl.config.schema.data import FILES, ImageDataConfig
from hybridrl.config.schema.engine import DYNAMIC, MICRO
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.config.schema.workers import FREEZE, OWN_ENGINE, FSDPConfig, MegatronConfig, ModelConfig, OptimConfig


@dataclass(frozen=True)
class SupervisedDataConfig(ImageDataConfig):
    train_files: list[str] = setting([], f"Training rows {FILES}")
    val_files: list[str] = setting([], f"Validation rows {FILES}")
    train_batch_size: int = setting(256, "Rows of the data in one optimizer step.", ge=1)
    micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    use_dynamic_bsz: bool = setting(True, DYNAMIC)
    max_token_len_per_gpu: int = setting(16384, "Token budget of one micro-batch per process, a hard cap.", gt=0)
    train_max_samples: int = setting(-1, "Use only the first rows for training; -1 means all.", ge=-1)
    val_max_samples: int = setting(-1, "Use only the first rows for validation; -1 means all.", ge=-1)
    max_length: int = setting(1024, "Longest sequence in tokens, prompt and response together.", gt=0)
    shuffle: bool = setting(True, "Shuffle the rows, in a new order each epoch.")
    seed: int = setting(1, "Seed of the order.", ge=0, le=MAX_SEED)


@dataclass(frozen=True)
class SFTDataConfig(SupervisedDataConfig):
    messages_key: str = setting("messages", "Column with the conversation: a list of {role, content}.")
    truncation: str = setting(
        "error", "What to do with a longer conversation.", choices=("error", "left", "right", "filter")
    )


@dataclass(frozen=True)
class SupervisedConfig:
    """What main_sft, main_dpo and main_rm have in common.

    They train one model, on rows that are there from the start.
    """

    data: SupervisedDataConfig = section(SupervisedDataConfig, "Rows.")
    model: ModelConfig = section(ModelConfig, "The model.")
    optim: OptimConfig = section(OptimConfig, "Optimizer and learning-rate schedule.")
    strategy: str = plug("fsdp", "Training engine.", ENGINES)
    fsdp_config: FSDPConfig = section(FSDPConfig, "FSDP2 engine.")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron-core engine.")
    engine_config: dict = setting({}, OWN_ENGINE, free=True)
    grad_clip: float = setting(1.0, "Largest global gradient norm.", gt=0)
    freeze_vision_tower: bool = setting(False, FREEZE)
    trainer: TrainerConfig = section(TrainerConfig, "The loop, its machines, checkpoints and logs.")


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = section(SFTDataConfig, "Conversations.")
