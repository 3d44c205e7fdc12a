"""Settings of the data: files, prompts, lengths."""

import re
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.fields import MAX_SEED, section, setting

FILES = "(one or a list): parquet, .jsonl, or ORG/NAME[:SPLIT] of the Hugging Face hub."
HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?::([\w.-]+))??(?::([\w.-]+))?")
FILE_SUFFIXES = (".parquet", ".jsonl", ".json", ".gz", ".csv", ".arrow")


@dataclass(frozen=True)
class HubData:
    """A dataset of the Hugging Face hub as a setting names it: ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT."""

    name: str
    config: str | None
    split: str

    @classmethod
    def named(cls, text: str) -> "HubData | None":
        """Return what a setting names; None for a file that exists, and for what looks like a path of one."""
        found = HUB_NAME.fullmatch(text)
        if found is None or Path(text).is_file() or found[1].endswith(FILE_SUFFIXES):
            return None
        return cls(found[1], found[2], found[3] or "train")

    def __str__(self) -> str:
        return ":".join(part for part in (self.name, self.config, self.split) if part)


@dataclass(frozen=True)
class ImportPath:
    path: str | None = setting(None, "Python file or module that defines it; null means the built-in one.")
    name: str | None = setting(None, "Its name in that file.")


@dataclass(frozen=True)
class SamplerConfig:
    class_path: str | None = setting(
        None, "Python file or module of a sampler class; null means data.shuffle decides the order."
    )
    class_name: str | None = setting(None, "Its name in that file; called with data_source and data_config.")


@dataclass(frozen=True)
class ImageDataConfig:
    image_key: str = setting("images", "Column with the images of a prompt: a list of bytes, mappings or paths.")
    mm_processor_kwargs: dict = setting(
        {}, "Settings of the model's image processor, for instance min_pixels and max_pixels.", free=True
    )
    max_images_per_prompt: int = setting(16, "Most images of one prompt; a row with more is refused.", ge=1)


@dataclass(frozen=True)
class DataConfig(ImageDataConfig):
    train_files: list[str] = setting([], f"Training prompts {FILES}")
    val_files: list[str] = setting([], f"Validation prompts {FILES}")
    prompt_key: str = setting("prompt", "Column with the prompt: a string or a list of chat messages.")
    ground_truth_key: str | None = setting(
        None, "Column with what the reward function gets as ground_truth; null means reward_model.ground_truth."
    )
    train_batch_size: int = setting(1024, "Prompts of one step.", ge=1)
    gen_batch_size: int | None = setting(
        None,
        "Prompts of one generation batch with algorithm.filter_groups (enable, or another order than drawn); null "
        "means data.train_batch_size.",
        ge=1,
    )
    val_batch_size: int | None = setting(None, "Prompts of one validation call; null means all.", ge=1)
    train_max_samples: int = setting(-1, "Use only the first rows for training; -1 means all.", ge=-1)
    val_max_samples: int = setting(-1, "Use only the first rows for validation; -1 means all.", ge=-1)
    max_prompt_length: int = setting(512, "Longest prompt in tokens.", gt=0)
    max_response_length: int = setting(512, "Longest response in tokens.", gt=0)
    filter_overlong_prompts: bool = setting(False, "Leave out prompts longer than the limit, and log how many.")
    truncation: str = setting("error", "What to do with a longer prompt.", choices=("error", "left", "right", "middle"))
    shuffle: bool = setting(True, "Shuffle the prompts, in a new order each epoch.")
    seed: int = setting(1, "Seed of the order of prompts.", ge=0, le=MAX_SEED)
    apply_chat_template_kwargs: dict = setting({}, "Keyword arguments for the tokenizer's chat template.", free=True)
    sampler: SamplerConfig = section(SamplerConfig, "The order of prompts, such as a curriculum by difficulty.")
    custom_cls: ImportPath = section(ImportPath, "A dataset class in place of RLHFDataset.")
