"""The schema of `python -m hybridrl.main_sft`."""

from dataclasses import dataclass

from hybridrl.config.fields import section, setting
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.config.schema.workers import DYNAMIC, MICRO, FSDPConfig, ModelConfig, OptimConfig


@dataclass(frozen=True)
class SFTDataConfig:
    train_files: list[str] = setting([], "Parquet files of training conversations (one path or a list).")
    val_files: list[str] = setting([], "Parquet files of validation conversations (one path or a list).")
    messages_key: str = setting("messages", "Column with the conversation: a list of {role, content}.")
    train_batch_size: int = setting(256, "Conversations of one optimizer step.", ge=1)
    micro_batch_size_per_gpu: int | None = setting(None, MICRO, gt=0)
    use_dynamic_bsz: bool = setting(True, DYNAMIC)
    max_token_len_per_gpu: int = setting(16384, "Token budget of one micro-batch per process, a hard cap.", gt=0)
    max_length: int = setting(1024, "Longest conversation in tokens.", gt=0)
    truncation: str = setting("error", "What to do with a longer one.", choices=("error", "left", "right", "filter"))
    shuffle: bool = setting(True, "Shuffle the conversations, in a new order each epoch.")
    seed: int = setting(1, "Seed of the order.", ge=0)


@dataclass(frozen=True)
class SFTConfig:
    data: SFTDataConfig = section(SFTDataConfig, "Conversations.")
    model: ModelConfig = section(ModelConfig, "The model.")
    optim: OptimConfig = section(OptimConfig, "Optimizer and learning-rate schedule.")
    fsdp_config: FSDPConfig = section(FSDPConfig, "FSDP2 engine.")
    grad_clip: float = setting(1.0, "Largest global gradient norm.", gt=0)
    trainer: TrainerConfig = section(TrainerConfig, "The loop, its machines, checkpoints and logs.")
